// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// rootCgroup is the id of the root of the cgroup2 hierarchy, in which no container is.
const rootCgroup = 1

// doubt is what the bindings of a publication leave open about its owner.
type doubt struct {
	owner  time.Time // since when the owner may be another one; zero: it may not
	target time.Time // since when a NAT rule may lead to somebody else besides the owner; zero: it may not

	search    bool // for the process of a socket, of which engines know nothing
	stopped   bool // the container behind a NAT rule has stopped, and may start again
	unclaimed bool // there is a rule of kube-proxy or of a swarm, and no Service
}

// since returns when the last of the doubts began, the zero time if there is none.
func (d doubt) since() time.Time { return latest(d.owner, d.target) }

func (d doubt) and(e doubt) doubt {
	return doubt{
		latest(d.owner, e.owner), latest(d.target, e.target),
		d.search || e.search, d.stopped || e.stopped, d.unclaimed || e.unclaimed,
	}
}

// latest returns the later of two times.
func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// uncertain returns the doubt about the owner of a publication with these bindings, who is
// of that kind and known that well.
func uncertain(ms []member, kind port.OwnerKind, known precedence, all slots) (d doubt) {
	for _, m := range ms {
		switch {
		case known < container:
			d = d.and(m.uncertain(known, all))
			if kind < port.OwnerService {
				d.owner = latest(d.owner, m.lost)
			}
		case m.provisional && !claimed(ms, all):
			// The claims are stale, and this is of another container, maybe.
			d = d.and(m.uncertain(process, all))
		default:
			d = d.and(m.unnamedTarget())
		}
	}
	return d
}

// claimed reports whether an engine that is not stale names a container.
func claimed(ms []member, all slots) bool {
	return slices.ContainsFunc(ms, func(m member) bool {
		_, known := m.owner(all)
		return known == container && !m.stale()
	})
}

// since returns when the binding, or what is known of its owner, became what it is.
func (m member) since() time.Time {
	if a := m.attribution; a != nil {
		return latest(m.binding.Since, a.since)
	}
	return m.binding.Since
}

// uncertain returns the doubt about a binding of a publication whose owner is known that
// well.
func (m member) uncertain(known precedence, all slots) (d doubt) {
	b, a := m.binding, m.attribution
	switch {
	case m.declared():
		return d
	case m.nat():
		return m.ruleUncertain(known, all)
	case a != nil && a.known:
		return d
	}
	if d.search = b.Searching && known < target; d.search || a != nil && a.container || known < target && (relayed(b) || m.kubeProxy(all)) {
		d.owner = m.since()
	}
	return d
}

// ruleUncertain is uncertain for a NAT rule. What it sends to on this machine has the owner
// of the port's listener.
func (m member) ruleUncertain(known precedence, all slots) (d doubt) {
	a := m.attribution
	own := doubt{owner: m.since(), stopped: a != nil && a.left != ""}
	switch {
	case a != nil && a.known:
		own.unclaimed = known < service && (m.binding.Maker == port.MakerKubeProxy || m.binding.Maker == port.MakerSwarm)
		if m.provisional || own.unclaimed {
			return own
		}
		return d
	case known >= service:
		return m.unnamedTarget()
	case leaves(m.binding):
		d = own
	}
	for s, addr := range redirected(m.binding) {
		slot := all(s)
		ms := serving(slot, addr)
		if len(ms) == 0 {
			d = d.and(own)
			continue
		}
		owner, known := ownerOf(ms, slot, all)
		d = d.and(uncertain(ms, owner.Kind, known, all))
	}
	return d
}

// unnamedTarget is the doubt about a NAT rule of a port whose owner is known: it may
// lead to somebody else whom an engine names later. A target that has stopped does not
// prolong it, because the port is not its own.
func (m member) unnamedTarget() (d doubt) {
	if a := m.attribution; a != nil && a.unnamed {
		d.target = m.since()
	}
	return d
}

// targetDoubt is the doubt about a NAT rule that diverts what is dialled of another
// port, whose owner is known that well.
func (m member) targetDoubt(known precedence, all slots) doubt {
	if known == container {
		known = target // the rule's owner is another one
	}
	d := m.uncertain(known, all)
	return doubt{target: latest(d.since(), m.lost), stopped: d.stopped}
}

// relayed reports whether a socket may serve a container though it is not in the
// container's cgroup: its program is one by which engines relay or reserve ports,
// or it is not known which one it is.
func relayed(b *kept) bool {
	if b.Owner.Kind == port.OwnerUnknown {
		return b.Hints.Cgroup != rootCgroup
	}
	if b.Hints.Cgroup > rootCgroup && len(b.Hints.Paths) == 0 {
		return true // of a cgroup that is gone, or cannot be seen
	}
	return relays(b.Owner.Name)
}

// relays reports whether engines relay or reserve ports by a program of that name.
func relays(name string) bool {
	switch relayName(name) {
	case "docker-proxy", "dockerd", "rootlesskit", "rootlessport", "slirp4netns", "pasta", "passt", "conmon", "podman",
		"nerdctl", "sleep", "crio", "kube-proxy":
		return true
	}
	return false
}

// relayName returns the name of a program without what is added to that of some relays:
// "pasta.avx2", and "rootlesskit-doc" (docker-proxy, truncated).
func relayName(name string) string {
	if i := strings.IndexAny(name, ".-"); i > 0 && name != "docker-proxy" && name != "kube-proxy" {
		return name[:i]
	}
	return name
}
