// SPDX-License-Identifier: Apache-2.0

package gvproxy

import (
	"cmp"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// othersGrace is how long a slot is left alone after the entry of another program is
// gone from it. A program that replaces its entry removes it first, and fails if the
// address is taken meanwhile.
const othersGrace = 10 * time.Second

// opensContainerPorts reports whether Podman opens the ports of its containers at the
// peer: in its machines, except in WSL's. With an error it may.
func opensContainerPorts(markers ...string) (bool, error) {
	for _, marker := range markers {
		kind, err := os.ReadFile(marker)
		if !errors.Is(err, fs.ErrNotExist) {
			return !strings.EqualFold(strings.TrimSpace(string(kind)), "wsl"), err
		}
	}
	return false, nil
}

// byPodman reports whether a publication is a port of one of Podman's containers.
func byPodman(p port.Publication) bool {
	return slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool {
		return o.Source == "podman" || o.Maker == port.MakerNetavark || podmanRelay(o.Program)
	})
}

// podmanRelay reports whether a program of this name holds or relays the ports of
// Podman's containers.
func podmanRelay(program string) bool {
	switch program {
	case "conmon", "pasta", "pasta.avx2", "passt", "passt.avx2", "slirp4netns":
		return true
	}
	return strings.HasPrefix(program, "rootlessport") // and its child, whose name the kernel truncates
}

// leaveToStart reports whether podman itself has opened a port a moment ago. It opens
// the ports of a container that starts, until conmon holds them. Then the wish is
// pending. Later it is a port of its own, as that of "podman system service".
func (s session) leaveToStart(w peer.Wish, p port.Publication) bool {
	var until time.Time
	for _, o := range p.Origins {
		if t := o.Since.Add(s.o.othersGrace); o.Program == "podman" && t.After(until) {
			until = t
		}
	}
	if !time.Now().Before(until) {
		return false
	}
	s.driver.Answer(w, port.Pending, port.Because(port.PodmanBegins))
	s.pauses[w.Slot] = &pause{again: until}
	return true
}

// pause is a slot with wishes that wait for other programs.
type pause struct {
	again   time.Time // when the slot is to be looked at again
	backoff schedule.Backoff
}

// leaveToPodman reports what Podman made of a port of one of its containers. While
// there is no entry, the peer is listed again from time to time. paused is the slot's
// last pause.
func (s session) leaveToPodman(w peer.Wish, p port.Publication, paused *pause) {
	remote := netip.AddrPortFrom(s.api.guestAddr(), p.Port).String()
	if s.serves(w.Target, remote) {
		s.driver.Answer(w, port.Active, port.Reason{})
		return
	}
	s.driver.Answer(w, port.Pending, port.Because(port.PodmanOpens))
	z := cmp.Or(s.pauses[w.Slot], paused)
	if z == nil || z.backoff.Min == 0 {
		z = &pause{backoff: schedule.Backoff{Min: retryMin, Max: s.o.retryMax}}
	}
	s.pauses[w.Slot] = z
	if now := time.Now(); !now.Before(z.again) {
		z.again = now.Add(z.backoff.Next())
		s.relist.Notify()
	}
}

// serves reports whether an entry of another program leads t to remote.
func (s session) serves(t peer.Target, remote string) bool {
	if e, ok := s.have.Get(t); ok {
		return e.remote == remote && !s.driver.Ours(t)
	}
	return s.wider(t, remote)
}

// wider reports whether an entry for all addresses leads t to remote.
func (s session) wider(t peer.Target, remote string) bool {
	for _, wild := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		e, ok := s.have.Get(peer.Target{Slot: t.Slot, Host: wild})
		if ok && e.remote == remote && (wild.Is4() == t.Host.Is4() || strings.HasPrefix(e.local, ":")) {
			return true
		}
	}
	return false
}

// noteGone begins the grace of slots from which entries of others are gone.
func (s *Sink) noteGone(was peer.Targets[entry]) {
	until := time.Now().Add(s.o.othersGrace)
	for slot, hosts := range was {
		for h := range hosts {
			t := peer.Target{Slot: slot, Host: h}
			if _, still := s.have.Get(t); !still && !s.driver.Ours(t) {
				s.left[slot] = until
			}
		}
	}
	for slot, until := range s.left {
		if !time.Now().Before(until) {
			delete(s.left, slot)
		}
	}
}

// inGrace reports whether the slot of a wish was another program's a moment ago. Then
// the wish is pending.
func (s session) inGrace(w peer.Wish) bool {
	until, ok := s.left[w.Slot]
	if !ok || !time.Now().Before(until) {
		return false
	}
	s.driver.Answer(w, port.Pending, port.Because(port.EntryGone, strconv.Itoa(int(w.Port))))
	s.pauses[w.Slot] = &pause{again: until}
	return true
}
