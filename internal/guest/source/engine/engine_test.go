// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/fsnotify/fsnotify"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// feed records what a supervisor says.
type feed struct {
	mu       sync.Mutex
	stale    []string
	warnings []string
	set      map[string]port.Binding
	removed  int
	replaced int
}

func (f *feed) Replace(set []port.Binding) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := make(map[string]port.Binding)
	for _, b := range set {
		next[b.Origin.ID] = b
	}
	for id := range f.set {
		if _, ok := next[id]; !ok {
			f.removed++
		}
	}
	f.set = next
	f.replaced++
}

func (f *feed) Apply(c port.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, o := range c.Drop {
		delete(f.set, o.ID)
		f.removed++
	}
	for _, b := range c.Put {
		f.set[b.Origin.ID] = b
	}
}

func (f *feed) Stale(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stale = append(f.stale, err.Error())
}

func (f *feed) Method(string)           {}
func (f *feed) Lacks(port.Lack, string) {}
func (f *feed) Warn(texts []string)     { f.warnings = texts }
func (f *feed) lastStale() string       { f.mu.Lock(); defer f.mu.Unlock(); return f.stale[len(f.stale)-1] }
func (f *feed) has(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.set[id]
	return ok
}

var errGone = errors.New("gone")

// supervise runs a supervisor of sessions for so long. What it lacks of Logger, Feed and Withdraw
// it gets.
func supervise(t *testing.T, lasts time.Duration, s Supervisor, session func(ctx context.Context, up func()) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), lasts)
	defer cancel()
	s.Retry, s.Logger = s.Retry.WithDefaults(), slog.New(slog.DiscardHandler)
	if s.Feed == nil {
		s.Feed = &feed{}
	}
	if s.Withdraw == nil {
		s.Withdraw = func() {}
	}
	return s.Run(ctx, session)
}

// Tries come ever less often, up to the maximum.
func TestSupervisorBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var at []time.Duration
		err := supervise(t, 5*time.Minute, Supervisor{Withdraw: func() { t.Error("withdrawn though nothing was declared") }}, func(context.Context, func()) error {
			at = append(at, time.Since(began))
			return errGone
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Run = %v, want the context's error", err)
		}
		for i, want := range []time.Duration{200 * time.Millisecond, 400 * time.Millisecond, 800 * time.Millisecond, 1600 * time.Millisecond} {
			if d := (at[i+1] - at[i]) - want; d.Abs() > want/4 {
				t.Errorf("pause %d = %v, want %v or up to a quarter more or less", i, at[i+1]-at[i], want)
			}
		}
		if n := len(at); n > 20 {
			t.Errorf("%d tries in 5 minutes", n)
		}
		if d := at[len(at)-1] - at[len(at)-2]; d < DefaultMaxDelay*3/4 || d > DefaultMaxDelay*5/4 {
			t.Errorf("the last two tries are %v apart, want about %v", d, DefaultMaxDelay)
		}
	})
}

// A wake-up ends the wait, but does not make the supervisor spin.
func TestSupervisorWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wake := schedule.NewSignal()
		tries := 0
		go func() {
			time.Sleep(time.Hour)
			wake.Notify()
		}()
		var woken time.Time
		_ = supervise(t, time.Hour+time.Minute, Supervisor{Retry: Retry{MinDelay: 2 * time.Hour, MaxDelay: 2 * time.Hour}, Wake: wake}, func(context.Context, func()) error {
			tries++
			woken = time.Now()
			return errGone
		})
		if tries != 2 {
			t.Errorf("%d tries, want one at the start and one at the wake-up (last at %v)", tries, woken)
		}
	})
}

// While an engine that was lost may be starting again, it is tried every second.
func TestSupervisorHurriesAfterALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lost time.Time
		var within, after int
		_ = supervise(t, time.Hour, Supervisor{}, func(ctx context.Context, up func()) error {
			switch since := time.Since(lost); {
			case lost.IsZero():
				up()
				time.Sleep(time.Minute)
				lost = time.Now()
			case since <= hurryFor:
				within++
			default:
				after++
			}
			return errGone
		})
		if within < 30 || within > 70 {
			t.Errorf("%d tries in the %v after the loss", within, hurryFor)
		}
		if after > 60*60/15 {
			t.Errorf("%d tries in the hour after that", after)
		}
	})
}

// Declared ports are withdrawn once, when the grace period is over, and the reason
// stays to be read.
func TestSupervisorGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &feed{}
		began := time.Now()
		var withdrawn []time.Duration
		session := 0
		_ = supervise(t, 3*time.Minute, Supervisor{Retry: Retry{Grace: 30 * time.Second}, Feed: f, Withdraw: func() { withdrawn = append(withdrawn, time.Since(began)) }}, func(ctx context.Context, up func()) error {
			if session++; session == 1 {
				up()
				time.Sleep(time.Minute)
			}
			return errGone
		})
		if len(withdrawn) != 1 || withdrawn[0] != 90*time.Second {
			t.Errorf("withdrawn at %v, want once, 30s after the loss at 1m", withdrawn)
		}
		if s := f.lastStale(); s != "declared ports withdrawn after 30s: gone" {
			t.Errorf("stale says %q", s)
		}
	})
}

