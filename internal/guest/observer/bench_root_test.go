// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package observer

import (
	"errors"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
)

// deaf is a Handler that only notes that the observer runs.
type deaf chan struct{}

func (d deaf) Replace([]Socket) {
	select {
	case d <- struct{}{}:
	default: // again, after a loss
	}
}

func (deaf) Methods([]kernel.Method) {}
func (deaf) Apply([]Event)           {}
func (deaf) Stale(error)             {}

// BenchmarkPair measures what observing adds to the CPU time of a listen and close: in a
// namespace that is not watched, in a burst, and while the observer sleeps. The speed of a
// processor changes from one second to the next by more than that, so each turn with the
// observer is compared with those before and after, which are without it.
func BenchmarkPair(b *testing.B) {
	watched, other, types := newRoom(b), newRoom(b), new(kernel.Types)
	turn := func() map[string]int64 {
		return map[string]int64{
			"unwatched": pairs(b, other, 400, 0),
			"burst":     pairs(b, watched, 400, 0),
			"idle":      pairs(b, watched, 80, 300*time.Microsecond),
		}
	}
	turns := 100
	if testing.Short() {
		turns = 3
	}
	lossy, added := 0, make(map[string][]float64)
	before := turn()
	for range turns {
		obs, err := New(Options{Mode: BPF, Types: types})
		if err != nil {
			b.Fatal(err)
		}
		live := make(deaf, 1)
		stop := run(b, watched, obs, live)
		<-live
		time.Sleep(100 * time.Millisecond) // until it sleeps
		with := turn()
		stop()
		after := turn()
		if obs.Stats().Drops > 0 { // this turn does not count
			lossy++
		} else {
			for mode, ns := range with {
				added[mode] = append(added[mode], float64(ns)-float64(before[mode]+after[mode])/2)
			}
		}
		before = after
	}
	if 10*lossy > turns {
		b.Fatalf("the observer lost events in %d of %d turns", lossy, turns)
	}
	for mode, samples := range added {
		slices.Sort(samples)
		at := func(percent int) float64 { return samples[len(samples)*percent/100] }
		b.Run("mode="+mode, func(b *testing.B) {
			b.ReportMetric(at(50), "ns/op")
			b.ReportMetric(at(25), "p25-ns")
			b.ReportMetric(at(75), "p75-ns")
			b.ReportMetric(float64(len(samples)), "turns")
		})
	}
}

// pairs calls listen and close in a namespace, with pauses before, and returns the tenth
// percentile of the CPU time: any other load only adds time.
func pairs(b *testing.B, r *room, times int, pause time.Duration) int64 {
	var spent []int64
	r.do(func() {
		for i := range times {
			fd, _ := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			_ = unix.Bind(fd, loopback4(20_000+i))
			// Not a sleep: what a cold cache costs is not ours.
			for until := Now() + pause.Nanoseconds(); Now() < until; {
			}
			at := threadTime()
			err := errors.Join(unix.Listen(fd, 1), unix.Close(fd))
			spent = append(spent, int64(threadTime()-at))
			if err != nil {
				b.Error(err)
			}
		}
	})
	slices.Sort(spent)
	return spent[len(spent)/10]
}
