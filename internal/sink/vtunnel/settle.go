// SPDX-License-Identifier: Apache-2.0

package vtunnel

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/sink/peer"
)

// settle makes the peer know what it must of all dirty slots: first what is
// gone, then what is new, so that the new finds its port free.
func (s *Sink) settle(ctx context.Context) (port.Outcomes, error) {
	slots := peer.SortedSlots(s.book.Dirty())
	wants := make(map[port.Slot]byHost[port.Key], len(slots))
	var gone, fresh []target
	for _, slot := range slots {
		want := s.judge(ctx, slot)
		wants[slot] = want
		for _, h := range sorted(s.have[slot]) {
			if _, ok := want[h]; !ok || s.have[slot][h] == moved && !s.perPort {
				gone = append(gone, target{slot, h})
			}
		}
		for _, h := range sorted(want) {
			if t, ok := s.have[slot][h]; !ok || t != known {
				fresh = append(fresh, target{slot, h})
			}
		}
	}
	err := s.tell(ctx, true, gone)
	if err == nil {
		for _, t := range fresh {
			s.note(t, again)
		}
	}
	if len(gone)+len(fresh) > 0 {
		s.remember() // before the peer is told more: it may be the last that we do
	}
	if err == nil {
		err = s.tell(ctx, false, fresh)
	}
	for _, slot := range slots {
		if s.confirm(slot, wants[slot], err) {
			delete(s.book.Dirty(), slot)
		}
	}
	s.keepBridges()
	return s.book.Outcomes(), err
}

// tell sends what is gone or new, and notes it as far as the peer took it.
func (s *Sink) tell(ctx context.Context, remove bool, targets []target) error {
	messages, carried := encode(remove, targets, s.connect)
	for i, m := range messages {
		if err := s.send(ctx, m); err != nil {
			return err
		}
		for _, t := range carried[i] {
			if !remove {
				s.note(t, known)
				continue
			}
			delete(s.have[t.slot], t.host)
			if len(s.have[t.slot]) == 0 {
				delete(s.have, t.slot)
			}
		}
	}
	return nil
}

// confirm says what became of a slot, and reports whether the peer knows all of it.
func (s *Sink) confirm(slot port.Slot, want byHost[port.Key], err error) bool {
	done := true
	for h := range s.have[slot] {
		if _, ok := want[h]; !ok {
			done = false // not taken back yet
		}
	}
	for h, k := range want {
		t, ok := s.have[slot][h]
		sent := ok && t == known
		done = done && sent
		c := peer.Claim{Key: k, Host: netip.AddrPortFrom(h, slot.Port)}
		switch {
		case k == port.Key{}: // static
		case sent:
			s.book.Report(c, port.Active, "")
		case err != nil:
			s.book.Report(c, port.Failed, err.Error())
		}
	}
	return done
}

// judge says which host addresses of a slot the peer must serve, and for whom;
// nobody's key stands for what is static.
func (s *Sink) judge(ctx context.Context, slot port.Slot) byHost[port.Key] {
	holders := byHost[port.Key](s.book.Decide(slot))
	for h, k := range holders {
		c := peer.Claim{Key: k, Host: netip.AddrPortFrom(h, slot.Port)}
		if why := s.unreachable(ctx, s.book.Publication(k), c.Host); why != "" {
			s.book.Report(c, port.Failed, why)
			delete(holders, h)
		}
	}
	// wsl-proxy keeps its listeners by port alone: of two it would lose one. The
	// widest is chosen, and IPv4 before IPv6, as the addresses sort.
	if all := sorted(holders); s.perPort && len(all) > 1 {
		chosen := holders[all[0]]
		for _, h := range all[1:] {
			if k := holders[h]; k != chosen {
				s.book.Report(peer.Claim{Key: k, Host: netip.AddrPortFrom(h, slot.Port)}, port.Conflict,
					fmt.Sprintf("wsl-proxy has one listener for each port, and %s has it", chosen))
			}
			delete(holders, h)
		}
	}
	if len(holders) == 0 && slices.Contains(s.static, slot) {
		holders[port.Loopback(netip.IPv4Unspecified())] = port.Key{}
	}
	return holders
}

// unreachable says why the peer cannot reach a publication: it connects to one
// address of the guest, at the host's port. What is served elsewhere gets a
// bridge there.
func (s *Sink) unreachable(ctx context.Context, p port.Publication, host netip.AddrPort) string {
	if host.Port() == 0 {
		return "the peer cannot choose a free port: a rule must name one"
	}
	at, ok := s.reached(host.Addr().Is4())
	if !ok {
		return fmt.Sprintf("the peer connects to %s, which has no %s address", s.iface, family(host.Addr().Is4()))
	}
	is4 := at.Addr().Is4()
	all := p.Address == netip.IPv6Unspecified() && (!is4 || p.DualStack) || p.Address == netip.IPv4Unspecified() && is4
	why := ""
	switch {
	case !all && p.Address != at.Addr():
		why = fmt.Sprintf("the guest serves %s alone, and the peer connects to %s", p.Address, at.Addr())
	case host.Port() != p.Port:
		why = fmt.Sprintf("the guest serves port %d, and the peer connects to %d", p.Port, host.Port())
	case p.Inner():
		why = "only programs of the guest meet its NAT rule"
	}
	if why == "" || s.o.Bridges == nil {
		return why
	}
	if _, err := s.o.Bridges.Open(ctx, p, at, host.Port()); err != nil {
		return fmt.Sprintf("%s, where there is no bridge: %v", why, err)
	}
	return ""
}

func family(is4 bool) string {
	if is4 {
		return "IPv4"
	}
	return "IPv6"
}

// reached is the address that the peer connects to for a binding of a family,
// with the network that it comes from.
func (s *Sink) reached(is4 bool) (netip.Prefix, bool) {
	if s.perPort {
		return netip.PrefixFrom(s.upstream, 24), true
	}
	return first(s.nets, is4)
}
