// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Target is one host address of one port.
type Target struct {
	port.Slot // protocol and host port
	Host      netip.Addr
}

// AddrPort returns the host address with the port.
func (t Target) AddrPort() netip.AddrPort { return netip.AddrPortFrom(t.Host, t.Port) }

// Compare orders targets by port, protocol and address.
func (t Target) Compare(o Target) int {
	key := func(t Target) port.Key { return port.Key{Protocol: t.Protocol, Port: t.Port, Address: t.Host} }
	return key(t).Compare(key(o))
}

// Targets holds a value for each of a set of targets, by slot and host address.
type Targets[V any] map[port.Slot]map[netip.Addr]V

// Get returns the value of t, if it has one.
func (m Targets[V]) Get(t Target) (V, bool) {
	v, ok := m[t.Slot][t.Host]
	return v, ok
}

// Put sets the value of t.
func (m Targets[V]) Put(t Target, v V) {
	if m[t.Slot] == nil {
		m[t.Slot] = make(map[netip.Addr]V)
	}
	m[t.Slot][t.Host] = v
}

// Delete removes t.
func (m Targets[V]) Delete(t Target) {
	delete(m[t.Slot], t.Host)
	if len(m[t.Slot]) == 0 {
		delete(m, t.Slot)
	}
}

// Of returns the targets of slots, sorted.
func (m Targets[V]) Of(slots ...port.Slot) []Target {
	var out []Target
	for _, s := range slots {
		for h := range m[s] {
			out = append(out, Target{s, h})
		}
	}
	slices.SortFunc(out, Target.Compare)
	return out
}

// Wish is an entry that a peer is to have: a host address and where it leads.
type Wish struct {
	Target
	// Key is the publication that is served there. The zero key stands for none:
	// nothing is reported of such an entry.
	Key port.Key
	// Remote is what the peer connects to. An entry with another one is removed
	// before it is added again.
	Remote string
}

// Claim returns the claim that a wish is for.
func (w Wish) Claim() Claim { return Claim{w.Key, w.AddrPort()} }

// Peer is what a Driver needs to know of a peer and to ask of it.
type Peer interface {
	// Wishes returns the entries that the peer is to have of a slot. It asks
	// Book.Decide who gets which address, and reports what the peer cannot reach.
	Wishes(ctx context.Context, slot port.Slot) []Wish
	// Known reports whether the peer need not be asked for an entry: it has it, or
	// its answer is known. Known then reports the outcome.
	Known(w Wish) bool
	// Remove takes entries back, in order, and ends at the first error. It calls
	// Driver.Removed for each that is gone. Known is false of one that was asked
	// for, whatever the answer.
	Remove(ctx context.Context, targets []Target) error
	// Add asks for entries, in order, and ends at the first error. It calls
	// Driver.Answer or Driver.Refused for each that was answered, and Known is true
	// of it from then on. Others may have been added all the same.
	Add(ctx context.Context, wishes []Wish) error
}

// Driver makes a peer's entries those that are wanted, and remembers which of
// them are its own. It is not safe for concurrent use.
type Driver struct {
	*Book
	bridges *Bridges // nil for none
	memory  Memory
	log     *slog.Logger
	ours    Targets[string] // the remote that was asked for
	peak    compact.Peak    // of ours
	unsaved bool            // ours is not what is saved

	wake     schedule.Signal
	bridged  map[use]struct{}       // bridges that the current Apply asked for
	unopened map[port.Slot]struct{} // slots of those that could not be opened
	pause    schedule.Backoff
	retry    *time.Timer // notifies wake; nil for none
}

// Pauses between attempts to open a bridge.
const (
	bridgeRetryMin = time.Second
	bridgeRetryMax = time.Minute
)

// NewDriver returns a driver of what an earlier agent left according to its
// memory. Bridges may be nil; else wake asks for an Apply that tries again to open
// those that could not be opened.
func NewDriver(m Memory, bridges *Bridges, wake schedule.Signal, log *slog.Logger) *Driver {
	d := &Driver{
		Book: NewBook(), bridges: bridges, memory: m, log: log, ours: make(Targets[string]), wake: wake,
		bridged: make(map[use]struct{}), unopened: make(map[port.Slot]struct{}),
		pause: schedule.Backoff{Min: bridgeRetryMin, Max: bridgeRetryMax},
	}
	if bridges != nil {
		bridges.notify(wake)
	}
	entries, err := m.Load()
	if err != nil {
		log.Warn("unknown which entries of the peer an earlier agent left", "err", err)
	}
	for _, e := range entries {
		d.ours.Put(Target{port.Slot{Protocol: e.Protocol, Port: e.Host.Port()}, e.Host.Addr()}, e.Remote)
	}
	return d
}

