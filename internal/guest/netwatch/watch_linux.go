// SPDX-License-Identifier: Apache-2.0

package netwatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	gather    = 50 * time.Millisecond // changes come in bursts
	listShare = 10                    // listing takes at most one part in so many of the time
	restMost  = 5 * time.Second       // between two listings, whatever they cost
	retryMin  = 100 * time.Millisecond
	retryMax  = 5 * time.Second
	longLife  = time.Minute // of subscriptions that were no failure
)

var errNotListed = errors.New("not listed yet")

// Options say what a Watcher watches.
type Options struct {
	// Log receives lost notifications. Nil discards them.
	Log   *slog.Logger
	NetNS string // path of the network namespace; empty is the process's own
	Parts Part   // 0 means All

	// Passing asks for Changed also after what came and went between two snapshots.
	Passing bool

	buffer int // bytes of a socket's receive buffer; 0 is the kernel's default
}

// Watcher keeps a snapshot of a network namespace current. It is safe for
// concurrent use.
type Watcher struct {
	opt     Options
	changed schedule.Signal

	mu   sync.Mutex // guards what follows
	snap Snapshot
	err  error
}

// New returns a watcher; it does nothing until Run.
func New(opt Options) *Watcher {
	if opt.Parts == 0 {
		opt.Parts = All
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	return &Watcher{opt: opt, changed: schedule.NewSignal(), err: errNotListed}
}

// Changed receives after what Snapshot returns has changed, and as Passing says.
func (w *Watcher) Changed() <-chan struct{} { return w.changed }

// Snapshot returns what was read last. An error says why that may be out of
// date, or that nothing was read yet.
func (w *Watcher) Snapshot() (Snapshot, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.snap, w.err
}

// Run keeps the snapshot current until ctx ends, when it returns. It owns every
// goroutine that it starts, and tries again what fails.
func (w *Watcher) Run(ctx context.Context) {
	pause := schedule.Backoff{Min: retryMin, Max: retryMax}
	for ctx.Err() == nil {
		began := time.Now()
		err := w.watch(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > longLife {
			pause.Reset()
		}
		if errors.Is(err, ErrLost) { // a listing follows the next subscription
			w.opt.Log.Info("network notifications were lost", "err", err)
		}
		w.set(Snapshot{}, err)
		_ = schedule.Sleep(ctx, pause.Next())
	}
}

// Follow calls changed whenever there may be a change, until ctx ends: with the first
// snapshot, after those that differ, and as Passing says, but also when the namespace
// cannot be watched, so that changes may have been missed.
func Follow(ctx context.Context, opt Options, changed func()) {
	w := New(opt)
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { w.Run(ctx) })
	for schedule.Wait(ctx, time.Time{}, w.Changed()) == nil {
		if _, err := w.Snapshot(); err != nil && !errors.Is(err, ErrLost) {
			w.opt.Log.Warn("cannot watch the network; retrying", "err", err)
		}
		changed()
	}
}

// set states what was read, or why it could not be.
func (w *Watcher) set(s Snapshot, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case err == nil && w.err == nil && w.snap.equal(&s):
		if w.opt.Passing {
			w.changed.Notify()
		}
		return
	case err != nil && w.err != nil && err.Error() == w.err.Error():
		return
	}
	if w.err = err; err == nil {
		w.snap = s
	}
	w.changed.Notify()
}

// watch subscribes, lists, and lists again after changes that matter, until ctx
// ends or a subscription breaks.
func (w *Watcher) watch(ctx context.Context) error {
	sub, err := w.subscribe()
	if err != nil {
		return err
	}
	defer sub.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	planned := true // the timer runs
	var rested time.Time
	for {
		matters := false
		select {
		case <-ctx.Done():
			return nil
		case u, ok := <-sub.links:
			if !ok {
				return sub.lost()
			}
			matters = w.linkMatters(&u)
		case u, ok := <-sub.addrs:
			if !ok {
				return sub.lost()
			}
			matters = w.addrMatters(&u)
		case u, ok := <-sub.routes:
			if !ok {
				return sub.lost()
			}
			matters = w.routeMatters(&u)
		case <-sub.doubt:
			matters = true
		case <-timer.C:
			planned = false
			began := time.Now()
			s, err := List(w.opt.NetNS, w.opt.Parts)
			if err != nil {
				return err
			}
			w.set(s, nil)
			now := time.Now()
			rested = now.Add(min(schedule.Rest(now.Sub(began), listShare), restMost))
		}
		if matters && !planned {
			planned = true
			timer.Reset(max(gather, time.Until(rested)))
		}
	}
}