// An engine that is back in time loses nothing.
func TestSupervisorBackInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_ = supervise(t, time.Hour, Supervisor{Retry: Retry{Grace: 30 * time.Second}, Withdraw: func() { t.Error("withdrawn though it was back in time") }}, func(ctx context.Context, up func()) error {
			up()
			select {
			case <-time.After(time.Minute):
			case <-ctx.Done():
			}
			return errGone
		})
	})
}

// An engine that never was there declares nothing; that is no staleness.
func TestSupervisorAbsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &feed{}
		tries := 0
		_ = supervise(t, 50*time.Minute /* before it is forgotten */, Supervisor{Feed: f}, func(ctx context.Context, up func()) error {
			switch tries++; {
			case tries < 10:
				if len(f.stale) > 0 {
					t.Errorf("stale: %q", f.stale)
				}
				return fmt.Errorf("%w: no socket", ErrAbsent)
			case tries == 10:
				if f.replaced != 1 {
					t.Errorf("reported an empty set %d times, want once", f.replaced)
				}
				up()
				return errGone
			}
			if n := len(f.stale); n == 0 {
				t.Error("an engine that was lost is not stale")
			}
			return fmt.Errorf("%w: no socket", ErrAbsent)
		})
		if f.replaced != 1 {
			t.Errorf("reported an empty set %d times, want once", f.replaced)
		}
	})
}

// While there is no trace of an engine, nothing runs but now and then; one that
// appears is tried at once, and again soon if it is not ready yet.
func TestSupervisorIsIdleWithoutAnEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wake := schedule.NewSignal()
		began := time.Now()
		go func() {
			time.Sleep(24 * time.Hour)
			wake.Notify()
		}()
		var idle int
		var ready []time.Duration
		_ = supervise(t, 25*time.Hour, Supervisor{Wake: wake}, func(ctx context.Context, up func()) error {
			if time.Since(began) < 24*time.Hour {
				idle++
				return fmt.Errorf("%w: no socket", ErrAbsent)
			}
			if ready = append(ready, time.Since(began)); len(ready) < 3 {
				return errGone // it is there, and does not listen yet
			}
			up()
			<-ctx.Done()
			return ctx.Err()
		})
		if idle > 24*60/2 {
			t.Errorf("%d tries in a day without an engine", idle)
		}
		if len(ready) != 3 || ready[0] != 24*time.Hour || ready[2] > 24*time.Hour+time.Second {
			t.Errorf("tries at %v once it appeared at 24h", ready)
		}
	})
}

// A session that asks to run again is run soon, and nothing is stale. Its set is
// kept even if no trace of an engine is left then.
func TestSupervisorAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &feed{}
		ctx, cancel := context.WithCancel(t.Context())
		began, tries := time.Now(), 0
		_ = Supervisor{
			Retry: Retry{}.WithDefaults(), Logger: slog.New(slog.DiscardHandler), Feed: f, Withdraw: func() {},
		}.Run(ctx, func(ctx context.Context, up func()) error {
			switch tries++; tries {
			case 1:
				return ErrAgain // before it was up
			case 5:
				if len(f.stale) > 0 || time.Since(began) > 4*againPause {
					t.Errorf("stale %q, after %v", f.stale, time.Since(began))
				}
				return fmt.Errorf("%w: no socket", ErrAbsent)
			case 6:
				if len(f.stale) == 0 || f.replaced > 0 {
					t.Errorf("stale %q, replaced %d times; want it stale", f.stale, f.replaced)
				}
				cancel()
				return ctx.Err()
			}
			up()
			return ErrAgain
		})
	})
}

// A session that ends because nothing runs is not run again until there is a sign, or
// somebody asks for a list; nothing is stale meanwhile.
func TestSupervisorRests(t *testing.T) {
	for _, c := range []struct {
		name string
		wake func(signs, wake chan struct{}, facts *Table)
	}{
		{"sign", func(signs, _ chan struct{}, _ *Table) { signs <- struct{}{} }},
		{"socket", func(_, wake chan struct{}, _ *Table) { wake <- struct{}{} }},
		{"asked", func(_, _ chan struct{}, facts *Table) { facts.Confirm(func() {}) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, facts := &feed{}, new(Table)
				signs, wake := make(chan struct{}, 1), make(chan struct{}, 1)
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(time.Hour, func() { c.wake(signs, wake, facts) })
				began, tries := time.Now(), 0
				_ = Supervisor{
					Retry: Retry{}.WithDefaults(), Logger: slog.New(slog.DiscardHandler), Feed: f, Facts: facts,
					Withdraw: func() { t.Error("withdrawn") }, Signs: signs, Wake: wake,
				}.Run(ctx, func(_ context.Context, up func()) error {
					up()
					if tries++; tries == 2 {
						cancel()
					}
					return ErrRest
				})
				if got := time.Since(began); got != time.Hour || len(f.stale) > 0 {
					t.Errorf("the second session after %v, stale %q; want it after an hour", got, f.stale)
				}
			})
		})
	}
}

