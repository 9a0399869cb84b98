// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"context"
	"math"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/host"
)

// The garbage of the host peer is collected as early as that of the agent.
func TestGarbageIsCollectedEarly(t *testing.T) {
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	percent, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(math.MaxInt64)
	defer func() {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	}()
	synctest.Test(t, func(t *testing.T) {
		h, err := host.New(host.Options{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			(&Daemon{host: h}).releaseMemory(ctx)
		}()
		time.Sleep(time.Minute) // it is at rest
		cancel()
		<-ended
	})
	if got := debug.SetGCPercent(100); got != 35 {
		t.Errorf("GOGC is %d, want 35", got)
	}
}
