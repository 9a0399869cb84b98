// SPDX-License-Identifier: Apache-2.0

package gvproxy

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Pauses between attempts at an entry that the peer refused.
const (
	retryMin = time.Second
	retryMax = time.Minute

	// The same at a wildcard that the peer refused while it serves narrower addresses in
	// its place: these are removed for a moment each time.
	narrowMin = 30 * time.Second
	narrowMax = 10 * time.Minute
)

// entry is one forward of the peer, as it writes it.
type entry struct{ local, remote string }

// refused is an entry that the peer refused, and when to try again.
type refused struct {
	state  port.State
	reason port.Reason
	remote string
	pause  schedule.Backoff
	next   time.Time

	narrowed bool // narrower addresses are served in place of this wildcard
}

// parse makes a target of an entry of the list. Entries that are neither tcp nor
// udp are not ours.
func parse(f forward) (peer.Target, bool) {
	p, err := port.ParseProtocol(f.Protocol)
	if err != nil {
		return peer.Target{}, false
	}
	i := strings.LastIndexByte(f.Local, ':')
	if i < 0 {
		return peer.Target{}, false
	}
	n, err := strconv.ParseUint(f.Local[i+1:], 10, 16)
	if err != nil {
		return peer.Target{}, false
	}
	host := netip.IPv6Unspecified() // no address is all addresses
	switch text := strings.Trim(f.Local[:i], "[]"); text {
	case "":
	case "localhost":
		host = port.Loopback(netip.IPv4Unspecified())
	default:
		if host, err = netip.ParseAddr(text); err != nil {
			return peer.Target{}, false
		}
		host = host.Unmap()
	}
	return peer.Target{Slot: port.Slot{Protocol: p, Port: uint16(n)}, Host: host}, true
}

// adopt takes over the peer's list. Refusals of the last peer do not count for a
// new one.
func (s *Sink) adopt(all []forward, fresh bool) {
	was := s.have
	s.have = make(peer.Targets[entry])
	for _, f := range all {
		if t, ok := parse(f); ok {
			s.have.Put(t, entry{f.Local, f.Remote})
		}
	}
	if fresh {
		clear(s.refused)
	}
	s.noteGone(was)
	clear(s.unsure)
	// The peer may have restarted, or somebody else may have taken the address.
	s.driver.Verify(func(t peer.Target, remote string) bool {
		e, ok := s.have.Get(t)
		return ok && e.remote == remote
	})
	s.listed = true
}

// session is the sink with the peer that one Sync uses. It implements peer.Peer.
type session struct {
	*Sink
	api *api
}

// Wishes implements peer.Peer.
func (s session) Wishes(ctx context.Context, slot port.Slot) []peer.Wish {
	var out []peer.Wish
	paused := s.pauses[slot]
	delete(s.pauses, slot)
	for h, k := range s.decide(slot) {
		w := peer.Wish{Target: peer.Target{Slot: slot, Host: h}, Key: k}
		p := s.driver.Publication(k)
		if s.podman && byPodman(p) {
			s.leaveToPodman(w, p, paused)
			continue
		}
		if s.podman && s.leaveToStart(w, p) {
			continue
		}
		var problem port.Reason
		if w.Remote, problem = s.remote(ctx, p, w.Target); !problem.IsZero() {
			s.driver.Answer(w, port.Failed, problem)
			continue
		}
		out = append(out, w)
	}
	for _, t := range s.refused.Of(slot) {
		if !slices.ContainsFunc(out, func(w peer.Wish) bool { return w.Target == t }) {
			s.refused.Delete(t)
		}
	}
	return out
}

// decide returns who gets which host address of a slot. A wildcard that was refused is
// tried again when its time has come, or nobody asks for narrower addresses any more.
func (s session) decide(slot port.Slot) map[netip.Addr]port.Key {
	waits := func(t peer.Target) bool {
		r, _ := s.refused.Get(t)
		return port.IsWildcard(t.Host) && time.Now().Before(r.next)
	}
	refused := s.refused.Of(slot)
	if !slices.ContainsFunc(refused, waits) {
		s.driver.Widen(slot)
	}
	winners := s.driver.Decide(slot)
	for _, t := range refused {
		if r, _ := s.refused.Get(t); r.narrowed && len(winners) == 1 {
			s.refused.Delete(t)
		}
	}
	return winners
}

// remote is what the peer connects to for a publication, or why it cannot: it
// knows one IPv4 address of the guest. What is served elsewhere gets a bridge, at a
// port that the kernel chooses.
func (s session) remote(ctx context.Context, p port.Publication, t peer.Target) (remote string, problem port.Reason) {
	guest := s.api.guestAddr()
	switch {
	case t.Port == 0:
		return "", port.Because(port.PeerPicksNone)
	case direct(p, guest) || s.mapped(p):
		return netip.AddrPortFrom(guest, p.Port).String(), port.Reason{}
	}
	reason := port.Because(port.GuestServes, p.Address.String())
	if p.Inner() {
		reason = port.Because(port.InnerRule)
	}
	at, problem := s.driver.Bridge(ctx, t.Slot, p, peer.Side{At: guest, From: peer.From(s.api.peerAddr())}, 0, reason)
	return at.String(), problem
}

// direct reports whether the peer reaches a publication at the guest's address.
func direct(p port.Publication, guest netip.Addr) bool {
	return !p.Inner() && (p.Address == netip.IPv4Unspecified() || p.Address == guest)
}