// Verify forgets the entries of ours that the peer does not have with their remote.
func (d *Driver) Verify(has func(t Target, remote string) bool) {
	for slot, hosts := range d.ours {
		for h, remote := range hosts {
			if t := (Target{slot, h}); !has(t, remote) {
				d.Removed(t)
				d.Dirty()[slot] = struct{}{}
			}
		}
	}
}

// MarkAll makes every slot dirty that is wanted or has an entry of ours.
func (d *Driver) MarkAll() {
	d.Book.MarkAll()
	for slot := range d.ours {
		d.Dirty()[slot] = struct{}{}
	}
}

// Ours reports whether an entry is one of ours.
func (d *Driver) Ours(t Target) bool {
	_, ok := d.ours.Get(t)
	return ok
}

// Answer reports what became of an entry.
func (d *Driver) Answer(w Wish, state port.State, reason port.Reason) {
	if w.Key != (port.Key{}) {
		d.Report(w.Claim(), state, reason)
	}
}

// Refused notes that the peer refused an entry: it is not ours.
func (d *Driver) Refused(w Wish, state port.State, reason port.Reason) {
	d.Removed(w.Target)
	d.Answer(w, state, reason)
}

// Removed notes that an entry of ours is gone.
func (d *Driver) Removed(t Target) {
	d.ours.Delete(t)
	d.unsaved = true
}

// Apply makes the peer's entries of all dirty slots what they must be. Entries
// and bridges are removed first, so that new ones find their ports free. After an
// error of the peer the slots that are not done stay dirty, and what was not
// answered is pending.
func (d *Driver) Apply(ctx context.Context, p Peer) error {
	if d.bridges != nil {
		maps.Copy(d.unopened, d.bridges.takeBroken()) // not at once, if it fails again and again
	}
	slots := slices.SortedFunc(maps.Keys(d.Dirty()), compareSlots)
	d.keepBridges(slots, func(u use) bool { return d.wins(u.slot, u.key) })
	var wishes []Wish
	var gone []Target
	for _, slot := range slots {
		want := p.Wishes(ctx, slot)
		wishes = append(wishes, want...)
		for h, remote := range d.ours[slot] {
			if !slices.ContainsFunc(want, func(w Wish) bool { return w.Host == h && w.Remote == remote }) {
				gone = append(gone, Target{slot, h})
			}
		}
		delete(d.Dirty(), slot)
	}
	slices.SortFunc(gone, Target.Compare)
	slices.SortFunc(wishes, func(a, b Wish) int { return a.Compare(b.Target) })
	err := p.Remove(ctx, gone)
	d.markUndone(gone)
	if err == nil {
		wishes = d.plan(p, wishes)
		err = p.Add(ctx, wishes)
	}
	if err != nil {
		d.pending(p, wishes, err)
	}
	d.save()
	d.keepBridges(slots, func(u use) bool {
		_, ok := d.bridged[u]
		return ok
	})
	d.bridged = compact.Clear(d.bridged)
	if d.peak.Passed(len(d.ours)) {
		d.ours = compact.Map(d.ours)
	}
	d.planRetry()
	return err
}

// wins reports whether a publication gets a host address of a slot.
func (d *Driver) wins(slot port.Slot, k port.Key) bool {
	for _, winner := range d.Decide(slot) {
		if winner == k {
			return true
		}
	}
	return false
}

// keepBridges closes the bridges of slots, which are sorted, that are not needed.
func (d *Driver) keepBridges(slots []port.Slot, needed func(use) bool) {
	if d.bridges == nil {
		return
	}
	d.bridges.Keep(func(slot port.Slot, k port.Key, is4 bool) bool {
		_, among := slices.BinarySearchFunc(slots, slot, compareSlots)
		return !among || needed(use{slot, k, is4})
	})
}

