// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package observer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// recorder is a Handler that keeps the set.
type recorder struct {
	mu       sync.Mutex
	changed  chan struct{} // closed at each change
	set      map[uint64]Socket
	methods  map[string]kernel.Method
	replaces int
	stale    error
	starts   int // TCP sockets that began to listen
	stops    int // sockets that went
}

func newRecorder() *recorder {
	return &recorder{changed: make(chan struct{}), set: make(map[uint64]Socket)}
}

func (r *recorder) update(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *recorder) Methods(methods []kernel.Method) {
	r.update(func() {
		r.methods = make(map[string]kernel.Method)
		for _, g := range methods {
			r.methods[g.Capability] = g
		}
	})
}

func (r *recorder) Replace(set []Socket) {
	r.update(func() {
		clear(r.set)
		for _, s := range set {
			r.set[s.Cookie] = s
		}
		r.replaces++
		r.stale = nil
	})
}

func (r *recorder) Apply(events []Event) {
	r.update(func() {
		for _, e := range events {
			old, known := r.set[e.Socket.Cookie]
			switch {
			case e.Gone:
				delete(r.set, e.Socket.Cookie)
				r.stops++
			default:
				r.set[e.Socket.Cookie] = e.Socket
				if e.Socket.Protocol == port.TCP && e.Socket.Listening && (!known || !old.Listening) {
					r.starts++
				}
			}
		}
	})
}

func (r *recorder) Stale(err error) { r.update(func() { r.stale = err }) }

// await waits until f, called with the lock held, is true.
func (r *recorder) await(t testing.TB, what func() string, f func() bool) {
	t.Helper()
	timeout := time.NewTimer(wait.Limit())
	defer timeout.Stop()
	for {
		r.mu.Lock()
		ok, changed := f(), r.changed
		r.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-timeout.C:
			r.mu.Lock()
			defer r.mu.Unlock()
			t.Fatalf("gave up: %s", what())
		}
	}
}

func (r *recorder) describe() []string {
	var all []string
	for _, s := range r.set {
		all = append(all, describe(s))
	}
	slices.Sort(all)
	return all
}

// room is a new network namespace.
type room struct {
	ns *kernel.Namespace
	t  testing.TB
}

func newRoom(t testing.TB) *room {
	t.Helper()
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	r := &room{t: t}
	if err := errors.Join(
		space.Do(func() (err error) { r.ns, err = kernel.OpenNamespace(); return err }), space.Close(),
	); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.ns.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// do runs f on a thread that is in the namespace.
func (r *room) do(f func()) {
	if err := r.ns.Do(func() error { f(); return nil }); err != nil {
		r.t.Error(err)
	}
}

// world is a room that is observed.
type world struct {
	*room
	*recorder
	t         testing.TB
	observer  *Observer
	boundDump bool // the kernel dumps sockets that are bound only
}

func (w *world) wantSet(want ...string) {
	w.t.Helper()
	slices.Sort(want)
	w.await(w.t, func() string {
		have := w.describe()
		return fmt.Sprintf("missing %q, too many %q; have %q, want %q; %+v",
			clip(without(want, have)), clip(without(have, want)), clip(have), clip(want), w.observer.Stats())
	}, func() bool { return slices.Equal(w.describe(), want) })
}

// without returns what a has and b has not, or not as often.
func without(a, b []string) (rest []string) {
	left := make(map[string]int)
	for _, s := range b {
		left[s]++
	}
	for _, s := range a {
		if left[s]--; left[s] < 0 {
			rest = append(rest, s)
		}
	}
	return rest
}

func clip(s []string) []string { return s[:min(len(s), 20)] }

// only returns the one socket that there is.
func (w *world) only() Socket {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.set) != 1 {
		w.t.Fatalf("want one socket, have %q", w.describe())
	}
	for _, s := range w.set {
		return s
	}
	panic("unreachable")
}

// events reports whether a capability is observed by events.
func (w *world) events(capability string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !slices.Contains([]string{MethodPoll, MethodAudit}, w.methods[capability].Name)
}

// run runs an observer in a room; the function that it returns stops it.
func run(t testing.TB, r *room, o *Observer, h Handler) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The namespace is that of the caller's thread.
		if err := r.ns.Do(func() error { return o.Run(ctx, h) }); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// start is run of a new observer.
func start(t testing.TB, r *room, o Options, h Handler) (stop func()) {
	t.Helper()
	obs, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return run(t, r, obs, h)
}

// observe starts an observer of a room; it is stopped with the test. Its warnings, as
// of what an audit repaired, are shown if the test fails.
func observe(t testing.TB, r *room, o Options) *world {
	t.Helper()
	o.Logger = testLogger(t)
	obs, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return watch(t, r, obs)
}

// observeAudited is observe with audits that may come sooner than a user can have them.
func observeAudited(t testing.TB, r *room, set string, audit time.Duration) *world {
	t.Helper()
	o := options(set)
	o.Audit, o.Logger = -1, testLogger(t)
	obs, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	obs.options.Audit = audit
	return watch(t, r, obs)
}

func watch(t testing.TB, r *room, obs *Observer) *world {
	t.Helper()
	w := &world{room: r, recorder: newRecorder(), t: t, observer: obs}
	t.Cleanup(run(t, r, obs, w.recorder))
	w.await(t, func() string { return "no first Replace" }, func() bool { return w.replaces > 0 })
	return w
}

// methodSets returns the methods to test: those in the environment, else all that
// this kernel can attach. "auto" is the whole chain.
func methodSets(t *testing.T) []string {
	t.Helper()
	if v := os.Getenv("FAIRLEAD_METHODS"); v != "" {
		return strings.Split(v, ",")
	}
	sets := []string{"auto", MethodPoll}
	for _, name := range []string{kernel.MethodFentry, kernel.MethodKprobe, kernel.MethodTPBTF, kernel.MethodCgroup} {
		t.Run("probe", func(t *testing.T) {
			w := observe(t, newRoom(t), options(name))
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, r := range w.methods {
				if r.Name == name {
					sets = append(sets, name)
					return
				}
			}
			t.Logf("%s does not attach here: %v", name, w.methods)
		})
	}
	return sets
}

func options(method string) Options {
	o := Options{Interval: 20 * time.Millisecond}
	switch method {
	case "auto":
	case MethodPoll:
		o.Mode = Poll
	case kernel.MethodCgroup:
		o.Methods = []string{kernel.MethodCgroup, kernel.MethodTPBTF} // the latter reports what becomes of a bound socket
	default:
		o.Methods = []string{method}
	}
	return o
}

// requireMethod fails if a capability that has the method does not use it.
func requireMethod(t *testing.T, w *world, name string) {
	t.Helper()
	if name == "auto" {
		return
	}
	for _, c := range capabilities(features{boundDump: w.boundDump}) {
		if !slices.ContainsFunc(c.Choices, func(r kernel.Choice) bool { return r.Name == name }) {
			continue
		}
		w.mu.Lock()
		got := w.methods[c.Name]
		w.mu.Unlock()
		if got.Name != name {
			t.Fatalf("%s is observed by %s, want %s: %v", c.Name, got.Name, name, got.Err)
		}
	}
}

func raiseLimit(t testing.TB, files uint64) {
	t.Helper()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if old.Cur >= files {
		return
	}
	// unix.Setrlimit would be undone for children only; the runtime keeps this one.
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: max(files, old.Max)}); err != nil {
		t.Fatalf("raise the limit of open files from %d to %d: %v", old.Cur, files, err)
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &old) })
}

func testLogger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
}
