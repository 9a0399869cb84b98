// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/source/nat"
	"github.com/fairlead/fairlead/internal/source/nat/hook"
	"github.com/fairlead/fairlead/test/kit/kernels"
)

// method is a way to see changes: of nftables, and of legacy tables ("" polls).
type method struct{ nft, legacy string }

func (r method) String() string { return strings.TrimSuffix(r.nft+"+"+r.legacy, "+") }

// methods are those to test: what any kernel takes and, in the machines of test/vm,
// whose kernels take them all, the others.
func methods() []method {
	everywhere := []method{
		{nat.MethodNetlink, kernel.MethodTracepoint},
		{nat.MethodGeneration, ""},
	}
	hooks := []method{
		{nat.MethodFentry, kernel.MethodFentry},
		{nat.MethodKprobe, kernel.MethodKprobe},
	}
	return append(slices.DeleteFunc(hooks, func(m method) bool { return !kernels.Must(m.legacy) }), everywhere...)
}

// running is a source on one method.
type running struct {
	method string
	src    *nat.Source
	feed   *feed
	stop   func()
}

// waker is a hook on legacy tables, and one that reports modules.
type waker struct {
	*hook.Legacy
	modules <-chan struct{}
}

func (w waker) ModuleLoaded() <-chan struct{} { return w.modules }

// legacyHook attaches a hook on legacy tables for the rest of the test.
func (w *world) legacyHook(methods ...string) waker {
	w.t.Helper()
	l, err := hook.OpenLegacy(hook.LegacyOptions{NetNS: w.path(), Methods: methods})
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

// startMethod runs a source on one method until the test ends.
func (w *world) startMethod(r method, opt nat.Options) running {
	w.t.Helper()
	opt.Methods = []string{r.nft}
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