// An engine is left alone some time after its last container has gone, and not while it
// is needed.
func TestFollowRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &scripted{list: []Object{object("x")}}
		events, signs := make(chan Event), make(chan struct{})
		var awake atomic.Bool
		awake.Store(true)
		began, done := time.Now(), make(chan error)
		st := Stream{Events: events, Rest: 15 * time.Second, Signs: signs, Awake: awake.Load}
		go func() {
			done <- NewSet(slog.New(slog.DiscardHandler), &feed{}, new(Table), Host{}).Follow(t.Context(), e, st, 24*time.Hour, func() {})
		}()
		time.Sleep(time.Hour)
		events <- Event{ID: "x", Gone: true}
		time.Sleep(time.Hour) // somebody needs it
		awake.Store(false)
		signs <- struct{}{}
		time.Sleep(10 * time.Second)
		signs <- struct{}{} // begins anew
		if err := <-done; !errors.Is(err, ErrRest) || time.Since(began) != 2*time.Hour+25*time.Second {
			t.Errorf("Follow = %v after %v, want a rest", err, time.Since(began))
		}
	})
}

func TestWatch(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a", "b", "sock")
	linked := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "target"), linked); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	wake := schedule.NewSignal()
	files := NewFiles(slog.New(slog.NewTextHandler(t.Output(), nil)))
	other, leave := context.WithCancel(t.Context())
	left := files.Watch(other, schedule.NewSignal(), filepath.Join(dir, "other", "sock"))
	stopped := files.Watch(ctx, wake, path, linked)
	leave() // the rest goes on
	<-left
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	woken := func(what string) {
		t.Helper()
		select {
		case <-wake:
		case <-time.After(time.Minute):
			t.Fatalf("not woken by: %s", what)
		}
	}
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"created in new directories", func() error {
			return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("1"), 0o600))
		}},
		{"written again", func() error { return os.WriteFile(path, []byte("22"), 0o600) }},
		{"replaced", func() error {
			return errors.Join(os.WriteFile(path+".new", []byte("333"), 0o600), os.Rename(path+".new", path))
		}},
		{"removed with its directories and made again", func() error {
			return errors.Join(os.RemoveAll(filepath.Join(dir, "a")), os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("4"), 0o600))
		}},
	} {
		must(step.do())
		woken(step.what)
		for drained := false; !drained; {
			select {
			case <-wake:
			case <-time.After(50 * time.Millisecond):
				drained = true
			}
		}
	}
	cancel()
	<-stopped
}

// Where the kernel tells nothing of files, they are looked at.
func TestPollFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		wake := schedule.NewSignal()
		files := NewFiles(slog.New(slog.DiscardHandler))
		files.watcher = func() (*fsnotify.Watcher, error) { return nil, errors.New("too many") }
		stopped := files.Watch(ctx, wake, path)
		time.Sleep(time.Hour)
		if len(wake) > 0 {
			t.Error("woken by nothing")
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(files.pause + time.Millisecond)
		if len(wake) != 1 {
			t.Error("not woken by a file that appeared")
		}
		cancel()
		<-stopped
	})
}

