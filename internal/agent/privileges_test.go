// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/schedule"
)

// attaching is a source with hooks.
type attaching struct {
	Source
	done atomic.Bool
}

func (s *attaching) Name() string { return "attaching" }

func (s *attaching) Hooks() []kernel.Method {
	if !s.done.Load() {
		return nil
	}
	return []kernel.Method{}
}

// The kernel's types, and what attaching left, are released once all hooks were tried, even
// if memory was released before, and by an agent that keeps its capabilities.
func TestMemoryIsReleasedAfterAttaching(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, s := slog.New(slog.DiscardHandler), new(attaching)
		a := &Agent{
			log: log, tried: schedule.NewSignal(), served: schedule.NewSignal(), sources: []Source{s},
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
		s.done.Store(true)
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
