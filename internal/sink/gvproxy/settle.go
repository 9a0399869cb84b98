// SPDX-License-Identifier: Apache-2.0

package gvproxy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/sink/peer"
)

// An entry that the peer refused is tried again, ever more seldom.
const (
	retryFirst = time.Second
	retryMax   = time.Minute
)

// byHost is what one slot has, by host address.
type byHost[T any] map[netip.Addr]T

// target is one host address of one slot (protocol and host port).
type target struct {
	slot port.Slot
	host netip.Addr
}

func (t target) addrPort() netip.AddrPort { return netip.AddrPortFrom(t.host, t.slot.Port) }

func get[T any](m map[port.Slot]byHost[T], t target) (T, bool) {
	v, ok := m[t.slot][t.host]
	return v, ok
}

func put[T any](m map[port.Slot]byHost[T], t target, v T) {
	if m[t.slot] == nil {
		m[t.slot] = make(byHost[T])
	}
	m[t.slot][t.host] = v
}

func drop[T any](m map[port.Slot]byHost[T], t target) {
	delete(m[t.slot], t.host)
	if len(m[t.slot]) == 0 {
		delete(m, t.slot)
	}
}

func sorted[T any](m byHost[T]) []netip.Addr {
	return slices.SortedFunc(maps.Keys(m), netip.Addr.Compare)
}

// entry is one forward of the peer, as it writes it.
type entry struct{ local, remote string }

// fault is why an entry is not there.
type fault struct {
	state  port.State
	reason string
	remote string
	pause  time.Duration
	next   time.Time
}

// parse makes a target of an entry of the list. What is neither tcp nor udp is
// none of our business.
func parse(f forward) (target, bool) {
	p, err := port.ParseProtocol(f.Protocol)
	if err != nil {
		return target{}, false
	}
	i := strings.LastIndexByte(f.Local, ':')
	if i < 0 {
		return target{}, false
	}
	n, err := strconv.ParseUint(f.Local[i+1:], 10, 16)
	if err != nil {
		return target{}, false
	}
	host := netip.IPv6Unspecified() // no address is all addresses
	switch text := strings.Trim(f.Local[:i], "[]"); text {
	case "":
	case "localhost":
		host = port.Loopback(netip.IPv4Unspecified())
	default:
		if host, err = netip.ParseAddr(text); err != nil {
			return target{}, false
		}
		host = host.Unmap()
	}
	return target{port.Slot{Protocol: p, Port: uint16(n)}, host}, true
}

// adopt takes over the peer's list. Of a peer that is new, refusals of another
// one say nothing.
func (s *Sink) adopt(all []forward, fresh bool) {
	clear(s.have)
	for _, f := range all {
		if t, ok := parse(f); ok {
			put(s.have, t, entry{f.Local, f.Remote})
		}
	}
	if fresh {
		clear(s.faults)
	}
	for slot, hosts := range s.ours {
		for h, remote := range hosts {
			t := target{slot, h}
			if e, ok := get(s.have, t); !ok || e.remote != remote {
				drop(s.ours, t) // the peer restarted, or somebody else has taken it
				s.unsaved = true
				s.book.Dirty()[slot] = struct{}{}
			}
		}
	}
	s.listed = true
}

