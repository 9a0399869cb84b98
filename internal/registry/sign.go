// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"math"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
)

// AllUsers stands for every user.
const AllUsers = math.MaxUint32

// PodmanSigns returns a signal that is notified when a binding appears by which a container
// of Podman may have started, of root (0), of a user, or of [AllUsers]. Podman itself says nothing unless
// its service runs, and that is not started to ask.
func (r *Registry) PodmanSigns(user uint32) schedule.Signal {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.signs == nil {
		r.signs = make(map[uint32]schedule.Signal)
	}
	if r.signs[user] == nil {
		r.signs[user] = schedule.NewSignal()
	}
	return r.signs[user]
}

// sign notifies those for whom a new binding is a sign.
func (r *Registry) sign(b *port.Binding) {
	if len(r.signs) == 0 || !ofPodman(b) {
		return
	}
	for user, s := range r.signs {
		// A container of root's engine may run as any user.
		if user == b.Hints.User || user == AllUsers || user == 0 && inPodmans(b.Hints.Paths) {
			s.Notify()
		}
	}
}

// ofPodman reports whether a binding looks like one of a container of Podman: of a program
// that holds or relays the ports of these, of their cgroups, or of their NAT rules.
func ofPodman(b *port.Binding) bool {
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
