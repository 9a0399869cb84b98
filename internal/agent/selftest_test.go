// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/diagnose/doctor"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/schedule"
)

// Capabilities and the kernel's types are kept until the self-test has ended.
func TestSelfTestIsPartOfTheStart(t *testing.T) {
	a := &Agent{cfg: config.Agent{SelfTest: true}}
	if a.attached() {
		t.Error("all is attached before the self-test has ended")
	}
	a.selfTested.Store(&doctor.SelfTest{Error: "failed"})
	if !a.attached() {
		t.Error("a self-test that has failed is waited for")
	}
}

// The kernel's types, and what attaching left, are released once all hooks were tried, even
// if memory was released before, and by an agent that keeps its capabilities.
func TestMemoryIsReleasedAfterAttaching(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := slog.New(slog.DiscardHandler)
		a := &Agent{
			cfg: config.Agent{SelfTest: true}, log: log, tried: schedule.NewSignal(), served: schedule.NewSignal(),
			registry: registry.New(registry.Options{Rules: new(rules.Set), Logger: log}),
		}
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		work.Go(func() { a.releaseMemory(ctx) })
		work.Go(func() { a.limitAttached(ctx) })
		released := func() uint32 {
			time.Sleep(5 * time.Minute)
			synctest.Wait()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.NumForcedGC
		}
		before := released()
		a.selfTested.Store(new(doctor.SelfTest))
		a.tried.Notify()
		after := released()
		if after == before {
			t.Error("nothing was released after all hooks were tried")
		}
		if released() != after {
			t.Error("an idle agent releases memory again")
		}
		cancel()
		work.Wait()
	})
}
