// SPDX-License-Identifier: Apache-2.0

// Package auto runs the sinks that fit this guest, as they come and go.
package auto

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/sink/detect"
	"github.com/fairlead/fairlead/internal/guest/sink/listener/refused"
	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Pauses between looks at what this guest runs in. Changes of links and addresses end
// them. While no gvproxy is proved they grow from autoPauseMin to autoPauseMax, but are
// autoPause at most after a change; while one is proved they are autoPause.
const (
	autoPauseMin = time.Second
	autoPause    = 30 * time.Second
	autoPauseMax = 5 * time.Minute
)

// stepAside bounds the wait until the fallback closed its ports, before gvproxy opens them.
const stepAside = 5 * time.Second

// Sink is a sink with work of its own. Run blocks until ctx ends.
type Sink interface {
	reconcile.Sink
	Run(ctx context.Context) error
}

// Auto keeps the gvproxy sink in its slot while this guest's gvproxy is proved, and the
// fallback in its own while it is not.
type Auto struct {
	log      *slog.Logger
	gvproxy  func(ctx context.Context) (url, product string, err error)
	newSink  func(url string) (Sink, error)
	slot     *reconcile.Slot
	fallback *fallback
	proved   bool   // at the start
	alone    bool   // no other sink publishes
	url      string // of the sink that runs
	stop     func() // ends it; nil for none
}

// Gvproxy is the name of the sink that comes and goes, as what answers can be another
// machine at another time.
const Gvproxy = "gvproxy"

// New chooses the sinks that fit this guest. The caller makes those in others, which are
// without the one for gvproxy: newGvproxy makes that. Set link if the user configured a
// link to a host peer.
func New(link bool, newGvproxy func(url string) (Sink, error), log *slog.Logger) (u *Auto, choice detect.Choice, others []detect.Sink) {
	detector := detect.New(link)
	u = &Auto{log: log, gvproxy: detector.Gvproxy, newSink: newGvproxy, slot: reconcile.NewSlot(Gvproxy)}
	choice = detector.Sinks(context.Background())
	for _, s := range choice.Sinks {
		switch s.Name {
		case Gvproxy:
			u.proved = true
		case choice.Fallback.Name:
		default:
			others = append(others, s)
		}
	}
	if choice.Fallback.Name != "" {
		others = append(others, choice.Fallback)
	}
	u.alone = len(others) == 0
	return u, choice, others
}

// Slot holds the gvproxy sink while there is one.
func (u *Auto) Slot() reconcile.Sink { return u.slot }

// StandBy makes the listener sink the fallback.
func (u *Auto) StandBy(sink *refused.Sink) reconcile.Sink {
	u.fallback = &fallback{slot: reconcile.NewSlot(sink.Name()), sink: sink}
	if !u.proved {
		u.fallback.begin()
	}
	return standby{sink, u.fallback.slot}
}

// Run looks again and again until ctx ends.
func (u *Auto) Run(ctx context.Context) error {
	changed := schedule.NewSignal()
	var watching sync.WaitGroup
	watching.Go(func() { peer.WatchNetwork(ctx, u.log, changed.Notify) })
	defer watching.Wait()
	return u.follow(ctx, changed)
}

// follow looks at once after a change, but not more often than every autoPauseMin, as the
// peer is asked each time.
func (u *Auto) follow(ctx context.Context, changed <-chan struct{}) error {
	defer u.halt(port.Reason{})
	pause := schedule.Backoff{Min: autoPauseMin, Max: autoPauseMax}
	for ctx.Err() == nil {
		next := autoPause
		if err := u.look(ctx); err != nil {
			next = pause.Next()
		} else {
			pause.Reset()
		}
		asked := time.Now()
		_ = schedule.Wait(ctx, asked.Add(next), changed)
		if time.Since(asked) < next {
			pause.Hasten(autoPause) // what changed may need a while until it answers
		}
		_ = schedule.Sleep(ctx, time.Until(asked.Add(autoPauseMin)))
	}
	return ctx.Err()
}

// look starts or ends the sink, or reports why there is none.
func (u *Auto) look(ctx context.Context) error {
	url, product, err := u.gvproxy(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		if u.stop != nil {
			u.log.Warn("gvproxy is no longer proved; closing its ports", "url", u.url, "err", err)
		}
		u.end(port.Because(port.PeerUnproved, err.Error()))
		return err
	}
	if u.stop != nil && u.url == url {
		return nil
	}
	u.halt(port.Because(port.PeerMoves, url))
	if err := u.begin(ctx, url, product); err != nil {
		u.log.Warn("sink gvproxy cannot start", "url", url, "err", err)
		u.end(port.Because(port.PeerUnproved, err.Error()))
		return err
	}
	return nil
}

func (u *Auto) begin(ctx context.Context, url, product string) error {
	sink, err := u.newSink(url)
	if err != nil {
		return err
	}
	u.log.Info("gvproxy proved", "url", url, "product", product)
	u.fallback.end(ctx)
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = sink.Run(ctx) }) // it returns the end of ctx
	running.Go(func() { u.slot.Forward(ctx, sink) })
	u.url, u.stop = url, func() { cancel(); running.Wait() }
	u.slot.Put(sink, port.Reason{})
	return nil
}

// end ends the sink that runs, if any, and has the fallback publish.
func (u *Auto) end(reason port.Reason) {
	u.halt(reason)
	u.fallback.begin()
}

// halt ends the sink that runs, if any, which takes its entries back.
func (u *Auto) halt(reason port.Reason) {
	if u.stop != nil {
		u.stop()
		u.stop = nil
	}
	if !u.alone {
		reason = port.Reason{}
	}
	u.slot.Put(nil, reason)
}

// fallback is the sink that publishes while no gvproxy is proved. Nil is none.
type fallback struct {
	slot *reconcile.Slot
	sink reconcile.Sink
	on   bool
}

func (f *fallback) begin() {
	if f != nil && !f.on {
		f.on = true
		f.slot.Put(f.sink, port.Reason{})
	}
}

// end returns when the sink has closed its ports, or after stepAside.
func (f *fallback) end(ctx context.Context) {
	if f != nil && f.on {
		f.on = false
		_ = schedule.Wait(ctx, time.Now().Add(stepAside), f.slot.Withdraw())
	}
}

// standby is the listener sink in a slot. It always runs, because its hooks are attached
// at the start, when that is still permitted.
type standby struct {
	*refused.Sink
	slot *reconcile.Slot
}

// Wake implements reconcile.Sink.
func (s standby) Wake() <-chan struct{} { return s.slot.Wake() }

// Sync implements reconcile.Sink.
func (s standby) Sync(ctx context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	return s.slot.Sync(ctx, want, change)
}

// Run is that of the sink.
func (s standby) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var forwarding sync.WaitGroup
	defer forwarding.Wait()
	defer cancel()
	forwarding.Go(func() { s.slot.Forward(ctx, s.Sink) })
	return s.Sink.Run(ctx)
}