// A watcher that fails is replaced.
func TestFailedWatcherIsReplaced(t *testing.T) {
	dir := t.TempDir()
	files := NewFiles(slog.New(slog.NewTextHandler(t.Output(), nil)))
	files.pause = time.Millisecond
	made := make(chan *fsnotify.Watcher, 8)
	files.watcher = func() (*fsnotify.Watcher, error) {
		w, err := fsnotify.NewWatcher()
		made <- w
		return w, err
	}
	ctx, cancel := context.WithCancel(t.Context())
	wake := schedule.NewSignal()
	stopped := files.Watch(ctx, wake, filepath.Join(dir, "sock"))
	(<-made).Errors <- errors.New("for the test")
	<-made
	if err := os.WriteFile(filepath.Join(dir, "sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	<-wake
	cancel()
	<-stopped
	if files.Watch(ctx, wake, dir) == stopped { // begins anew, and ends at once
		t.Error("the same watch")
	}
	<-files.Watch(ctx, wake, dir)
}

// What users own is not shared.
func TestFilesOfUsers(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	files := NewFiles(log)
	if files.For(log, "/run/docker.sock", "/etc/rancher/k3s/k3s.yaml") != files {
		t.Error("not shared")
	}
	if (*Files)(nil).For(log) == nil {
		t.Error("none")
	}
	for _, path := range []string{"/run/user/1000/docker.sock", "/home/ann/.kube/config"} {
		if files.For(log, "/run/docker.sock", path) == files {
			t.Errorf("%s is shared", path)
		}
	}
}

// A directory that the kernel refuses to watch leaves the others watched, and is logged once.
func TestUnwatchableDirectory(t *testing.T) {
	dir := t.TempDir()
	w, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Close() }()
	var logged []error
	d := dirs{w: w, watched: make(map[string]fileState), refused: make(map[string]bool), log: func(_ []string, err error) { logged = append(logged, err) }}
	long := filepath.Join(dir, strings.Repeat("x", 300)) // its directory is fine
	for range 2 {
		for d.follow([]string{long, filepath.Join(dir, "sock")}) {
		}
	}
	if list := w.WatchList(); len(list) != 1 || len(logged) != 0 {
		t.Fatalf("watched %q, logged %v", list, logged)
	}
	if err := w.Close(); err != nil { // it refuses everything
		t.Fatal(err)
	}
	for range 3 {
		if d.follow([]string{filepath.Join(t.TempDir(), "sock"), "/sock"}) {
			t.Error("a closed watcher watches")
		}
	}
	if len(logged) != 4 || len(d.refused) != 2 {
		t.Errorf("logged %v, refused %v", logged, d.refused)
	}
}

const (
	id1 = "1111111111111111111111111111111111111111111111111111111111111111"
	id2 = "2222222222222222222222222222222222222222222222222222222222222222"
	id3 = "3333333333333333333333333333333333333333333333333333333333333333"
)

func TestFacts(t *testing.T) {
	var f Table
	a, b, shared := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("10.0.0.9")
	f.Put("1", Fact{Owner: port.Owner{Name: "one", ID: "1"}, ID: id1, Cgroup: 7, Path: "/docker/" + id1, Addresses: []netip.Addr{a, shared}})
	f.Put("3", Fact{Owner: port.Owner{Name: "three", ID: "3"}, ID: id3})
	f.Put("2", Fact{Owner: port.Owner{Name: "web", ID: "2"}, ID: "web", Cgroup: 8, Path: "/default/web", Addresses: []netip.Addr{b, shared}})

	paths := map[string]string{
		"/docker/" + id1:                                  "one",
		"/docker/" + id1 + "/init.scope/x":                "one",
		"/system.slice/docker-" + id1 + ".scope":          "", // the engine says that it is elsewhere
		"/system.slice/docker-" + id3 + ".scope":          "three",
		"/kubepods/pod1/cri-containerd-" + id3 + ".scope": "three",
		"/kubepods-pod1.slice:cri-containerd:" + id3:      "three",
		"/docker/" + id2:                                  "",
		"/default/web":                                    "web",
		"/default/web/inner":                              "web",
		"/other/web":                                      "", // a name is nobody's proof
		"/default/webx":                                   "",
		"/":                                               "",
		"":                                                "",
		"/docker/" + id1 + "/docker/" + id2:               "one", // what one runs is one's
	}
	for path, want := range paths {
		if o, ok := f.ByCgroupPath(path); o.Name != want || ok != (want != "") {
			t.Errorf("ByCgroupPath(%q) = %q, %v; want %q", path, o.Name, ok, want)
		}
	}
	for _, c := range []struct {
		addr netip.Addr
		want string
	}{{a, "one"}, {b, "web"}, {shared, ""}, {netip.MustParseAddr("::ffff:10.0.0.2"), "one"}, {netip.Addr{}, ""}} {
		if o, ok := f.ByAddress(c.addr); o.Name != c.want || ok != (c.want != "") {
			t.Errorf("ByAddress(%v) = %q, %v; want %q", c.addr, o.Name, ok, c.want)
		}
	}
	for id, want := range map[uint64]string{7: "one", 8: "web", 9: "", 0: ""} {
		if o, ok := f.ByCgroup(id); o.Name != want || ok != (want != "") {
			t.Errorf("ByCgroup(%d) = %q, %v; want %q", id, o.Name, ok, want)
		}
	}
	f.Remove("1")
	if o, ok := f.ByAddress(shared); !ok || o.Name != "web" {
		t.Errorf("after one left, the shared address is %q's, want web's", o.Name)
	}
	f.Put("2", Fact{Owner: port.Owner{Name: "web"}})
	if _, ok := f.ByCgroup(8); ok {
		t.Error("a replaced fact is still found")
	}
	f.Retain(func(string, Fact) bool { return false })
	if len(f.objects)+len(f.cgroups)+len(f.paths)+len(f.ids)+len(f.addresses) != 0 {
		t.Errorf("something is left: %+v", &f)
	}
}

func TestCgroup(t *testing.T) {
	dir := t.TempDir()
	h := Host{Proc: filepath.Join(dir, "proc"), Cgroup2: filepath.Join(dir, "cg")}
	for pid, text := range map[string]string{
		"1": "0::/init.scope\n",
		"2": "0::/docker/" + id1 + "\n",
		"3": "12:cpu:/docker/" + id1 + "\n0::/\n",
		"4": "12:cpu,cpuacct:/docker/" + id1 + "\n0::/docker/" + id1 + "\n",
		"5": "0::/default/web\n",
		"6": "0::/../../docker/" + id1 + "\n",
		"7": "garbage\n",
		"8": "0::/nested/system.slice/nerdctl-" + id1 + ".scope\n",
		// A container that runs systemd.
		"10": "0::/docker/" + id1 + "/init.scope\n",
		"11": "0::/default/web/system.slice/nginx.service\n",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Join(h.Proc, pid), 0o755),
			os.WriteFile(filepath.Join(h.Proc, pid, "cgroup"), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(h.Cgroup2, "docker", id1), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		pid   int
		names []string
		path  string
		id    bool
	}{
		{1, []string{id1}, "", false}, // another namespace's process 1
		{2, []string{id1}, "/docker/" + id1, true},
		{2, []string{id2}, "", false},
		{3, []string{id1}, "/docker/" + id1, false},
		{4, []string{id1}, "/docker/" + id1, true},
		{5, []string{"web", "/default/web"}, "/default/web", false},
		{5, []string{"other", "/other/web"}, "", false},
		{5, []string{"", ""}, "", false},
		{6, []string{id1}, "", false}, // outside our view
		{7, []string{id1}, "", false},
		{8, []string{id1}, "/nested/system.slice/nerdctl-" + id1 + ".scope", false},
		{9, []string{id1}, "", false},
		{10, []string{id1}, "/docker/" + id1, true},
		{11, []string{"web", "/default/web"}, "/default/web", false},
		{0, []string{id1}, "", false},
		{-1, []string{id1}, "", false},
	} {
		path, id, ok := h.Cgroup(c.pid, uint32(os.Getuid()), c.names...)
		if path != c.path || ok != (c.path != "") || (id != 0) != c.id {
			t.Errorf("Cgroup(%d, %q) = %q, %d, %v; want %q, an id: %v", c.pid, c.names, path, id, ok, c.path, c.id)
		}
	}
}

// A user with a cgroup tree of their own can give a cgroup any name.
func TestForgedCgroupNamesNoContainer(t *testing.T) {
	const user, engine = 1000, 1001
	owned := map[string]uint32{
		"/system.slice/docker-" + id1 + ".scope":                  0,
		"/user.slice/user-1000.slice/docker-" + id1 + ".scope":    user,
		"/user.slice/user-1001.slice/docker-" + id1 + ".scope":    engine,
		"/user.slice/docker-" + id2 + ".scope/docker-" + id1:      user,
		"/user.slice/docker-" + id2 + ".scope":                    0,
		"/user.slice/user-1001.slice/docker-" + id2 + ".scope":    engine,
		"/user.slice/user-1000.slice/init.scope/docker-" + id1:    user,
		"/user.slice/user-1000.slice/user@1000.service/docker-/x": user,
	}
	f := Table{CgroupUser: func(path string) (uint32, bool) { uid, ok := owned[path]; return uid, ok }}
	f.Put("1", Fact{Owner: port.Owner{Name: "rootless"}, ID: id1, User: engine})
	f.Put("2", Fact{Owner: port.Owner{Name: "root's"}, ID: id2})
	for path, want := range map[string]string{
		"/system.slice/docker-" + id1 + ".scope":               "rootless",
		"/user.slice/user-1000.slice/docker-" + id1 + ".scope": "",
		"/user.slice/user-1001.slice/docker-" + id1 + ".scope": "rootless",
		"/user.slice/user-1001.slice/docker-" + id2 + ".scope": "",
		"/user.slice/docker-" + id2 + ".scope/docker-" + id1:   "root's", // made inside a container
		"/gone/docker-" + id1 + ".scope":                       "",
	} {
		if o, ok := f.ByCgroupPath(path); o.Name != want || ok != (want != "") {
			t.Errorf("ByCgroupPath(%q) = %q, %v; want %q", path, o.Name, ok, want)
		}
	}
}

func TestCgroup2Mount(t *testing.T) {
	p := filepath.Join(t.TempDir(), "mountinfo")
	text := "30 1 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
		"31 30 0:27 /sub /mnt/sub rw - cgroup2 cgroup2 rw\n" +
		"32 30 0:27 / /sys/fs/cgroup/unified rw shared:1 - cgroup2 cgroup2 rw\n"
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := cgroup2Mount(p); got != "/sys/fs/cgroup/unified" {
		t.Errorf("cgroup2Mount = %q", got)
	}
	if got := cgroup2Mount(p + ".none"); got != "" {
		t.Errorf("cgroup2Mount of nothing = %q", got)
	}
}

func TestDeclare(t *testing.T) {
	c := Container{
		ID: "x", Owner: port.Owner{Kind: port.OwnerContainer, Name: "web"}, Paused: true,
		Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")},
	}
	for _, tc := range []struct {
		p    Published
		key  string
		dial string
	}{
		{Published{"tcp", "", 80, 8080}, "tcp 0.0.0.0:80", "[127.0.0.1:80 10.0.0.2:8080 [fd00::2]:8080]"},
		{Published{"", "0.0.0.0", 80, 8080}, "tcp 0.0.0.0:80", "[127.0.0.1:80 10.0.0.2:8080 [fd00::2]:8080]"},
		{Published{"UDP", "::", 80, 8080}, "udp [::]:80", "[[::1]:80 [fd00::2]:8080 10.0.0.2:8080]"},
		{Published{"tcp", "127.0.0.2", 80, 8080}, "tcp 127.0.0.2:80", "[127.0.0.2:80 10.0.0.2:8080 [fd00::2]:8080]"},
		{Published{"tcp", "::ffff:127.0.0.1", 65535, 1}, "tcp 127.0.0.1:65535", "[127.0.0.1:65535 10.0.0.2:1 [fd00::2]:1]"},
	} {
		bs, w := Declare(c, []Published{tc.p, tc.p})
		if len(w) > 0 || len(bs) != 1 {
			t.Errorf("Declare(%+v twice) = %v, %q; want one binding", tc.p, bs, w)
			continue
		}
		if got := bs[0].Key.String(); got != tc.key {
			t.Errorf("Declare(%+v) = %s, want %s", tc.p, got, tc.key)
		}
		if got := fmt.Sprint(bs[0].Dial); got != tc.dial {
			t.Errorf("Declare(%+v) is dialled at %s, want %s", tc.p, got, tc.dial)
		}
		if !strings.HasSuffix(bs[0].Detail.String(), "(paused)") || bs[0].Origin.ID == "" {
			t.Errorf("Declare(%+v) = %+v", tc.p, bs[0])
		}
	}
	bad := []Published{
		{"tcp", "", 0, 80}, {"tcp", "", 70000, 80}, {"tcp", "", 80, 0}, {"tcp", "", -1, 80},
		{"sctp", "", 80, 80}, {"x", "", 80, 80}, {"tcp", "host", 80, 80},
	}
	bs, w := Declare(c, append(bad, Published{"tcp", "", 81, 81}))
	if len(bs) != 1 || len(w) != len(bad) {
		t.Errorf("Declare of %d bad ports and a good one = %v, %q", len(bad), bs, w)
	}
	for _, s := range w {
		if !strings.Contains(s, `container "web"`) {
			t.Errorf("warning %q does not say whose", s)
		}
	}
}

func TestWarnings(t *testing.T) {
	f := &feed{}
	w := Warnings{Feed: f}
	w.Set("b", []string{"b is wrong"})
	w.Set("a", []string{"a is wrong", "x" + strings.Repeat("é", 1000)})
	if len(f.warnings) != 3 || f.warnings[0] != "a is wrong" || len(f.warnings[1]) > maxWarningSize+3 || !utf8.ValidString(f.warnings[1]) || f.warnings[2] != "b is wrong" {
		t.Errorf("warnings are %q", f.warnings)
	}
	w.Set("a", nil)
	if !slices.Equal(f.warnings, []string{"b is wrong"}) {
		t.Errorf("warnings are %q", f.warnings)
	}
	for i := range 3 * maxWarnings {
		w.Set(fmt.Sprint(i), []string{"wrong"})
	}
	if n := len(f.warnings); n != maxWarnings+1 || !strings.Contains(f.warnings[n-1], "201 more") {
		t.Errorf("%d warnings, the last is %q", n, f.warnings[n-1])
	}
	w.Clear()
	if len(f.warnings) != 0 {
		t.Errorf("warnings are %q after Clear", f.warnings)
	}
}

// A rule may name any label, so none is left out, however many and long they are.
func TestLabels(t *testing.T) {
	in := map[string]string{"a": "1", "nerdctl/name": "x", "long": strings.Repeat("x", 1<<16)}
	for i := range 1000 {
		in[fmt.Sprint("label", i)] = fmt.Sprint(i)
	}
	got := Labels(in, "nerdctl/")
	if len(got) != len(in)-1 || got["a"] != "1" || got["long"] != in["long"] || got["label999"] != "999" {
		t.Errorf("%d labels of %d, want all but an engine's own", len(got), len(in))
	}
	if got["b"] = "2"; in["b"] != "" {
		t.Error("the map is shared")
	}
	for _, none := range []map[string]string{nil, {"nerdctl/name": "x"}} {
		if got := Labels(none, "nerdctl/"); got != nil {
			t.Errorf("Labels(%v) = %v, want nil", none, got)
		}
	}
}

// scripted is an engine whose answers the test gives.
type scripted struct {
	mu   sync.Mutex
	list []Object
	may  []string // start
	look map[string]Object
	gate map[string]chan struct{}

	all    chan struct{} // if not nil, all looks wait for it
	looked int
}

func (s *scripted) List(context.Context) ([]Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list, nil
}

func (s *scripted) Starting(context.Context) ([]string, error) { return s.may, nil }

func (s *scripted) Look(ctx context.Context, id string) (Object, bool, error) {
	s.mu.Lock()
	o, ok := s.look[id]
	gate := s.gate[id]
	if s.looked++; gate == nil {
		gate = s.all
	}
	s.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
		}
	}
	return o, ok, nil
}

