// SPDX-License-Identifier: Apache-2.0

package vtunnel

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
)

// Wishes implements peer.Peer. Static entries have no publication.
func (s *Sink) Wishes(ctx context.Context, slot port.Slot) []peer.Wish {
	var out []peer.Wish
	winners := s.driver.Decide(slot)
	if slot.Protocol == port.UDP && !s.perPort {
		for h, k := range winners {
			s.driver.Answer(peer.Wish{Target: peer.Target{Slot: slot, Host: h}, Key: k}, port.Failed, port.Because(port.PeerLacksUDP))
		}
		return nil
	}
	for _, h := range slices.SortedFunc(maps.Keys(winners), netip.Addr.Compare) {
		w := peer.Wish{Target: peer.Target{Slot: slot, Host: h}, Key: winners[h], Remote: s.remote()}
		// wsl-proxy keeps its listeners by port alone, and would lose one of two. The
		// first is kept: wildcards sort before other addresses, IPv4 before IPv6.
		if s.perPort && len(out) > 0 {
			if out[0].Key != w.Key && !s.driver.Share(w.Claim(), out[0].Claim()) {
				s.driver.Answer(w, port.Conflict, port.Because(port.PeerPortTaken, out[0].Key.String()))
			}
			continue
		}
		if problem := s.unreachable(ctx, s.driver.Publication(w.Key), w.Target); !problem.IsZero() {
			s.driver.Answer(w, port.Failed, problem)
			continue
		}
		out = append(out, w)
	}
	if len(out) == 0 && slices.Contains(s.static, slot) {
		t := peer.Target{Slot: slot, Host: port.Loopback(netip.IPv4Unspecified())}
		out = append(out, peer.Wish{Target: t, Remote: s.remote()})
	}
	return out
}

// remote returns the addresses that an entry is sent with; the entry is replaced
// when they change. wsl-proxy is sent none.
func (s *Sink) remote() string {
	var out []string
	for _, c := range s.connect {
		out = append(out, c.Addr)
	}
	return strings.Join(out, ",")
}

// Known implements peer.Peer.
func (s *Sink) Known(w peer.Wish) bool {
	remote, ok := s.have.Get(w.Target)
	if !ok || remote != w.Remote {
		return false
	}
	s.answer(w)
	return true
}

// answer reports what became of an entry that the peer has.
func (s *Sink) answer(w peer.Wish) {
	if w.Protocol == port.UDP {
		s.driver.Answer(w, port.Failed, port.Because(port.PeerOneWay))
		return
	}
	s.driver.Answer(w, port.Active, port.Reason{})
}

// atOnce returns how many bindings a message may carry.
func (s *Sink) atOnce() int {
	if s.perPort {
		return maxBindings
	}
	return 1
}

// Add implements peer.Peer.
func (s *Sink) Add(ctx context.Context, wishes []peer.Wish) error {
	for part := range slices.Chunk(wishes, s.atOnce()) {
		var targets []peer.Target
		for _, w := range part {
			targets = append(targets, w.Target)
		}
		if err := s.send(ctx, encode(false, targets, s.connect)); err != nil {
			return err
		}
		for _, w := range part {
			s.have.Put(w.Target, w.Remote)
			s.answer(w)
		}
	}
	return nil
}

// Remove implements peer.Peer.
func (s *Sink) Remove(ctx context.Context, targets []peer.Target) error {
	for part := range slices.Chunk(s.removable(targets), s.atOnce()) {
		for _, t := range part { // before the answer, which may get lost
			s.have.Delete(t)
		}
		if err := s.send(ctx, encode(true, part, s.connect)); err != nil {
			return err
		}
		for _, t := range part {
			s.driver.Removed(t)
		}
	}
	return nil
}

// removable returns the targets to send for removal. Of UDP that an earlier agent asked
// vtunnel's peer for, it has nothing, and would remove the entry of TCP.
func (s *Sink) removable(targets []peer.Target) []peer.Target {
	if s.perPort {
		return targets
	}
	var out []peer.Target
	for _, t := range targets {
		if t.Protocol == port.UDP {
			s.driver.Removed(t)
			continue
		}
		out = append(out, t)
	}
	return out
}

// unreachable returns why the peer cannot reach a publication: it connects to one
// address of the guest, at the host's port. What is served elsewhere gets a
// bridge there.
func (s *Sink) unreachable(ctx context.Context, p port.Publication, t peer.Target) (problem port.Reason) {
	if t.Port == 0 {
		return port.Because(port.PeerPicksNone)
	}
	side, ok := s.reached(t.Host.Is4())
	if !ok {
		return port.Because(port.PeerFamily, s.iface, family(t.Host.Is4()))
	}
	all := port.IsWildcard(p.Address) && p.Address.Is4() == side.At.Is4()
	var reason port.Reason
	switch {
	case !all && p.Address != side.At:
		reason = port.Because(port.GuestServesAt, p.Address.String(), side.At.String())
	case t.Port != p.Port:
		reason = port.Because(port.GuestPort, strconv.Itoa(int(p.Port)), strconv.Itoa(int(t.Port)))
	case p.Inner():
		reason = port.Because(port.InnerRule)
	default:
		return port.Reason{}
	}
	_, problem = s.driver.Bridge(ctx, t.Slot, p, side, t.Port, reason)
	return problem
}

func family(is4 bool) string {
	if is4 {
		return "IPv4"
	}
	return "IPv6"
}

// reached is the address that the peer connects to for a binding of a family, and from
// where it does: wsl-proxy from the other end of a cable, whose address it does not tell;
// Windows as the guest's router, if it is that.
func (s *Sink) reached(is4 bool) (peer.Side, bool) {
	if s.perPort {
		return peer.Side{At: s.upstream, From: netip.PrefixFrom(s.upstream, 24)}, true
	}
	at, ok := first(s.nets, is4)
	if router := peer.DefaultGateway("/"); ok && at.Contains(router) {
		return peer.Side{At: at.Addr(), From: peer.From(router)}, true
	}
	return peer.Side{At: at.Addr(), From: at}, ok
}
