// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
)

func memoryIn(t *testing.T) Memory {
	return Memory(filepath.Join(t.TempDir(), "docker-owners.json"))
}

func container(name, id string) Fact {
	return Fact{
		Owner:     port.Owner{Kind: port.OwnerContainer, ID: id, Name: name, Labels: map[string]string{"secret": "yes"}},
		ID:        id,
		Cgroup:    17,
		Path:      "/docker/" + id,
		User:      1000,
		Addresses: []netip.Addr{netip.MustParseAddr("172.17.0.2"), netip.MustParseAddr("fd00::2")},
	}
}

func TestMemoryKeepsFacts(t *testing.T) {
	m := memoryIn(t)
	want := Saved{Listed: true, Facts: map[string]Fact{"1": container("web", id1)}}
	stopped := container("stopped", id2)
	stopped.Stopped = true
	if err := m.Save(Saved{Listed: true, Facts: map[string]Fact{"1": want.Facts["1"], "2": stopped}}); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(string(m))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	if got, err := m.Load(); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("Load = %+v, %v; want %+v", got, err, want)
	}
	if err := m.Save(Saved{}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(string(m)); !os.IsNotExist(err) {
		t.Errorf("an empty memory leaves its file: %v", err)
	}
}

// rewritten changes the saved file as JSON.
func rewritten(t *testing.T, m Memory, change func(map[string]any)) {
	t.Helper()
	b, err := os.ReadFile(string(m))
	if err != nil {
		t.Fatal(err)
	}
	var f map[string]any
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	change(f)
	if b, err = json.Marshal(f); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(string(m), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// What is not surely our own, of this boot and of this version is not believed.
func TestMemoryIsCheckedOnRead(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, m Memory){
		"no file":      func(_ *testing.T, m Memory) { _ = os.Remove(string(m)) },
		"another boot": func(t *testing.T, m Memory) { rewritten(t, m, func(f map[string]any) { f["boot"] = "earlier" }) },
		"another version": func(t *testing.T, m Memory) {
			rewritten(t, m, func(f map[string]any) { f["version"] = memoryVersion + 1 })
		},
		"writable by all": func(_ *testing.T, m Memory) { _ = os.Chmod(string(m), 0o622) },
		"no JSON":         func(_ *testing.T, m Memory) { _ = os.WriteFile(string(m), []byte("{"), 0o600) },
		"too large":       func(_ *testing.T, m Memory) { _ = os.Truncate(string(m), maxMemory+1) },
		"a directory":     func(_ *testing.T, m Memory) { _ = os.Remove(string(m)); _ = os.Mkdir(string(m), 0o700) },
		"no container": func(t *testing.T, m Memory) {
			rewritten(t, m, func(f map[string]any) {
				fact := f["facts"].(map[string]any)["1"].(map[string]any)
				fact["owner"] = map[string]any{"kind": "process", "name": "init", "id": "1"}
			})
		},
		"an address of everybody": func(t *testing.T, m Memory) {
			rewritten(t, m, func(f map[string]any) {
				f["facts"].(map[string]any)["1"].(map[string]any)["addresses"] = []string{"127.0.0.1"}
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := memoryIn(t)
			if err := m.Save(Saved{Facts: map[string]Fact{"1": container("web", id1)}}); err != nil {
				t.Fatal(err)
			}
			spoil(t, m)
			got, err := m.Load()
			if len(got.Facts) > 0 {
				t.Errorf("Load = %+v; want nothing", got)
			}
			if name == "another version" && (err == nil || !strings.Contains(err.Error(), "version 2")) { // not silently
				t.Errorf("error %v, want one that names the version", err)
			}
		})
	}
}

// What an agent that was killed left beside the file is removed by the next save.
func TestSaveRemovesAnUnfinishedFile(t *testing.T) {
	m := memoryIn(t)
	if err := os.WriteFile(string(m)+".new", []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.Save(Saved{Listed: true}); err != nil {
		t.Fatal(err)
	}
	if files, err := os.ReadDir(filepath.Dir(string(m))); err != nil || len(files) != 1 {
		t.Errorf("files %v, %v; want one", files, err)
	}
}

// A failed save is repeated without a further change, and logged once until one succeeds.
func TestFailedSaveIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "run")
		m, w := Memory(filepath.Join(dir, "docker-owners.json")), newForgotten(t)
		var logged strings.Builder
		w.set.Logger = slog.New(slog.NewTextHandler(&logged, nil))
		ctx, cancel := context.WithCancel(t.Context())
		_, saved := w.set.Remember(ctx, m)
		defer func() { cancel(); saved() }()
		for round := range 2 {
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			w.container(2*round, "web", id1, "")
			time.Sleep(3 * savePause)
			w.container(2*round+1, "web", id2, "")
			time.Sleep(3 * savePause)
			synctest.Wait()
			if n := strings.Count(logged.String(), "cannot save"); n != round+1 {
				t.Errorf("logged %d times after failure %d:\n%s", n, round+1, logged.String())
			}
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			time.Sleep(3 * savePause)
			if got, err := m.Load(); err != nil || got.Facts["web"].ID != id2 {
				t.Errorf("saved %+v, %v; want container %.8s", got.Facts, err, id2)
			}
		}
	})
}

// An error whose text differs each time is logged once as well.
func TestFailingSaveLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, w := memoryIn(t), newForgotten(t)
		var logged strings.Builder
		w.set.Logger = slog.New(slog.NewTextHandler(&logged, nil))
		ctx, cancel := context.WithCancel(t.Context())
		_, saved := w.set.Remember(ctx, m)
		defer func() { cancel(); saved() }()
		for n := range 3 {
			f := container("web", id1)
			f.Path = "/" + strings.Repeat("x", maxMemory+n)
			w.set.Facts.Swap(nil, map[string]Fact{"web": f})
			time.Sleep(2 * savePause)
		}
		synctest.Wait()
		if n := strings.Count(logged.String(), "cannot save"); n != 1 {
			t.Errorf("logged %d times, want once", n)
		}
	})
}