func object(id string) Object {
	b := port.Binding{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}, Origin: port.Origin{ID: id}}
	return Object{ID: id, Bindings: []port.Binding{b}}
}

// A look that began before a death must not bring the dead back.
func TestLookOvertakenByDeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		e := &scripted{look: map[string]Object{"x": object("x")}, gate: map[string]chan struct{}{"x": gate}}
		events := make(chan Event)
		f := followed(t, e, Stream{Events: events}, new(Table))
		synctest.Wait()
		events <- Event{ID: "x"}
		synctest.Wait() // the look is under way, and has seen it alive
		e.mu.Lock()
		delete(e.look, "x")
		e.mu.Unlock()
		events <- Event{ID: "x", Gone: true}
		close(gate)
		synctest.Wait()
		if f.has("x") {
			t.Error("a dead container is still published")
		}
	})
}

// If the engine does not know a container's state, its ports stay as they are, and
// it is inspected again without an event.
func TestUnsureContainerIsInspectedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &scripted{list: []Object{object("x"), object("y")}, look: map[string]Object{"x": object("x"), "y": object("y")}}
		f := followed(t, e, Stream{}, new(Table), time.Minute)
		synctest.Wait()
		set := func(x Object, running bool) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.list = []Object{object("y")}
			delete(e.look, "x")
			if running {
				e.list, e.look["x"] = append(e.list, x), x
			}
		}
		set(Object{ID: "x", Unsure: true}, true)
		time.Sleep(time.Minute + 10*unsureFor) // a list, and looks after it
		synctest.Wait()
		if !f.has("x") {
			t.Error("a container whose state is not known was withdrawn")
		}
		set(Object{}, false)
		time.Sleep(maxUnsureFor)
		synctest.Wait()
		if f.has("x") || !f.has("y") {
			t.Error("it ended unseen: nobody looked again")
		}
	})
}