// settle makes the peer's entries of all dirty slots what they must be: first
// what is gone goes, then what is new comes.
func (s *Sink) settle(ctx context.Context, a *api) (port.Outcomes, error) {
	slots := peer.SortedSlots(s.book.Dirty())
	type wish struct {
		target
		key    port.Key
		remote string
	}
	var wishes []wish
	var gone []target
	for _, slot := range slots {
		granted := byHost[port.Key](s.book.Decide(slot))
		want := make(byHost[string])
		for _, h := range sorted(granted) {
			t, k := target{slot, h}, granted[h]
			remote, why := s.remote(ctx, a, s.book.Publication(k), t)
			if why != "" {
				s.book.Report(peer.Claim{Key: k, Host: t.addrPort()}, port.Failed, why)
				continue
			}
			want[h] = remote
			wishes = append(wishes, wish{t, k, remote})
		}
		for h, remote := range s.ours[slot] {
			if want[h] != remote {
				gone = append(gone, target{slot, h})
			}
		}
		for h := range s.faults[slot] {
			if _, ok := want[h]; !ok {
				drop(s.faults, target{slot, h})
			}
		}
	}
	for _, t := range gone {
		if err := s.unexpose(ctx, a, t); err != nil {
			return s.broken(ctx, a, err)
		}
	}
	var plan []wish
	for _, w := range wishes {
		if s.stands(w.target, w.key, w.remote) {
			continue
		}
		put(s.ours, w.target, w.remote) // saved before the peer is asked: it may be the last that we do
		s.unsaved = true
		plan = append(plan, w)
	}
	s.save()
	left := make(map[port.Slot]struct{})
	var failed error
	for _, w := range plan {
		c := peer.Claim{Key: w.key, Host: w.addrPort()}
		if failed == nil {
			failed = s.expose(ctx, a, w.target, c, w.remote)
		}
		if failed != nil {
			s.book.Report(c, port.Pending, failed.Error())
			left[w.slot] = struct{}{}
		}
	}
	s.save()
	for _, slot := range slots {
		if _, ok := left[slot]; !ok {
			delete(s.book.Dirty(), slot)
		}
	}
	s.schedule()
	s.keepBridges()
	if failed != nil {
		return s.broken(ctx, a, failed)
	}
	return s.book.Outcomes(), nil
}

// broken ends a settle that came to no end: Run looks at the peer, and what is
// dirty is done after it.
func (s *Sink) broken(ctx context.Context, a *api, err error) (port.Outcomes, error) {
	s.save()
	if ctx.Err() != nil {
		return s.book.Outcomes(), fmt.Errorf("%s: %w", a.text, err)
	}
	s.log.Debug("the peer must be looked at", "peer", a.text, "err", err)
	s.listed = true // all that is wanted is looked at again
	s.look.Notify()
	return s.book.Outcomes(), nil
}

// stands says what there is to say of an entry for which the peer is not asked.
func (s *Sink) stands(t target, k port.Key, remote string) bool {
	c := peer.Claim{Key: k, Host: t.addrPort()}
	if e, ok := get(s.have, t); ok {
		if e.remote == remote {
			s.book.Report(c, port.Active, "") // ours, or just what we would ask for
		} else {
			s.book.Report(c, port.Conflict, fmt.Sprintf("the peer forwards it to %q already", e.remote))
		}
		drop(s.faults, t)
		return true
	}
	// Somebody else's entry for all addresses may serve this one too.
	for _, wild := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		if e, ok := get(s.have, target{t.slot, wild}); ok && e.remote == remote && (wild.Is4() == t.host.Is4() || strings.HasPrefix(e.local, ":")) {
			s.book.Report(c, port.Active, "")
			return true
		}
	}
	if f, ok := get(s.faults, t); ok && f.remote == remote && time.Now().Before(f.next) {
		s.book.Report(c, f.state, f.reason)
		return true
	}
	return false
}

// expose asks for one entry. A refusal is an outcome; any other error is the
// peer's.
func (s *Sink) expose(ctx context.Context, a *api, t target, c peer.Claim, remote string) error {
	local := t.addrPort().String()
	err := a.expose(ctx, t.slot.Protocol, local, remote)
	var no *refusal
	switch {
	case err == nil:
		put(s.have, t, entry{local, remote})
		drop(s.faults, t)
		s.book.Report(c, port.Active, "")
		return nil
	case !errors.As(err, &no):
		return err // it may have been done: ours until a list says otherwise
	case strings.Contains(no.text, "proxy already running"):
		return errors.New("the peer has forwards that its list did not show")
	}
	drop(s.ours, t)
	s.unsaved = true
	f, _ := get(s.faults, t)
	f.state, f.reason = explain(no, t)
	f.remote = remote
	f.pause = min(max(2*f.pause, retryFirst), s.o.retryMax)
	f.next = time.Now().Add(f.pause)
	put(s.faults, t, f)
	s.book.Report(c, f.state, f.reason)
	return nil
}