// mapped reports whether the peer reaches the server of p, which is of IPv6, by its IPv4 half.
func (s session) mapped(p port.Publication) bool {
	k, ok := p.Key.OtherFamily()
	if !ok || p.Inner() || p.Address != netip.IPv6Unspecified() {
		return false
	}
	half := s.driver.Publication(k)
	return s.driver.Wanted(k) && direct(half, netip.Addr{}) && half.Owner.Same(p.Owner) &&
		slices.ContainsFunc(half.Origins, func(o port.OriginInfo) bool { return o.Mapped && o.Withheld.IsZero() })
}

// Known implements peer.Peer.
func (s session) Known(w peer.Wish) bool {
	if e, ok := s.have.Get(w.Target); ok {
		if e.remote == w.Remote { // ours, or just what we would ask for
			s.driver.Answer(w, port.Active, port.Reason{})
		} else {
			s.driver.Answer(w, port.Conflict, port.Because(port.PeerForwards, strconv.Quote(e.remote)))
		}
		s.refused.Delete(w.Target)
		return true
	}
	// An entry of another program for all addresses may serve this one too.
	if s.wider(w.Target, w.Remote) {
		s.driver.Answer(w, port.Active, port.Reason{})
		return true
	}
	if s.inGrace(w) {
		return true
	}
	r, ok := s.refused.Get(w.Target)
	if !ok || r.remote != w.Remote || !time.Now().Before(r.next) {
		return false
	}
	s.narrow(w, r)
	s.driver.Answer(w, r.state, r.reason)
	return true
}

// Add implements peer.Peer.
func (s session) Add(ctx context.Context, wishes []peer.Wish) error {
	for _, w := range wishes {
		if err := s.add(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

// add asks for one entry. A refusal is an outcome; any other error is the peer's.
func (s session) add(ctx context.Context, w peer.Wish) error {
	local := w.AddrPort().String()
	err := s.api.expose(ctx, w.Protocol, local, w.Remote)
	var no *refusal
	switch {
	case err == nil:
		s.have.Put(w.Target, entry{local, w.Remote})
		s.refused.Delete(w.Target)
		s.driver.Answer(w, port.Active, port.Reason{})
		return nil
	case !errors.As(err, &no):
		s.unsure.Put(w.Target, struct{}{})
		return err // the entry may be there: ours until a list says otherwise
	case strings.Contains(no.text, "proxy already running"):
		if _, unsure := s.unsure.Get(w.Target); !unsure {
			s.driver.Removed(w.Target) // it is another program's
		}
		return errors.New("the peer has forwards that its list did not show")
	}
	r, ok := s.refused.Get(w.Target)
	if !ok {
		r.pause = schedule.Backoff{Min: retryMin, Max: s.o.retryMax}
	}
	r.state, r.reason = explain(no, w.Target)
	r.remote = w.Remote
	if !s.narrow(w, r) {
		r.next = time.Now().Add(r.pause.Next())
		s.refused.Put(w.Target, r)
	}
	s.driver.Refused(w, r.state, r.reason)
	if r.state == port.Conflict { // perhaps by a new entry of another program
		s.relist.Notify()
	}
	return nil
}

// narrow has narrower addresses asked for in place of a wildcard that was refused, if
// there are any, and plans when to try the wildcard again.
func (s session) narrow(w peer.Wish, r refused) bool {
	if !s.driver.Narrow(w.Claim()) {
		return false
	}
	if !r.narrowed {
		r.narrowed, r.pause = true, schedule.Backoff{Min: s.o.narrowMin, Max: narrowMax}
	}
	r.next = time.Now().Add(r.pause.Next())
	s.refused.Put(w.Target, r)
	s.again = true
	return true
}

// explain turns the peer's error text into an outcome. The text comes from Go and
// from Linux, macOS or Windows.
func explain(no *refusal, t peer.Target) (port.State, port.Reason) {
	has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(no.text, w) })
	}
	switch {
	case has("address already in use", "Only one usage of each socket address"):
		return port.Conflict, port.Because(port.PeerInUse, t.AddrPort().String())
	case has("permission denied", "forbidden by its access permissions"):
		code := port.PeerReserved
		if t.Port < 1024 {
			code = port.PeerPrivileged
		}
		return port.Failed, port.Because(code, t.AddrPort().String())
	case has("cannot assign requested address", "can't assign requested address", "not valid in its context"):
		return port.Failed, port.Because(port.PeerLacks, t.Host.String())
	}
	return port.Failed, port.Because(port.PeerRefuses, no.Error())
}

// Remove implements peer.Peer. It also asks for entries that are not known to be
// there: the answer to an earlier call may have been lost.
func (s session) Remove(ctx context.Context, targets []peer.Target) error {
	for _, t := range targets {
		local := t.AddrPort().String()
		if e, ok := s.have.Get(t); ok {
			local = e.local
		}
		err := s.api.unexpose(ctx, t.Protocol, local)
		var no *refusal
		if err != nil && (!errors.As(err, &no) || !strings.Contains(no.text, "proxy not found")) {
			return err
		}
		s.have.Delete(t)
		s.driver.Removed(t)
	}
	return nil
}

// planRetry has Run wake Sync when the next entry is to be tried again.
func (s *Sink) planRetry() {
	var at time.Time
	again := func(slot port.Slot, next time.Time) {
		if at.IsZero() || next.Before(at) {
			at = next
		}
		s.driver.Dirty()[slot] = struct{}{}
	}
	for slot, hosts := range s.refused {
		for _, r := range hosts {
			again(slot, r.next)
		}
	}
	for slot, z := range s.pauses {
		again(slot, z.again)
	}
	if s.setRetry(at) {
		s.retryMoved.Notify()
	}
}
