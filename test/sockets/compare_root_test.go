// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package sockets

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// Classes of differences.
const (
	ghost        = "ghost"         // published, and no socket is there
	miss         = "miss"          // a socket, and it is not published
	wrongAddress = "wrong address" // published at another address
	wrongOwner   = "wrong owner"   // a process that does not hold the socket
	wrongState   = "wrong state"   // withheld and reachable, or the other way round
	wrongServer  = "wrong server"  // a connection meets another socket, or none
)

type difference struct{ class, text string }

func (d difference) Error() string { return d.class + ": " + d.text }

// slot is a port of one protocol.
type slot struct {
	protocol port.Protocol
	port     uint16
}

func slotOf(k port.Key) slot { return slot{k.Protocol, k.Port} }

// served is what the kernel has at one key.
type served struct {
	serving, bound []held
	optional       bool // the method need not see it
}

func (s *served) ids(into map[string]bool) {
	for _, h := range s.serving {
		into[strconv.Itoa(h.ID)] = true
	}
}

// States of include/net/tcp_states.h.
const (
	stateClose  = 7
	stateListen = 10
)

// diag returns the keys at which sockets of the guest serve, as socket diag has them.
func (w *world) diag() (map[port.Key]int, error) {
	found := make(map[port.Key]int)
	var errs []error
	w.guest.do(func() {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			tcp, err := netlink.SocketDiagTCP(family)
			errs = append(errs, err)
			udp, err := netlink.SocketDiagUDP(family)
			errs = append(errs, err)
			for _, s := range tcp {
				if s.State == stateListen {
					found[diagKey(port.TCP, s)]++
				}
			}
			for _, s := range udp {
				if s.State == stateClose {
					found[diagKey(port.UDP, s)]++
				}
			}
		}
	})
	return found, errors.Join(errs...)
}

func diagKey(p port.Protocol, s *netlink.Socket) port.Key {
	a, _ := netip.AddrFromSlice(s.ID.Source)
	return port.Key{Protocol: p, Address: a.Unmap(), Port: s.ID.SourcePort}
}

// truth returns what the kernel has in the guest.
func (r *run) truth() (map[port.Key]*served, error) {
	all := make(map[port.Key]*served)
	clients := make(map[port.Key]int)
	serving := make(map[port.Key]int)
	for _, a := range r.actors {
		rep, _ := a.send(order{Do: "look"}, -1)
		if a.where != r.guest {
			continue
		}
		for _, h := range rep.Sockets {
			k := port.Key{Protocol: port.TCP, Address: h.Local.Addr(), Port: h.Local.Port()}
			if h.Type == unix.SOCK_DGRAM {
				k.Protocol = port.UDP
			}
			if h.Connected || h.Local.Port() == 0 || r.released[h.ID] {
				continue
			}
			if r.client[h.ID] {
				clients[k]++
				continue
			}
			if k.Protocol == port.UDP || h.Listening {
				serving[k]++
			}
			r.serves(all, k, h)
			if k.Address == netip.IPv6Unspecified() && !h.V6Only {
				k.Address = netip.IPv4Unspecified()
				r.serves(all, k, h)
			}
		}
	}
	have, err := r.diag()
	if err != nil {
		return nil, err
	}
	for k, n := range clients {
		serving[k] += n
	}
	if !maps.Equal(have, serving) {
		return nil, fmt.Errorf("socket diag has %v, and the actors have %v", have, serving)
	}
	return all, nil
}

// serves adds a socket to what the kernel has at a key.
func (r *run) serves(all map[port.Key]*served, k port.Key, h held) {
	s := all[k]
	if s == nil {
		s = new(served)
		all[k] = s
	}
	switch {
	case k.Protocol == port.UDP || h.Listening:
		s.serving = append(s.serving, h)
		if r.unseen[h.ID] {
			s.optional = true
		}
	case h.MPTCP || !r.boundSeen:
		s.optional = true
		fallthrough
	default:
		s.bound = append(s.bound, h)
	}
}

// comparison collects differences.
type comparison struct {
	*run
	want  map[port.Key]*served
	have  map[port.Key]status.Publication
	found []error
}

func (c *comparison) differ(class string, k port.Key, format string, args ...any) {
	if !c.vague[slotOf(k)] {
		c.found = append(c.found, difference{class, k.String() + " " + fmt.Sprintf(format, args...)})
	}
}

// compare returns how kernel, list and connections differ. Of the ports in touched
// it makes connections; owners says that owners are compared too.
func (r *run) compare(touched map[slot]bool, owners bool) error {
	want, err := r.truth()
	if err != nil {
		return err
	}
	list, err := r.list()
	if err != nil {
		return err
	}
	c := &comparison{run: r, want: want, have: make(map[port.Key]status.Publication)}
	for _, p := range list.Publications {
		c.have[p.Key] = p
	}
	c.tables(owners)
	if len(c.found) == 0 {
		for _, s := range slices.SortedFunc(maps.Keys(touched), func(a, b slot) int {
			return cmp.Or(cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.port, b.port))
		}) {
			c.connections(s)
		}
	}
	return errors.Join(c.found...)
}

