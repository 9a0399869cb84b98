// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"time"
)

// AutoSink lets the agent choose its sinks by the product it runs in.
const AutoSink = "auto"

// NoSink has the agent list ports, and publish none.
const NoSink = "none"

// Listener configures the sink of that name.
type Listener struct {
	Settle time.Duration `key:"settle" flag:"listener-settle" kind:"duration" min:"10ms" max:"1m" help:"how long a port must have no local server before the listener sink opens it"`
	UDP    bool          `key:"udp" flag:"listener-udp" kind:"bool" help:"open UDP ports with the listener sink, too"`
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
