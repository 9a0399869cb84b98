// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Pauses between lookups that fail.
const (
	retryLookupMin = time.Second
	retryLookupMax = 30 * time.Second
)

// OwnAddresses is the feed of an engine's source. It withholds what is declared at an
// address that this machine does not have, and takes that address from what is dialled:
// who may declare ports must not lead them to other machines. A Service to which its
// cluster address or its pods lead is not withheld.
type OwnAddresses struct {
	registry.Feed
	log  *slog.Logger
	kind func(netip.Addr) (netwatch.Kind, error)
	// watch is what the answers depend on.
	watch netwatch.Options

	mu       sync.Mutex
	specific map[port.Origin]judged // declared at one address, as the source reported it
	needed   chan struct{}          // closed when there is one
	need     func()
	failed   schedule.Signal // the kernel did not answer a lookup
}

// judged is a binding, and whether this machine had its address.
type judged struct {
	port.Binding
	own bool
}

// NewOwnAddresses returns a feed that reports to feed. See Run.
func NewOwnAddresses(feed registry.Feed, log *slog.Logger) *OwnAddresses {
	o := &OwnAddresses{
		Feed: feed, log: log, kind: netwatch.Classify,
		watch:    netwatch.Options{Log: log, Parts: netwatch.All, Passing: true},
		specific: make(map[port.Origin]judged), needed: make(chan struct{}),
		failed: schedule.NewSignal(),
	}
	o.need = sync.OnceFunc(func() { close(o.needed) })
	return o
}

// Run looks at the addresses again whenever addresses or routes of this machine change,
// and after a lookup that failed, until ctx ends. Most guests have no port that needs it,
// and watch nothing.
func (o *OwnAddresses) Run(ctx context.Context) {
	if schedule.Wait(ctx, time.Time{}, o.needed) != nil {
		return
	}
	var retrying sync.WaitGroup
	defer retrying.Wait()
	retrying.Go(func() { o.retry(ctx) })
	netwatch.Follow(ctx, o.watch, o.recheck)
}

// retry repeats the lookups after one that failed, until ctx ends.
func (o *OwnAddresses) retry(ctx context.Context) {
	pause := schedule.Backoff{Min: retryLookupMin, Max: retryLookupMax}
	for schedule.Wait(ctx, time.Time{}, o.failed) == nil {
		if schedule.Sleep(ctx, pause.Next()) != nil {
			return
		}
		o.recheck()
		if len(o.failed) == 0 {
			pause.Reset()
		}
	}
}

// Replace implements registry.Feed.
func (o *OwnAddresses) Replace(set []port.Binding) {
	o.mu.Lock()
	defer o.mu.Unlock()
	clear(o.specific)
	o.Feed.Replace(o.judgeAll(set))
}

// Apply implements registry.Feed.
func (o *OwnAddresses) Apply(c port.Change) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, origin := range c.Drop {
		delete(o.specific, origin)
	}
	c.Put = o.judgeAll(c.Put)
	o.Feed.Apply(c)
}

func (o *OwnAddresses) judgeAll(set []port.Binding) []port.Binding {
	out := make([]port.Binding, len(set))
	for i, b := range set {
		out[i] = o.judge(b)
	}
	return out
}

// judge returns a binding as it is reported.
func (o *OwnAddresses) judge(b port.Binding) port.Binding {
	delete(o.specific, b.Origin)
	if b.Address.IsUnspecified() || b.Address.IsLoopback() {
		return b
	}
	own := o.own(b.Address)
	o.specific[b.Origin] = judged{b, own}
	o.need()
	if own {
		return b
	}
	return withhold(b)
}

func (o *OwnAddresses) own(a netip.Addr) bool {
	kind, err := o.kind(a)
	if err != nil {
		o.log.Debug("cannot ask whose address it is; taking it for another machine's", "address", a, "err", err)
		o.failed.Notify()
	}
	return err == nil && kind == netwatch.Own
}

// withhold returns a binding at an address of another machine as it is reported. Nothing
// is dialled there. Docker and containerd take no other address than their machine's, so
// what they declare elsewhere is withheld whatever else leads to it.
func withhold(b port.Binding) port.Binding {
	if len(b.Dial) == 0 || !b.Withheld.IsZero() {
		return b
	}
	here := slices.DeleteFunc(slices.Clone(b.Dial), func(d netip.AddrPort) bool { return d.Addr() == b.Address })
	if len(here) == 0 || b.Dial[0].Addr() == b.Address && b.Owner.Kind != port.OwnerService {
		b.Withheld = port.Because(port.AddressElsewhere)
		return b
	}
	b.Dial = here
	return b
}

// recheck reports what is judged differently now.
func (o *OwnAddresses) recheck() {
	o.mu.Lock()
	defer o.mu.Unlock()
	var c port.Change
	for _, j := range o.specific {
		if o.own(j.Address) != j.own {
			c.Put = append(c.Put, j.Binding)
		}
	}
	if len(c.Put) > 0 {
		c.Put = o.judgeAll(c.Put)
		o.Feed.Apply(c)
	}
}
