// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/procnet"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// Ports of this test: sockets of the guest, what engines declare, and NAT rules.
const (
	firstPort, ports = 20000, 24
	enginePort       = 20100
	rulePort         = 21000
	lastPort         = 21999
)

// endpoint is where a server is reached.
type endpoint struct {
	network string // "tcp" or "udp"
	netip.AddrPort
}

func (e endpoint) String() string { return e.network + " " + e.AddrPort.String() }

type endpoints map[endpoint]bool

// shownAt adds the address of the host at which a port of a guest's wildcard or loopback
// address is shown.
func (s endpoints) shownAt(e endpoint) {
	host := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if e.Addr().Is6() {
		host = netip.IPv6Loopback()
	}
	s[endpoint{e.network, netip.AddrPortFrom(host, e.Port())}] = true
}

// without lists what is in s and not in o.
func (s endpoints) without(o endpoints) (out []string) {
	for k := range s {
		if !o[k] {
			out = append(out, k.String())
		}
	}
	slices.Sort(out)
	return out
}

// listening reads from the kernel which sockets of a namespace serve: TCP ones that
// listen and UDP ones without a peer, as far as their ports are of this test.
func listening(in *netns.Space) (endpoints, error) {
	out := endpoints{}
	err := in.Do(func() error {
		for _, table := range procnet.Tables() {
			serving := uint8(procnet.Listen)
			if table.Protocol == port.UDP {
				serving = procnet.Close
			}
			err := procnet.Read("/proc/thread-self/net/"+table.Name, func(s procnet.Socket) {
				if p := s.Local.Port(); s.State == serving && p >= firstPort && p <= lastPort {
					out[endpoint{table.Protocol.String(), s.Local}] = true
				}
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	return out, err
}

// Rules of this test as iptables-save and nft print them: of the output hook, so that each counts once.
var (
	iptablesRule = regexp.MustCompile(`(?m)^-A OUTPUT -p (tcp|udp) .*--dport (\d+) -j REDIRECT`)
	nftRule      = regexp.MustCompile(`(tcp|udp) dport (\d+) redirect`)
	nftElement   = regexp.MustCompile(`()\b(\d+) : \d+`)
)

// redirected reads from the kernel which ports of the guest NAT rules redirect: these are
// shown though nobody may serve them.
func (c *chaos) redirected() (endpoints, error) {
	out := endpoints{}
	for _, list := range []struct {
		command string
		rules   []*regexp.Regexp
	}{
		{"iptables-save -t nat", []*regexp.Regexp{iptablesRule}},
		{"nft list table ip chaos", []*regexp.Regexp{nftRule, nftElement}},
	} {
		args := strings.Fields(list.command)
		text, err := c.command("", args[0], args[1:]...)
		if err != nil {
			return nil, err
		}
		for _, re := range list.rules {
			for _, m := range re.FindAllStringSubmatch(text, -1) {
				network := m[1]
				if network == "" {
					network = "tcp"
				}
				if n, err := strconv.ParseUint(m[2], 10, 16); err == nil && n >= rulePort && n <= lastPort {
					out[endpoint{network, netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(n))}] = true
				}
			}
		}
	}
	return out, nil
}

// declared reads from kernel and engines what is shown beside sockets.
func (c *chaos) declared() (endpoints, error) {
	out, err := c.redirected()
	if err != nil {
		return nil, err
	}
	for _, e := range c.engines {
		more, err := e.ports()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.name, err)
		}
		c.result.Engines[e.name] = max(c.result.Engines[e.name], len(more))
		for k := range more {
			out[k] = true
		}
	}
	return out, nil
}

// converge waits until the host listens at what the guest serves, by the word of the kernel
// and the engines.
func (c *chaos) converge(f fault) error {
	healed := time.Now()
	var missing, extra []string
	var began time.Time // of a comparison
	for pause := 2 * time.Millisecond; time.Since(healed) < c.patience; pause = min(2*pause, 100*time.Millisecond) {
		if err := c.revive(f); err != nil {
			return err
		}
		declared, err := c.declared()
		for looked := time.Now(); err == nil && time.Since(looked) < pause; rest(began) {
			began = time.Now()
			if missing, extra, err = c.compare(declared); err == nil && len(missing)+len(extra) == 0 {
				c.result.Faults[f.name] = append(c.result.Faults[f.name], time.Since(healed))
				return nil
			}
		}
		if err := c.ctx.Err(); err != nil {
			return err
		}
		if err != nil { // an engine may not answer for a while
			missing = []string{err.Error()}
			time.Sleep(pause)
		}
	}
	c.differ("after %s: missing %v, not served %v", f.name, missing, extra)
	return nil
}

// rest leaves the processor to others for three times as long as the caller used it: an emulated one is slow.
func rest(began time.Time) { time.Sleep(max(2*time.Millisecond, 3*time.Since(began))) }

func (c *chaos) compare(declared endpoints) (missing, extra []string, err error) {
	served, err := listening(c.guest)
	if err != nil {
		return nil, nil, err
	}
	shown, err := listening(c.outside)
	if err != nil {
		return nil, nil, err
	}
	want := endpoints{}
	for _, set := range []endpoints{served, declared} {
		for e := range set {
			want.shownAt(e)
		}
	}
	return want.without(shown), shown.without(want), nil
}