func FuzzMemory(f *testing.F) {
	f.Add([]byte(`{"version":1,"boot":"` + bootID() + `","listed":true,"facts":{"1":{"owner":{"kind":"container","name":"web","id":"1"},"addresses":["172.17.0.2"]}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decode(b)
		if err != nil {
			return
		}
		for object, f := range s.Facts {
			if f.Owner.Kind != port.OwnerContainer || f.Stopped {
				t.Errorf("%s: %+v is no running container", object, f)
			}
		}
	})
}

// restarted returns an agent that starts while the engine of w is away: a new registry
// and new facts.
func (w *forgotten) restarted(t *testing.T) *forgotten {
	t.Helper()
	next := newForgotten(t)
	next.host, next.rules, next.set.Host = w.host, w.rules, w.host
	next.r.Feed("nat").Replace(next.rules)
	return next
}

// away runs the source of w without an engine for a time.
func (w *forgotten) away(t *testing.T, m Memory, d time.Duration, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	known, saved := w.set.Remember(ctx, m)
	_ = Supervisor{
		Retry: Retry{}.WithDefaults(), Logger: slog.New(slog.DiscardHandler), Feed: w.set.Feed,
		Withdraw: w.set.Withdraw, Prune: w.set.Prune, Known: known,
	}.Run(ctx, func(context.Context, func()) error { return err })
	saved()
}

// An agent that is restarted while an engine is away knows the containers that still run,
// so that a port that a rule denies by its owner stays denied.
func TestRestartedAgentDeniesWithoutEngine(t *testing.T) {
	for _, cause := range []error{ErrAbsent, ErrRefused, errGone} {
		t.Run(fmt.Sprint(cause), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, w := memoryIn(t), newForgotten(t)
				id3 := strings.Repeat("3", 64)
				w.populated(t, "/docker/"+id1, 1)
				w.populated(t, "/system.slice/docker-"+id2+".scope", 1)
				w.populated(t, "/docker/"+id3, 1)
				ctx, cancel := context.WithCancel(t.Context())
				_, saved := w.set.Remember(ctx, m)
				w.container(1, "secret-path", id1, "/docker/"+id1)
				w.container(2, "secret-id", id2, "")
				w.container(3, "secret-ended", id3, "/docker/"+id3)
				cancel()
				saved()
				w.populated(t, "/docker/"+id3, 0)

				next := w.restarted(t)
				next.away(t, m, time.Minute, cause)
				if s := next.state(); s != registry.Stale {
					t.Errorf("the source is %s a minute after the start, want stale: the engine is expected", s)
				}
				for n := range uint16(3) {
					if p := next.publication(n + 1); p.Decision.Allow {
						t.Errorf("port %d is open while the engine is expected: %+v", n+1, p.Decision)
					}
				}

				next = next.restarted(t)
				next.away(t, m, time.Hour, cause)
				next.wantDenied(t, cause == errGone)
				if p := next.publication(3); p.Owner.Name != "" {
					t.Errorf("owner %q of a container that ended", p.Owner.Name)
				}
			})
		})
	}
}

func (w *forgotten) state() registry.SourceState { return sourceState(w.r) }

// wantDenied checks that a rule denies ports by their owner. An engine that may still
// answer can name another one, so that the port may be pending.
func (w *forgotten) wantDenied(t *testing.T, mayBePending bool) {
	t.Helper()
	for n, want := range map[uint16]string{1: "secret-path", 2: "secret-id"} {
		if p := w.publication(n); p.Owner.Name != want || p.Decision.Allow || p.Decision.Pending() && !mayBePending {
			t.Errorf("port %d: owner %q, decision %+v; want a denial of %s", n, p.Owner.Name, p.Decision, want)
		}
	}
}

// What runs is saved within seconds, for an agent that is killed.
func TestMemoryOfAKilledAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, w := memoryIn(t), newForgotten(t)
		ctx, cancel := context.WithCancel(t.Context())
		_, saved := w.set.Remember(ctx, m)
		defer func() { cancel(); saved() }()
		for n, id := range []string{id1, id2} {
			w.container(n+1, "web", id, "")
			time.Sleep(2 * savePause)
			if got, err := m.Load(); err != nil || got.Facts["web"].ID != id {
				t.Errorf("saved %+v, %v; want container %.8s", got.Facts, err, id)
			}
		}
	})
}

// Cgroups of users other than root and the engine's are not looked at: they may be many.
func TestSearchForCgroupsSkipsOtherUsers(t *testing.T) {
	if os.Getuid() != 0 {
		return // only root makes files of others
	}
	w := &forgotten{host: Host{Cgroup2: t.TempDir()}}
	w.populated(t, "/user.slice/docker-"+id1+".scope", 1)
	w.populated(t, "/system.slice/docker-"+id2+".scope", 1)
	if err := os.Chown(filepath.Join(w.host.Cgroup2, "user.slice"), 1000, 1000); err != nil {
		t.Fatal(err)
	}
	f := map[string]Fact{"1": {ID: id1}, "2": {ID: id2}}
	runs := w.host.running(f)
	if runs(f["1"]) || !runs(f["2"]) {
		t.Errorf("found %v, %v; want that of root alone", runs(f["1"]), runs(f["2"]))
	}
	f["3"] = Fact{ID: strings.Repeat("3", 64), User: 1000}
	if runs = w.host.running(f); !runs(f["1"]) {
		t.Error("not found below the engine's user")
	}
}
