// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
)

// nftTable makes the table with this test's own rules and map.
const nftTable = `table ip chaos {
	map redirects { type inet_service : inet_service; }
	chain own {}
	chain prerouting { type nat hook prerouting priority -110; jump own; }
	chain output { type nat hook output priority -110; jump own; }
}
add rule ip chaos own fib daddr type local meta l4proto tcp redirect to tcp dport map @redirects
`

// change changes something in the guest.
func (c *chaos) change() error {
	c.result.Operations++
	port := uint16(c.rng.IntN(ports))
	switch c.rng.IntN(12) {
	case 0:
		return c.iptables(port)
	case 1:
		return c.nft(port+100, "add rule ip chaos own fib daddr type local tcp dport %d redirect to :%d", "")
	case 2:
		return c.nft(port+200, "add element ip chaos redirects { %d : %d }", "delete element ip chaos redirects { %d : %d }")
	case 3:
		if len(c.engines) > 0 {
			e := c.engines[c.rng.IntN(len(c.engines))]
			e.change(c.rng)
			return nil
		}
	case 4, 5, 6:
		return c.socket("udp", firstPort+port)
	}
	return c.socket("tcp", firstPort+port)
}

// socket opens or closes a server.
func (c *chaos) socket(network string, port uint16) error {
	addr := netip.MustParseAddr([]string{"0.0.0.0", "127.0.0.1", "::1"}[c.rng.IntN(3)])
	at := endpoint{network, netip.AddrPortFrom(addr, port)}
	if s := c.servers[at]; s != nil {
		_ = s.Close()
		delete(c.servers, at)
		return nil
	}
	s, err := serve(c.guest, at)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil
	}
	if err == nil {
		c.servers[at] = s
	}
	return err
}

// toggle adds a redirected port or removes it.
func (c *chaos) toggle(from uint16) (added bool) {
	if c.rules[from] {
		delete(c.rules, from)
		return false
	}
	c.rules[from] = true
	return true
}

// iptables adds or removes a rule from a port of its own to that of a server.
func (c *chaos) iptables(n uint16) error {
	action := "-D"
	if c.toggle(rulePort + n) {
		action = "-A"
	}
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		args := fmt.Sprintf("-w -t nat %s %s -p tcp -m addrtype --dst-type LOCAL --dport %d -j REDIRECT --to-ports %d", action, chain, rulePort+n, firstPort+n)
		if _, err := c.command("", "iptables", strings.Fields(args)...); err != nil {
			return err
		}
	}
	return nil
}

// nft adds a rule or element from a port of its own to that of a server, or removes it. Rules have no name by
// which they could be removed: their handle is looked up.
func (c *chaos) nft(n uint16, add, remove string) error {
	from, to := rulePort+n, firstPort+n%100
	script := fmt.Sprintf(add, from, to)
	if !c.toggle(from) {
		if script = fmt.Sprintf(remove, from, to); remove == "" {
			handle, err := c.nftHandle(from)
			if err != nil {
				return err
			}
			script = "delete rule ip chaos own handle " + handle
		}
	}
	_, err := c.command(script, "nft", "-f", "-")
	return err
}

func (c *chaos) nftHandle(port uint16) (string, error) {
	text, err := c.command("", "nft", "-a", "list", "chain", "ip", "chaos", "own")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(text) {
		rule, handle, ok := strings.Cut(line, " # handle ")
		if ok && strings.Contains(rule, fmt.Sprintf(" dport %d ", port)) {
			return strings.TrimSpace(handle), nil
		}
	}
	return "", fmt.Errorf("no rule for port %d in\n%s", port, text)
}
