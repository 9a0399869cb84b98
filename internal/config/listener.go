// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strconv"
	"time"
)

// AutoSink lets the agent choose its sinks by the product it runs in.
const AutoSink = "auto"

// NoSink has the agent list ports, and publish none.
const NoSink = "none"

// Listener configures the sink of that name.
type Listener struct {
	Settle time.Duration // how long a port must have no local server, 10ms to 1m
	UDP    bool          // whether UDP ports are opened too
}

func (c *Agent) listenerFields() []field {
	return []field{
		one("listener.settle", "listener-settle", "duration", &c.Listener.Settle,
			duration(10*time.Millisecond, time.Minute, false), stringOf,
			"how long a port must have no local server before the listener sink opens it"),
		one("listener.udp", "listener-udp", boolKind, &c.Listener.UDP, truth, strconv.FormatBool,
			"open UDP ports with the listener sink, too"),
		one("bridgeLoopback", "bridge-loopback", boolKind, &c.BridgeLoopback, truth, strconv.FormatBool,
			"let the peers of gvproxy and vtunnel reach ports of the guest's loopback"),
		one("reportUnpublished", "report-unpublished", boolKind, &c.ReportUnpublished, truth, strconv.FormatBool,
			"send the host, for display, the ports that are not published with their owners, and the NAT rules that are not understood"),
	}
}

// boolKind is the kind of a field that is true or false.
const boolKind = "bool"

func truth(s string) (bool, error) {
	switch s {
	case "true", "yes":
		return true, nil
	case "false", "no":
		return false, nil
	}
	return false, fmt.Errorf("%q: want true or false", s)
}

// alone refuses auto and none beside other sinks.
func alone(names []string) error {
	for _, n := range names {
		if len(names) > 1 && (n == AutoSink || n == NoSink) {
			return fmt.Errorf("%q: cannot be combined with other sinks", n)
		}
	}
	return nil
}