// planRetry has Apply called again if bridges could not be opened.
func (d *Driver) planRetry() {
	if d.retry != nil {
		d.retry.Stop()
		d.retry = nil
	}
	if len(d.unopened) == 0 {
		d.pause.Reset()
		return
	}
	maps.Copy(d.Dirty(), d.unopened)
	d.unopened = compact.Clear(d.unopened)
	d.retry = time.AfterFunc(d.pause.Next(), d.wake.Notify)
}

// markUndone marks the slots of entries that could not be removed.
func (d *Driver) markUndone(gone []Target) {
	for _, t := range gone {
		if _, ok := d.ours.Get(t); ok {
			d.Dirty()[t.Slot] = struct{}{}
		}
	}
}

// plan returns the entries that the peer must be asked for. It saves them as ours
// before: asking may be the last thing that the agent does.
func (d *Driver) plan(p Peer, wishes []Wish) []Wish {
	wishes = slices.DeleteFunc(wishes, p.Known)
	for _, w := range wishes {
		d.ours.Put(w.Target, w.Remote)
		d.unsaved = true
	}
	d.save()
	return wishes
}

// pending reports the entries that the peer did not answer for, because of err.
func (d *Driver) pending(p Peer, wishes []Wish, err error) {
	for _, w := range wishes {
		if !p.Known(w) {
			d.Answer(w, port.Pending, port.Because(port.PeerFailed, err.Error()))
			d.Dirty()[w.Slot] = struct{}{}
		}
	}
}

// Leave removes all entries of ours at the end.
func (d *Driver) Leave(ctx context.Context, p Peer) {
	targets := d.ours.Of(slices.Collect(maps.Keys(d.ours))...)
	if len(targets) == 0 {
		return
	}
	if err := p.Remove(ctx, targets); err != nil {
		d.log.Warn("could not remove the entries of the peer", "err", err)
	}
	d.save()
}

// Bridge makes sure that p is served for slot at a port of side (0 for any), to which the
// peer connects, and returns where. Otherwise it returns what
// is in the way; reason says why the peer needs a bridge to reach p. Only Peer.Wishes
// calls it.
func (d *Driver) Bridge(ctx context.Context, slot port.Slot, p port.Publication, side Side, number uint16, reason port.Reason) (addr netip.AddrPort, problem port.Reason) {
	if d.bridges == nil {
		return addr, reason
	}
	if p.Address.IsLoopback() && !d.bridges.o.Loopback {
		return addr, port.Join(reason, port.Because(port.NeedsBridge))
	}
	d.bridged[use{slot, p.Key, side.At.Is4()}] = struct{}{}
	addr, err := d.bridges.Open(ctx, slot, p, side, number)
	if err != nil {
		d.unopened[slot] = struct{}{}
		problem = port.Join(reason, port.Because(port.NoBridge, side.At.String(), err.Error()))
	}
	return addr, problem
}

// KeepBridges closes the bridges to publications that are no longer wanted, while
// there is no peer.
func (d *Driver) KeepBridges() {
	if d.bridges != nil {
		d.bridges.Keep(func(_ port.Slot, k port.Key, _ bool) bool { return d.Wanted(k) })
	}
}

// Reset resets the connections through bridges to publications that a rule forbids.
// It may be called from any goroutine.
func (d *Driver) Reset(keys []port.Key) {
	if d.bridges != nil {
		d.bridges.Reset(keys)
	}
}

// Close closes the bridges. Apply must not be called any more.
func (d *Driver) Close() {
	if d.retry != nil {
		d.retry.Stop()
	}
	if d.bridges != nil {
		d.bridges.Close()
	}
}

// save notes which entries are ours, if that changed.
func (d *Driver) save() {
	if !d.unsaved {
		return
	}
	d.unsaved = false
	var entries []Entry
	for slot, hosts := range d.ours {
		for h, remote := range hosts {
			entries = append(entries, Entry{Protocol: slot.Protocol, Host: netip.AddrPortFrom(h, slot.Port), Remote: remote})
		}
	}
	if err := d.memory.Save(entries); err != nil {
		d.log.Warn("cannot save which entries of the peer are ours", "err", err)
	}
}

func compareSlots(a, b port.Slot) int {
	return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
}