// explain turns the peer's words into an outcome. They are Go's and the
// operating system's, of Linux, macOS or Windows.
func explain(no *refusal, t target) (port.State, string) {
	has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(no.text, w) })
	}
	switch {
	case has("address already in use", "Only one usage of each socket address"):
		return port.Conflict, fmt.Sprintf("another program of the host holds %s", t.addrPort())
	case has("permission denied", "forbidden by its access permissions"):
		why := "the host may have reserved it"
		if t.slot.Port < 1024 {
			why = "ports below 1024 may need an administrator: a rule can give it another host port"
		}
		return port.Failed, fmt.Sprintf("the host does not let the peer listen on %s: %s", t.addrPort(), why)
	case has("cannot assign requested address", "can't assign requested address", "not valid in its context"):
		return port.Failed, fmt.Sprintf("%s is no address of the host", t.host)
	}
	return port.Failed, "the peer " + no.Error()
}

// unexpose takes back what is ours, even if it is not known to be there: the
// answer to an expose may have been lost.
func (s *Sink) unexpose(ctx context.Context, a *api, t target) error {
	local := t.addrPort().String()
	if e, ok := get(s.have, t); ok {
		local = e.local
	}
	err := a.unexpose(ctx, t.slot.Protocol, local)
	var no *refusal
	if err != nil && (!errors.As(err, &no) || !strings.Contains(no.text, "proxy not found")) {
		return err
	}
	drop(s.have, t)
	drop(s.ours, t)
	s.unsaved = true
	return nil
}

// remote is what the peer connects to for a publication, or why it cannot: it
// knows one address of the guest, and IPv4 alone. What is served elsewhere gets a
// bridge, at a port that the kernel chooses, so that it is in nobody's way.
func (s *Sink) remote(ctx context.Context, a *api, p port.Publication, t target) (remote, why string) {
	guest := a.guestAddr()
	switch {
	case t.slot.Port == 0:
		return "", "the peer cannot choose a free port: a rule must name one"
	case direct(p, guest):
		return netip.AddrPortFrom(guest, p.Port).String(), ""
	case s.o.Bridges == nil:
		return "", alone(p)
	}
	at, err := s.o.Bridges.Open(ctx, p, netip.PrefixFrom(guest, 24), 0)
	if err != nil {
		return "", fmt.Sprintf("%s, and there is no bridge from %s: %v", alone(p), guest, err)
	}
	return at.String(), ""
}

// direct reports whether the peer reaches a publication at the guest's address.
func direct(p port.Publication, guest netip.Addr) bool {
	return !p.Inner() && (p.Address == netip.IPv4Unspecified() || p.Address == netip.IPv6Unspecified() && p.DualStack || p.Address == guest)
}

// alone says why the peer cannot connect to a publication that needs a bridge.
func alone(p port.Publication) string {
	if p.Inner() {
		return "only programs of the guest meet its NAT rule"
	}
	return fmt.Sprintf("the guest serves %s alone, which the peer cannot connect to", p.Address)
}

// keepBridges closes the bridges that nothing needs any more.
func (s *Sink) keepBridges() {
	if s.o.Bridges != nil {
		s.o.Bridges.Keep(s.book.Wanted)
	}
}

// schedule tells Run when the next entry is to be tried again.
func (s *Sink) schedule() {
	var at time.Time
	for slot, hosts := range s.faults {
		for _, f := range hosts {
			if at.IsZero() || f.next.Before(at) {
				at = f.next
			}
		}
		s.book.Dirty()[slot] = struct{}{}
	}
	s.mu.Lock()
	changed := !s.retry.Equal(at)
	s.retry = at
	s.mu.Unlock()
	if changed {
		s.plan.Notify()
	}
}

// save notes which entries are ours, if that changed.
func (s *Sink) save() {
	if !s.unsaved {
		return
	}
	var entries []peer.Entry
	for slot, hosts := range s.ours {
		for h, remote := range hosts {
			entries = append(entries, peer.Entry{Protocol: slot.Protocol, Host: netip.AddrPortFrom(h, slot.Port), Remote: remote})
		}
	}
	if err := s.o.Memory.Save(entries); err != nil {
		s.log.Warn("cannot note which forwards are ours", "err", err)
	}
	s.unsaved = false
}
