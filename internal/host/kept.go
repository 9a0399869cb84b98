// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// keptFor is how long a port is kept that the first snapshot of a process lacks: longer than most
// engines take to start.
const keptFor = 30 * time.Second

// kept are the publications of a guest that the snapshot of a new process lacks, which is
// incomplete.
// Their listeners stay open and connections wait a while. A connection
// that waited is requested of the guest as any other, which refuses what it does not publish;
// it ends if the port is withdrawn, or if rules deny what is published there by then.
type kept struct {
	mu       sync.Mutex
	released map[port.Key]chan struct{} // of each, closed when it is not kept any more
}

func newKept() *kept {
	return &kept{released: make(map[port.Key]chan struct{})}
}

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

// add reports whether the key was not kept before.
func (k *kept) add(key port.Key) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.released[key] != nil {
		return false
	}
	k.released[key] = make(chan struct{})
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

// keeps reports whether a publication that an incomplete snapshot lacks is kept: an earlier process of
// the same guest published it, and this one has not read all of its sources. A process that only lost its link knows what it published.
// h.mu is held.
func (g *guest) keeps(k port.Key) bool {
	if g.sender.Name != g.peer.Name || g.denies(k) || len(g.pubs[k].claims) == 0 {
		return false
	}
	first := !g.connected && g.sender.Identity != g.peer.Identity // snapshot of this process
	return first || g.kept.has(k)
}

// denies reports whether a rule of the guest denies a port, by its current report. h.mu is held.
func (g *guest) denies(k port.Key) bool {
	p, reported := g.others[k]
	return reported && p.Decision.Reason.Kind() == port.Denies
}

// keep keeps a publication that the snapshot lacks. h.mu is held.
func (g *guest) keep(k port.Key) {
	pub := g.pubs[k]
	if !g.kept.add(k) {
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
func (g *guest) denyKept(ctx context.Context, reported []port.Fact) {
	if g.kept.len() == 0 {
		return
	}
	for _, p := range reported {
		if p.Decision.Reason.Kind() == port.Denies && g.kept.has(p.Key) {
			g.remove(p.Key)
		}
	}
	g.h.commit(ctx)
}
