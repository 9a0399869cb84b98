// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package observer

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel"
)

// echo is a Handler that records when it was last called.
type echo struct {
	live chan struct{}
	seen chan int64
}

func (e *echo) Methods([]kernel.Method) {}
func (e *echo) Replace([]Socket)        { close(e.live) }
func (e *echo) Stale(error)             {}

func (e *echo) Apply(events []Event) {
	now := monotonic()
	for range events {
		e.seen <- now
	}
}

// BenchmarkLatency measures from the return of a call to the handler's.
func BenchmarkLatency(b *testing.B) {
	r := newRoom(b)
	e := &echo{live: make(chan struct{}), seen: make(chan int64, 16)}
	stop := start(b, r, Options{}, e)
	defer stop()
	<-e.live

	var opened, closed []time.Duration
	r.do(func() {
		for b.Loop() {
			fd, _ := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			_ = unix.Bind(fd, loopback4(8080))
			<-e.seen
			time.Sleep(200 * time.Microsecond) // all asleep again
			_ = unix.Listen(fd, 1)
			at := monotonic()
			opened = append(opened, time.Duration(<-e.seen-at))
			time.Sleep(200 * time.Microsecond)
			_ = unix.Close(fd)
			at = monotonic()
			closed = append(closed, time.Duration(<-e.seen-at))
		}
	})
	report := func(name string, d []time.Duration) {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2])/1e3, name+"-p50-µs")
		b.ReportMetric(float64(d[len(d)*99/100])/1e3, name+"-p99-µs")
	}
	report("listen", opened)
	report("close", closed)
	b.ReportMetric(0, "ns/op")
}

// BenchmarkPair measures what observing adds to a listen and close: not at all,
// in a namespace that is not watched, and watched in a burst.
func BenchmarkPair(b *testing.B) {
	pair := func(b *testing.B, r *room, pause time.Duration) {
		r.do(func() {
			var spent []int64
			for b.Loop() {
				fd, _ := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
				_ = unix.Bind(fd, loopback4(8080))
				// Not a sleep: what a cold cache costs is not ours.
				for until := monotonic() + pause.Nanoseconds(); monotonic() < until; {
				}
				at := threadTime()
				_ = unix.Listen(fd, 1)
				_ = unix.Close(fd)
				spent = append(spent, threadTime()-at)
			}
			slices.Sort(spent)
			b.ReportMetric(float64(spent[len(spent)/2]), "ns/pair")
			b.ReportMetric(0, "ns/op")
		})
	}
	for _, c := range []struct {
		name              string
		observed, watched bool
		pause             time.Duration
	}{
		{"unobserved", false, false, 0},
		{"unwatched", true, false, 0},
		{"burst", true, true, 0},
		{"unobserved-idle", false, false, 300 * time.Microsecond},
		{"watched-idle", true, true, 300 * time.Microsecond},
	} {
		b.Run(c.name, func(b *testing.B) {
			r := newRoom(b)
			if c.observed {
				o := r
				if !c.watched {
					o = newRoom(b)
				}
				w := observe(b, o, Options{})
				pair(b, r, c.pause)
				if d := w.observer.Stats().Drops; d > 0 {
					b.ReportMetric(float64(d), "drops")
				}
				return
			}
			pair(b, r, c.pause)
		})
	}
}

// BenchmarkStart measures from Run to the first Replace.
func BenchmarkStart(b *testing.B) {
	for _, n := range []int{0, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			raiseLimit(b, 11_000)
			r := newRoom(b)
			r.do(func() {
				for i := range n {
					fd, _ := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
					_ = unix.Bind(fd, loopback4(10_000+i))
					_ = unix.Listen(fd, 1)
					b.Cleanup(func() { _ = unix.Close(fd) })
				}
			})
			for b.Loop() {
				e := &echo{live: make(chan struct{}), seen: make(chan int64, 1<<16)}
				stop := start(b, r, Options{}, e)
				<-e.live
				b.StopTimer()
				stop()
				b.StartTimer()
			}
			b.StopTimer()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			b.ReportMetric(float64(m.HeapSys-m.HeapReleased)/(1<<20), "heap-MiB")
		})
	}
}