func (c *comparison) tables(owners bool) {
	for k, p := range c.have {
		s, ok := c.want[k]
		switch {
		case !ok && c.subflow(k, p):
		case !ok && c.moved(k):
			c.differ(wrongAddress, k, "is published (%v, %s)", p.State, p.Reason)
		case !ok:
			c.differ(ghost, k, "is published (%v, %s)", p.State, p.Reason)
		case s.optional:
		default:
			c.publication(k, p, s, owners)
		}
	}
	for k, s := range c.want {
		if _, ok := c.have[k]; !ok && !s.optional {
			c.differ(miss, k, "serving %v, bound %v", s.serving, s.bound)
		}
	}
}

// subflow reports whether a publication is the port that the first subflow of an MPTCP
// socket reserves: getsockname(2) returns the socket's own address, which a refused
// connection changes while that of the subflow stays.
func (c *comparison) subflow(k port.Key, p status.Publication) bool {
	for other, s := range c.want {
		mptcp := func(h held) bool { return h.MPTCP }
		if slotOf(other) == slotOf(k) && strings.HasPrefix(p.Reason, onlyBound) && slices.ContainsFunc(s.bound, mptcp) {
			return true
		}
	}
	return false
}

// moved reports whether a socket is missing at the port of a key that has none.
func (c *comparison) moved(k port.Key) bool {
	for other := range c.want {
		if _, published := c.have[other]; !published && slotOf(other) == slotOf(k) {
			return true
		}
	}
	return false
}

const onlyBound = "bound, not listening"

func (c *comparison) publication(k port.Key, p status.Publication, s *served, owners bool) {
	if n := len(s.serving) + len(s.bound); len(p.Origins) != n {
		c.differ(wrongState, k, "has %d origins %v, want %d", len(p.Origins), p.Origins, n)
	}
	if bound := strings.HasPrefix(p.Reason, onlyBound); bound != (len(s.serving) == 0) {
		c.differ(wrongState, k, "is %v (%s), serving %v", p.State, p.Reason, s.serving)
	}
	if owners && !c.owned(p, s) {
		c.differ(wrongOwner, k, "is owned by %v, actors are %v", p.Owner, c.pids())
	}
}

// owned reports whether the owner of a publication is an actor that has, or gave away,
// one of its sockets. An actor that lives may be named for what it gave away.
func (c *comparison) owned(p status.Publication, s *served) bool {
	pid, err := strconv.Atoi(p.Owner.ID)
	if err != nil {
		return false
	}
	for _, h := range slices.Concat(s.serving, s.bound) {
		for i, a := range c.actors {
			if a.pid == pid && c.hadBy[h.ID][i] {
				return true
			}
		}
	}
	return false
}

func (r *run) pids() (pids []int) {
	for _, a := range r.actors {
		pids = append(pids, a.pid)
	}
	return pids
}

// connections compares what clients meet in the guest and through the host at a port.
func (c *comparison) connections(s slot) {
	if c.vague[s] {
		return
	}
	shadowed := false
	for k, sv := range c.want {
		if slotOf(k) != s || len(sv.serving) == 0 || sv.optional {
			continue
		}
		ids := make(map[string]bool)
		sv.ids(ids)
		reached, other := c.reached(k, ids)
		p := c.have[k]
		published := p.State == port.Active || p.State == port.Conflict
		switch {
		case reached && !published:
			c.differ(wrongState, k, "is reached in the guest and is %v (%s)", p.State, p.Reason)
		case !reached && other:
			shadowed = true
		case !reached && published:
			c.differ(wrongState, k, "is not reached in the guest and is %v", p.State)
		}
	}
	for _, loopback := range []string{"127.0.0.1", "::1"} {
		c.throughHost(s, netip.AddrPortFrom(netip.MustParseAddr(loopback), s.port), shadowed)
	}
}

// reached connects in the guest to all addresses at which sockets of a key may answer.
// It reports whether one of them did, and whether another socket did.
func (c *comparison) reached(k port.Key, ids map[string]bool) (yes, other bool) {
	candidates := []netip.Addr{k.Address}
	if k.Address.IsUnspecified() {
		candidates = c.local(k.Address)
	}
	for _, a := range candidates {
		switch id := c.guest.ask(k.Protocol.String(), netip.AddrPortFrom(a, k.Port)); {
		case ids[id]:
			return true, false
		case id != "":
			other = true
		}
	}
	return false, other
}

// local returns the guest's addresses that a wildcard serves.
func (r *run) local(wildcard netip.Addr) []netip.Addr {
	texts, second := []string{"127.0.0.1", address4}, second4
	if wildcard.Is6() {
		texts, second = []string{"::1", address6}, second6
	}
	if r.second {
		texts = append(texts, second)
	}
	var list []netip.Addr
	for _, text := range texts {
		list = append(list, netip.MustParseAddr(text))
	}
	return list
}

// throughHost connects to an address of the host. If shadowed, sockets of the guest
// hide each other there as well.
func (c *comparison) throughHost(s slot, at netip.AddrPort, shadowed bool) {
	ids := make(map[string]bool)
	var keys []string
	for k, p := range c.have {
		active := slices.Contains(p.HostAddresses, at)
		if slotOf(k) == s && (active || shadowed) {
			c.want[k].ids(ids)
		}
		if slotOf(k) == s && active {
			keys = append(keys, k.String())
		}
	}
	got := c.host.ask(s.protocol.String(), at)
	if len(keys) == 0 && got != "" || len(keys) > 0 && !ids[got] {
		c.found = append(c.found, difference{wrongServer, fmt.Sprintf("host %v %v leads to %q, active %v, want one of %v", s.protocol, at, got, keys, ids)})
	}
}