// current returns the snapshot to compare an update with. An update that agrees
// with it changes nothing: if anything came between, that did not agree.
func (w *Watcher) current() *Snapshot {
	s, _ := w.Snapshot()
	return &s
}

func (w *Watcher) linkMatters(u *netlink.LinkUpdate) bool {
	if u.Family == unix.AF_BRIDGE { // a port of a bridge, not the link
		return false
	}
	l := linkOf(u.Link)
	old, ok := w.current().Link(l.Index)
	if u.Header.Type == unix.RTM_DELLINK {
		return ok
	}
	return !ok || old != l
}

func (w *Watcher) addrMatters(u *netlink.AddrUpdate) bool {
	p, ok := prefixOf(&u.LinkAddress)
	if !ok {
		return false
	}
	return slices.Contains(w.current().Addresses, Address{u.LinkIndex, p}) != u.NewAddr
}

func (w *Watcher) routeMatters(u *netlink.RouteUpdate) bool {
	have := w.current().routesLike(&u.Route)
	if have == nil {
		return false
	}
	if u.Type == unix.RTM_DELROUTE || u.NlFlags&unix.NLM_F_REPLACE != 0 {
		return true
	}
	return slices.ContainsFunc(routesOf(&u.Route), func(r Route) bool {
		_, ok := slices.BinarySearchFunc(*have, r, Route.compare)
		return !ok
	})
}

// ErrLost says that a subscription ended, as it does when notifications come
// faster than they are read. A snapshot may be out of date until the next listing,
// which follows.
var ErrLost = errors.New("subscription lost")

// subscription is one life of the library's subscriptions. Channels of parts
// that are not watched are nil.
type subscription struct {
	links  chan netlink.LinkUpdate
	addrs  chan netlink.AddrUpdate
	routes chan netlink.RouteUpdate
	done   chan struct{}
	doubt  schedule.Signal // something was received that could not be read

	mu  sync.Mutex
	err error // the last one that the library reported; guarded by mu
}

// subscribe opens the subscriptions. They do not list what exists: the library
// does not report for addresses that such a list was interrupted.
func (w *Watcher) subscribe() (*subscription, error) {
	s := &subscription{done: make(chan struct{}), doubt: schedule.NewSignal()}
	err := inNetns(w.opt.NetNS, func() error {
		if w.opt.Parts&Links != 0 {
			c := make(chan netlink.LinkUpdate)
			if err := netlink.LinkSubscribeWithOptions(c, s.done, netlink.LinkSubscribeOptions{
				ErrorCallback: s.report, ReceiveBufferSize: w.opt.buffer,
			}); err != nil {
				return fmt.Errorf("watch links: %w", err)
			}
			s.links = c
		}
		if w.opt.Parts&Addresses != 0 {
			c := make(chan netlink.AddrUpdate)
			if err := netlink.AddrSubscribeWithOptions(c, s.done, netlink.AddrSubscribeOptions{
				ErrorCallback: s.report, ReceiveBufferSize: w.opt.buffer,
			}); err != nil {
				return fmt.Errorf("watch addresses: %w", err)
			}
			s.addrs = c
		}
		if w.opt.Parts&Routes != 0 {
			c := make(chan netlink.RouteUpdate)
			if err := netlink.RouteSubscribeWithOptions(c, s.done, netlink.RouteSubscribeOptions{
				ErrorCallback: s.report, ReceiveBufferSize: w.opt.buffer,
			}); err != nil {
				return fmt.Errorf("watch routes: %w", err)
			}
			s.routes = c
		}
		return nil
	})
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// report is called by the library's goroutines.
func (s *subscription) report(err error) {
	s.mu.Lock()
	s.err = err
	s.mu.Unlock()
	s.doubt.Notify()
}

func (s *subscription) lost() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(ErrLost, s.err)
}

// close ends the subscriptions and waits for the goroutines that send.
func (s *subscription) close() {
	close(s.done)
	drain(s.links)
	drain(s.addrs)
	drain(s.routes)
}

func drain[T any](c <-chan T) {
	if c == nil {
		return
	}
	for range c {
	}
}
