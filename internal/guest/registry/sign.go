// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"math"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// AllUsers stands for every user.
const AllUsers = math.MaxUint32

// PodmanSigns returns a signal that is notified when a binding appears by which a container
// of Podman may have started, of root (0), of a user, or of [AllUsers]; also for one that is
// there. Podman itself says nothing unless its service runs, and that is not started to ask.
func (r *Registry) PodmanSigns(user uint32) schedule.Signal {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.signs == nil {
		r.signs = make(map[uint32]schedule.Signal)
	}
	if s := r.signs[user]; s != nil {
		return s
	}
	s := schedule.NewSignal()
	r.signs[user] = s
	for _, ms := range r.slots {
		for _, m := range ms {
			if ofPodman(m.binding) && isFor(user, m.binding) {
				s.Notify()
			}
		}
	}
	return s
}

// sign notifies those for whom a new binding is a sign.
func (r *Registry) sign(b *kept) {
	if len(r.signs) == 0 || !ofPodman(b) {
		return
	}
	for user, s := range r.signs {
		if isFor(user, b) {
			s.Notify()
		}
	}
}

// isFor reports whether a binding of Podman may be of a container of that user's engine. One
// of root's engine may run as any user.
func isFor(user uint32, b *kept) bool {
	return user == b.Hints.User || user == AllUsers || user == 0 && inPodmans(b.Hints.Paths)
}

// ofPodman reports whether a binding looks like one of a container of Podman: of a program
// that holds or relays the ports of these, of their cgroups, or of their NAT rules.
func ofPodman(b *kept) bool {
	if b.Maker == port.MakerNetavark || inPodmans(b.Hints.Paths) {
		return true
	}
	if b.Owner.Kind != port.OwnerProcess {
		return false
	}
	switch relayName(b.Owner.Name) {
	case "conmon", "podman", "rootlessport", "slirp4netns", "pasta", "passt":
		return true
	}
	return false
}

// inPodmans reports whether one of these cgroups is of a container of Podman.
func inPodmans(paths []string) bool {
	return slices.ContainsFunc(paths, func(p string) bool { return strings.Contains(p, "libpod") })
}