// A subscription that the engine does not confirm is followed by a second list,
// which finds what fell in between.
func TestUnconfirmedSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &scripted{list: []Object{object("x")}}
		f := followed(t, e, Stream{Unconfirmed: true}, new(Table))
		synctest.Wait()
		if !f.has("x") {
			t.Error("the first list is not applied")
		}
		e.mu.Lock()
		e.list = nil // it ended, and there was no event
		e.mu.Unlock()
		time.Sleep(confirmAfter + time.Millisecond)
		synctest.Wait()
		if f.has("x") {
			t.Error("a container that ended without an event is published after the second list")
		}
	})
}

// A process with the number of a container's first process, in a cgroup that a
// user named like the container, is not that process.
func TestForgedCgroupIsNotAttributed(t *testing.T) {
	h := Host{Proc: t.TempDir(), Cgroup2: t.TempDir()}
	path := "/user.slice/docker-" + id1 + ".scope"
	if err := errors.Join(os.MkdirAll(filepath.Join(h.Proc, "7"), 0o755), os.MkdirAll(filepath.Join(h.Cgroup2, path), 0o755),
		os.WriteFile(filepath.Join(h.Proc, "7", "cgroup"), []byte("0::"+path+"\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if uid, found := h.CgroupUser(path); !found || int(uid) != os.Getuid() {
		t.Errorf("CgroupUser = %d, %v", uid, found)
	}
	if _, _, ok := h.Cgroup(7, uint32(os.Getuid()), id1); !ok {
		t.Error("the cgroup of the engine's user is not believed")
	}
	if err := os.Chown(filepath.Join(h.Cgroup2, path), 4242, -1); err != nil {
		return // only root can try the rest
	}
	if _, _, ok := h.Cgroup(7, 0, id1); ok {
		t.Error("a cgroup of another user is believed")
	}
}

// followed runs Follow until the test ends, with an audit each hour if nothing else is given.
func followed(t *testing.T, e Engine, st Stream, facts *Table, audit ...time.Duration) *feed {
	f := &feed{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- NewSet(slog.New(slog.DiscardHandler), f, facts, Host{}).Follow(ctx, e, st, append(audit, time.Hour)[0], func() {})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Follow = %v, want the context's error", err)
		}
	})
	return f
}

