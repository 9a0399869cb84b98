// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

// keptFor is how long a port is kept that the first snapshot of a process lacks: longer than most
// engines take to start.
const keptFor = 30 * time.Second

// kept are the publications of a guest that the snapshot of a new process lacks, which is
// incomplete, or comes before the process is asked for them by name.
// Their listeners stay open and connections wait a while; see wire.Snapshot. A connection
// that waited is requested of the guest as any other, which refuses what it does not publish;
// it ends if the port is withdrawn, or if rules deny what is published there by then.
type kept struct {
	mu       sync.Mutex
	released map[port.Key]chan struct{} // of each, closed when it is not kept any more
	named    map[port.Key]struct{}      // those that are there by their names alone
}

func newKept() *kept {
	return &kept{released: make(map[port.Key]chan struct{}), named: make(map[port.Key]struct{})}
}

// maxNamed is how many names of kept publications are looked at for each message: more than a
// host and the rules of a guest can ask for.
const maxNamed = 2 * wire.MaxDemands

func (k *kept) has(key port.Key) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.released[key] != nil
}

func (k *kept) len() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.released)
}

func (k *kept) keys() []port.Key {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.released))
}

// namedKeys returns those that are there by their names alone, none if there are too many.
func (k *kept) namedKeys() []port.Key {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.named) > maxNamed {
		return nil
	}
	return slices.Collect(maps.Keys(k.named))
}

// add reports whether the key was not kept before.
func (k *kept) add(key port.Key, named bool) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.released[key] != nil {
		return false
	}
	k.released[key] = make(chan struct{})
	if named {
		k.named[key] = struct{}{}
	}
	return true
}

// release reports whether the key was kept.
func (k *kept) release(key port.Key) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	released, was := k.released[key]
	if was {
		close(released)
		delete(k.released, key)
		delete(k.named, key)
	}
	return was
}

// await waits up to hold until the key is not kept, and reports whether it had to.
func (k *kept) await(ctx context.Context, key port.Key, hold time.Duration) bool {
	k.mu.Lock()
	released := k.released[key]
	k.mu.Unlock()
	if released == nil {
		return false
	}
	timer := time.NewTimer(hold)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-released:
	}
	return true
}

// keeps reports whether a publication that a snapshot lacks is kept: an earlier process of
// the same guest published it, and this one has not read all of its sources, or was not told
// yet that it is asked for by name. A process that only lost its link knows what it published.
// h.mu is held.
func (g *guest) keeps(s *wire.Snapshot, k port.Key) bool {
	p := g.pubs[k]
	if len(s.Incomplete) == 0 && !g.awaits(p) || g.sender.Name != g.peer.Name || g.denies(k) || len(p.claims) == 0 {
		return false
	}
	first := !g.connected && g.sender.Identity != g.peer.Identity // snapshot of this process
	return first || g.kept.has(k)
}

// denies reports whether a rule of the guest denies a port, by its current report. h.mu is held.
func (g *guest) denies(k port.Key) bool {
	p, reported := g.others[k]
	_, stale := g.stale[k]
	return reported && !stale && denied(p)
}

// denied reports whether an unpublished port stays so.
func denied(p wire.UnpublishedPort) bool { return !p.Pending && !p.Withheld }

// keep keeps a publication that the snapshot lacks. h.mu is held.
func (g *guest) keep(k port.Key) {
	pub := g.pubs[k]
	if !g.kept.add(k, pub.isDemanded()) {
		return
	}
	if g.keptEnd.IsZero() { // once, so that a guest that restarts again and again keeps nothing for ever
		g.keptEnd = time.Now().Add(keptFor)
		g.h.timers.Notify()
	}
	g.h.touch(pub)
	g.h.changed[pub] = struct{}{}
}

// unkeep ends that a publication is kept, which is then as any other. h.mu is held.
func (g *guest) unkeep(pub *publication) {
	if !g.kept.release(pub.Key) {
		return
	}
	g.h.touch(pub)
	g.h.changed[pub] = struct{}{}
	if g.kept.len() == 0 {
		g.keptEnd = time.Time{}
	}
}

// removeReplaced removes what is kept of names that lead elsewhere now, of all that this host asks
// for. h.mu is held; the caller commits.
func (g *guest) removeReplaced() {
	keys := g.kept.namedKeys()
	if len(keys) == 0 {
		return
	}
	kept := make(map[string]int) // publications, by name
	for _, k := range keys {
		for _, d := range g.pubs[k].wire.Demands {
			kept[d]++
		}
	}
	elsewhere := func(d string) bool { return g.demands.there[d] > kept[d] }
	for _, k := range keys {
		p := g.pubs[k]
		left := slices.ContainsFunc(p.wire.Demands, func(d string) bool { return !elsewhere(d) && slices.Contains(g.demands.asked, d) })
		if !left && slices.ContainsFunc(p.wire.Demands, elsewhere) {
			for _, d := range p.wire.Demands {
				kept[d]--
			}
			g.remove(k)
		}
	}
}

// removeKept withdraws what is still kept. h.mu is held; the caller commits.
func (g *guest) removeKept(why string) {
	keys := g.kept.keys()
	if len(keys) == 0 {
		return
	}
	g.log.Info("closing ports that the guest has not reported again", "reason", why, "publications", len(keys))
	for _, k := range keys {
		g.remove(k)
	}
}

// limitKept withdraws what is kept if it takes the room of what the guest publishes.
// h.mu is held; the caller commits.
func (g *guest) limitKept() {
	if g.overLimit() || g.admitted+len(g.waiting) > g.h.opt.MaxListeners {
		g.removeKept("limit of this guest reached")
	}
}

// denyKept withdraws what is kept and denied by a rule of the guest. h.mu is held.
func (g *guest) denyKept(ctx context.Context, m *wire.Unpublished) {
	if g.kept.len() == 0 {
		return
	}
	for _, p := range m.Put {
		if denied(p) && g.kept.has(p.Key) {
			g.remove(p.Key)
		}
	}
	g.h.commit(ctx)
}
