// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"context"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
)

// method is a way to see changes: of nftables, and of legacy tables ("" polls).
type method struct {
	nft, legacy string
	filter      bool
}

func (r method) String() string {
	s := r.nft
	if r.filter {
		s += " filtered"
	}
	return strings.TrimSuffix(s+"+"+r.legacy, "+")
}

// methods are those to test.
func methods() []method {
	return []method{
		{nat.MethodNetlink, kernel.MethodTracepoint, true},
		{nat.MethodNetlink, "", false},
		{nat.MethodGeneration, "", false},
	}
}

// running is a source on one method.
type running struct {
	method string
	src    *nat.Source
	feed   *feed
	stop   func()
}

// filter loads the filter for the rest of the test.
func (w *world) filter() watch.Filter {
	w.t.Helper()
	f, err := watch.LoadFilter(nil)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = f.Close() })
	return f
}

// legacyHook attaches a hook on legacy tables for the rest of the test.
func (w *world) legacyHook(methods ...string) *watch.Legacy {
	w.t.Helper()
	l, err := watch.OpenLegacy(watch.LegacyOptions{NetNS: w.path(), Methods: methods})
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
	return l
}

// startMethod runs a source on one method until the test ends.
func (w *world) startMethod(r method, opt nat.Options) running {
	w.t.Helper()
	opt.Methods = []string{r.nft}
	if r.filter {
		opt.Filter = w.filter()
	}
	want := r.nft + ", legacy poll"
	if r.nft == nat.MethodGeneration {
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
	if got := f.methodNow(); !strings.HasPrefix(got, want) {
		w.t.Errorf("method %q, want %q", got, want)
	}
	return running{r.String(), src, f, stop}
}

// startMethods runs a source on each method of this kernel until the test ends.
func (w *world) startMethods(opt nat.Options) (all []running) {
	w.t.Helper()
	for _, r := range methods() {
		all = append(all, w.startMethod(r, opt))
	}
	return all
}