// named is object with a fact.
func named(id, cgroup string) Object {
	o := object(id)
	o.Fact = Fact{Owner: port.Owner{Kind: port.OwnerContainer, ID: id, Name: id}, ID: id1, Path: cgroup}
	return o
}

// The facts of a list are there before the engine counts as live, though each
// container is still to be inspected.
func TestOwnersNamedFromContainerList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listed := named("x", "")
		listed.Partial = true
		gate := make(chan struct{})
		e := &scripted{list: []Object{listed}, look: map[string]Object{"x": named("x", "/docker/x")}, all: gate}
		var facts Table
		followed(t, e, Stream{}, &facts)
		synctest.Wait()
		if o, ok := facts.ByCgroupPath("/docker/" + id1); !ok || o.Name != "x" {
			t.Errorf("after the list: owner %+v, %v", o, ok)
		}
		close(gate)
		synctest.Wait()
		if o, ok := facts.ByCgroupPath("/docker/x"); !ok || o.Name != "x" {
			t.Errorf("after the look: owner %+v, %v", o, ok)
		}
	})
}

// An engine may take long to inspect a container that starts. A list names it.
func TestSlowInspectionIsFollowedByAList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		e := &scripted{look: make(map[string]Object), all: gate}
		events := make(chan Event)
		var facts Table
		f := followed(t, e, Stream{Events: events}, &facts)
		synctest.Wait()
		e.mu.Lock()
		for i := range 2 * lookers {
			o := named(fmt.Sprint("x", i), "")
			o.Partial = true
			e.list, e.look[o.ID] = append(e.list, o), named(o.ID, "/docker/"+o.ID)
		}
		e.mu.Unlock()
		for i := range 2 * lookers {
			events <- Event{ID: fmt.Sprint("x", i)}
		}
		time.Sleep(2 * slowLook)
		synctest.Wait()
		for i := range 2 * lookers {
			id := fmt.Sprint("x", i)
			if _, ok := facts.Fact(id); !ok || !f.has(id) {
				t.Errorf("%s is not known after %v", id, 2*slowLook)
			}
		}
		close(gate)
		synctest.Wait()
		if fact, _ := facts.Fact("x0"); fact.Path != "/docker/x0" {
			t.Errorf("after the looks: %+v", fact)
		}
	})
}

func TestUnsureContainerIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := Object{ID: "x", Unsure: true, Fact: named("x", "/default/x").Fact}
		e := &scripted{list: []Object{o}, look: map[string]Object{"x": o}}
		var facts Table
		f := followed(t, e, Stream{}, &facts)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if owner, ok := facts.ByCgroupPath("/default/x"); !ok || owner.Name != "x" || f.has("x") {
			t.Errorf("owner %+v, %v", owner, ok)
		}
		e.mu.Lock()
		looked := e.looked
		delete(e.look, "x")
		e.mu.Unlock()
		if looked < 10 || looked > 30 {
			t.Errorf("looked at %d times in 10 minutes", looked)
		}
		time.Sleep(maxUnsureFor)
		synctest.Wait()
		if _, ok := facts.ByCgroupPath("/default/x"); ok {
			t.Error("a container that is gone is still named")
		}
	})
}

// A container that ended may have left addresses.
func TestStoppedContainerIsRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		addr := netip.MustParseAddr("10.4.0.2")
		running := named("x", "/default/x")
		running.Fact.Addresses = []netip.Addr{addr}
		stopped := Object{ID: "x", Fact: Fact{Owner: running.Fact.Owner, Addresses: running.Fact.Addresses, Stopped: true}}
		e := &scripted{list: []Object{running}, look: map[string]Object{"x": stopped}}
		events := make(chan Event)
		var facts Table
		followed(t, e, Stream{Events: events, Stopped: true}, &facts)
		synctest.Wait()
		check := func(when string, runs, has bool) {
			t.Helper()
			synctest.Wait()
			if _, ok := facts.ByAddress(addr); ok != runs {
				t.Errorf("%s: running %v", when, ok)
			}
			if _, ok := facts.StoppedAt(addr); ok != has {
				t.Errorf("%s: stopped %v", when, ok)
			}
		}
		check("running", true, false)
		events <- Event{ID: "x", Gone: true}
		check("stopped", false, true)
		e.mu.Lock()
		e.look["x"] = running
		e.mu.Unlock()
		events <- Event{ID: "x"}
		check("started", true, false)
		e.mu.Lock()
		delete(e.look, "x")
		e.mu.Unlock()
		events <- Event{ID: "x", Gone: true}
		check("removed", false, false)
	})
}

// An engine that was removed is stale for a while, and then one that never was.
func TestRemovedEngineIsForgotten(t *testing.T) {
	for _, grace := range []time.Duration{0, -1} {
		synctest.Test(t, func(t *testing.T) {
			f := &feed{}
			began, session, last := time.Now(), 0, time.Duration(0)
			_ = supervise(t, time.Hour, Supervisor{Retry: Retry{Grace: grace}, Feed: f}, func(_ context.Context, up func()) error {
				if session++; session == 1 {
					up()
					return errGone
				}
				if f.replaced == 0 {
					last = time.Since(began) // that it was stale
				}
				return ErrAbsent
			})
			if forgotten := f.replaced > 0; forgotten != (grace == 0) || forgotten && (last < forgetAfter || last > forgetAfter+2*absentDelay) || len(f.stale) == 0 {
				t.Errorf("grace %v: %d empty sets, stale %q, last at %v", grace, f.replaced, f.stale, last)
			}
		})
	}
}

// Sessions that end on purpose, one after the other, do not spin.
func TestSessionsThatEndOnPurposeArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		_ = supervise(t, time.Minute, Supervisor{}, func(_ context.Context, up func()) error {
			n++
			up()
			return ErrAgain
		})
		if n < 50 || n > 70 {
			t.Errorf("%d sessions in a minute", n)
		}
	})
}
