// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/schedule"
)

// Links that change all the time have the peer asked once a second.
func TestAutoRestsBetweenQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked []time.Time
		u := &auto{
			a: &Agent{log: slog.New(slog.DiscardHandler)}, slot: reconcile.NewSlot("gvproxy"),
			gvproxy: func(context.Context) (url, product string, err error) {
				asked = append(asked, time.Now())
				return "", "", errors.New("no answer")
			},
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		changed := schedule.NewSignal()
		go func() {
			for start := time.Now(); time.Since(start) < 10*time.Second; time.Sleep(10 * time.Millisecond) {
				changed.Notify()
			}
			time.Sleep(55 * time.Second) // a single change, while the pause is long
			changed.Notify()
		}()
		_ = u.follow(ctx, changed)
		at := false
		for i, now := range asked {
			at = at || now.Sub(asked[0]) == 65*time.Second
			if i > 0 && now.Sub(asked[i-1]) < time.Second {
				t.Fatalf("asked again after %v", now.Sub(asked[i-1]))
			}
		}
		if !at || len(asked) < 10 {
			t.Errorf("asked at %v: want a question right after the last change", asked)
		}
	})
}
