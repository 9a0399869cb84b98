// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/sink/detect"
	"github.com/fairlead/fairlead/internal/sink/peer"
)

// Pauses between looks at what this guest runs in. Changes of links and addresses end
// them.
const (
	autoPauseMin = time.Second
	autoPause    = 30 * time.Second
)

// auto keeps the gvproxy sink in its slot while this guest's gvproxy is proved.
type auto struct {
	a       *Agent
	gvproxy func(ctx context.Context) (url, product string, err error)
	slot    *reconcile.Slot
	alone   bool   // no other sink publishes
	url     string // of the sink that runs
	stop    func() // ends it; nil for none
}

// newAuto chooses the sinks that fit this guest. That for gvproxy comes and goes, as
// what answers can be another machine at another time.
func (a *Agent) newAuto() (u *auto, others []config.Sink) {
	detector := detect.New(!slices.Equal(a.cfg.Link, config.DefaultAgent().Link))
	u = &auto{a: a, gvproxy: detector.Gvproxy, slot: reconcile.NewSlot("gvproxy")}
	sinks, why := detector.Sinks(context.Background())
	var names []string
	for _, s := range sinks {
		names = append(names, s.String())
		if s.Name != u.slot.Name() {
			others = append(others, s)
		}
	}
	u.alone = len(others) == 0
	a.log.Info("sinks chosen", "sinks", strings.Join(names, ","), "reason", why)
	return u, others
}

// run looks again and again until ctx ends.
func (u *auto) run(ctx context.Context) error {
	changed := schedule.NewSignal()
	var watching sync.WaitGroup
	watching.Go(func() { peer.WatchNetwork(ctx, u.a.log, changed.Notify) })
	defer watching.Wait()
	return u.follow(ctx, changed)
}

// follow looks at once after a change, but not more often than every autoPauseMin, as the
// peer is asked each time.
func (u *auto) follow(ctx context.Context, changed <-chan struct{}) error {
	defer u.end("")
	pause := schedule.Backoff{Min: autoPauseMin, Max: autoPause}
	for ctx.Err() == nil {
		next := autoPause
		if err := u.look(ctx); err != nil {
			next = pause.Next()
		} else {
			pause.Reset()
		}
		asked := time.Now()
		_ = schedule.Wait(ctx, asked.Add(next), changed)
		_ = schedule.Sleep(ctx, time.Until(asked.Add(autoPauseMin)))
	}
	return ctx.Err()
}

// look starts or ends the sink, or reports why there is none.
func (u *auto) look(ctx context.Context) error {
	url, product, err := u.gvproxy(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		if u.stop != nil {
			u.a.log.Warn("gvproxy is no longer proved; closing its ports", "url", u.url, "err", err)
		}
		u.end(err.Error())
		return err
	}
	if u.stop != nil && u.url == url {
		return nil
	}
	u.end("the gvproxy moved to " + url)
	return u.begin(ctx, url, product)
}

func (u *auto) begin(ctx context.Context, url, product string) error {
	sink, err := u.a.newPeerSink(config.Sink{Name: u.slot.Name(), URL: url})
	if err != nil {
		return err
	}
	u.a.log.Info("gvproxy proved", "url", url, "product", product)
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = sink.Run(ctx) }) // it returns the end of ctx
	running.Go(func() { u.slot.Forward(ctx, sink) })
	u.url, u.stop = url, func() { cancel(); running.Wait() }
	u.slot.Put(sink, "")
	return nil
}

// end ends the sink that runs, if any, which takes its entries back.
func (u *auto) end(reason string) {
	if u.stop != nil {
		u.stop()
		u.stop = nil
	}
	if !u.alone {
		reason = ""
	}
	u.slot.Put(nil, reason)
}
