// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package nat

import (
	"context"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/source/nat"
)

// rung is a way to see changes: of nftables, and of legacy tables ("" polls).
type rung struct{ nft, legacy string }

func (r rung) String() string { return strings.TrimSuffix(r.nft+"+"+r.legacy, "+") }

// everywhere are the rungs that every kernel takes. Others are in a file for the VM.
var everywhere = []rung{
	{nat.RungNetlink, observer.RungTracepoint},
	{nat.RungGeneration, ""},
}

// running is a source on one rung.
type running struct {
	rung string
	src  *nat.Source
	feed *feed
	stop func()
}

// waker is an observer's hook on legacy tables, and what tells of modules.
type waker struct {
	*observer.Legacy
	modules <-chan struct{}
}

func (w waker) ModuleLoaded() <-chan struct{} { return w.modules }

// legacyHook attaches a hook on legacy tables for the rest of the test.
func (w *world) legacyHook(rungs ...string) waker {
	w.t.Helper()
	l, err := observer.OpenLegacy(observer.LegacyOptions{NetNS: w.path(), Rungs: rungs})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	return waker{Legacy: l}
}

// startRung runs a source on one rung until the test ends.
func (w *world) startRung(r rung, opt nat.Options) running {
	w.t.Helper()
	opt.Rungs = []string{r.nft}
	want := r.nft + ", legacy poll"
	if r.nft == nat.RungGeneration {
		want = "generation poll 1s, legacy poll"
	}
	if r.legacy == "" {
		opt.LegacyPoll = 20 * time.Millisecond
	} else {
		opt.LegacyPoll, opt.Wake = time.Hour, w.legacyHook(r.legacy)
		want = strings.Replace(want, "poll", r.legacy, 1)
	}
	src, f, stop := w.start(opt)
	eventually(w.t, "a first set", f.ready)
	if got := f.rungNow(); !strings.HasPrefix(got, want) {
		w.t.Errorf("rung %q, want %q", got, want)
	}
	return running{r.String(), src, f, stop}
}

// startRungs runs a source on each rung of this kernel until the test ends.
func (w *world) startRungs(opt nat.Options) (all []running) {
	w.t.Helper()
	for _, r := range rungs() {
		all = append(all, w.startRung(r, opt))
	}
	return all
}
