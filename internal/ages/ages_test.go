// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ages

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/table"
)

func publication(number uint16, since time.Time) port.Publication {
	return port.Publication{
		Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: number}, Since: since,
		Origins: []port.OriginInfo{
			{Origin: port.Origin{Source: port.SourceSocket, ID: "1a"}, Since: since},
			{Origin: port.Origin{Source: port.SourceNAT, ID: "rule"}, Handle: 7, Since: since.Add(time.Minute)},
		},
	}
}

func tableOf(pubs ...port.Publication) *Publications {
	t := table.New[port.Key, port.Publication](port.Key.Compare)
	t.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, p := range pubs {
			tx.Put(p.Key, p)
		}
	})
	return t
}

// machine is a machine whose wall clock differs from its time since boot.
type machine struct {
	booted time.Time     // by the clock that only runs forwards
	step   time.Duration // of the wall clock
	id     string
	saves  int           // how often it was asked for the id: once for each save, or load
	cost   time.Duration // of a save
}

func (m *machine) clock() clock {
	return clock{
		now:  func() time.Time { return time.Now().Add(m.step) },
		boot: func() (time.Duration, error) { return time.Since(m.booted), nil },
		id: func() string {
			m.saves++
			time.Sleep(m.cost)
			return m.id
		},
	}
}

// saved returns the file that an agent wrote that knew one port for an hour, and ended in
// order or was killed.
func saved(t *testing.T, m *machine, killed bool) File {
	t.Helper()
	f := Beside(filepath.Join(t.TempDir(), "control.sock"))
	ctx, cancel := context.WithCancel(t.Context())
	k := newKeeper(f, m.clock(), slog.New(slog.DiscardHandler))
	done := make(chan struct{})
	go func() {
		k.run(ctx, tableOf(publication(80, m.clock().now().Add(-time.Hour))))
		close(done)
	}()
	synctest.Wait()
	var b []byte
	if killed {
		b = read(t, f)
	}
	cancel()
	<-done
	if killed {
		write(t, f, b)
	}
	return f
}

func read(t *testing.T, f File) []byte {
	t.Helper()
	b, err := os.ReadFile(string(f))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func write(t *testing.T, f File, b []byte) {
	t.Helper()
	if err := os.WriteFile(string(f), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestAgeOutlivesTheAgent: the next agent knows the ages, also if the wall clock was set
// meanwhile, and as lower bounds if the first one was killed.
func TestAgeOutlivesTheAgent(t *testing.T) {
	for name, killed := range map[string]bool{"ended": false, "killed": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &machine{booted: time.Now().Add(-24 * time.Hour), id: "boot"}
				f := saved(t, m, killed)
				time.Sleep(time.Minute)
				m.step = 1000 * time.Hour
				ports, err := f.load(m.clock())
				if err != nil || len(ports) != 1 {
					t.Fatalf("%d ports, %v", len(ports), err)
				}
				p := ports[0]
				if age := m.clock().now().Sub(p.Since); age != time.Hour+time.Minute || p.SinceAtLeast != killed {
					t.Errorf("age %v, at least: %v", age, p.SinceAtLeast)
				}
				want := publication(80, p.Since)
				if p.Key != want.Key || len(p.Origins) != 2 {
					t.Fatalf("%+v", p)
				}
				for i, o := range p.Origins {
					w := want.Origins[i]
					if o.Origin != w.Origin || o.Handle != w.Handle || !o.Since.Equal(w.Since) {
						t.Errorf("origin %+v, want %+v", o, w)
					}
				}
			})
		})
	}
}

// TestFileThatCannotBeUsed is ignored with an error.
func TestFileThatCannotBeUsed(t *testing.T) {
	replace := func(old, replacement string) func(*testing.T, File, *machine) {
		return func(t *testing.T, f File, _ *machine) {
			b := read(t, f)
			if !bytes.Contains(b, []byte(old)) {
				t.Fatalf("the file has no %s: %s", old, b)
			}
			write(t, f, bytes.ReplaceAll(b, []byte(old), []byte(replacement)))
		}
	}
	for name, spoil := range map[string]func(*testing.T, File, *machine){
		"of another boot":          func(_ *testing.T, _ File, m *machine) { m.id = "next" },
		"no boot id":               func(t *testing.T, f File, m *machine) { replace(`"boot":"boot"`, `"boot":""`)(t, f, m); m.id = "" },
		"half":                     func(t *testing.T, f File, _ *machine) { b := read(t, f); write(t, f, b[:len(b)/2]) },
		"empty":                    func(t *testing.T, f File, _ *machine) { write(t, f, nil) },
		"too large":                func(t *testing.T, f File, _ *machine) { write(t, f, bytes.Repeat([]byte(" "), maxFile+1)) },
		"of another version":       replace(`"version":1`, `"version":2`),
		"a time that has not come": replace(`"since":`, `"since":9`),
		"a time before the boot":   replace(`"since":`, `"since":-`),
		"no address":               replace(`0.0.0.0`, ``),
		"no number":                replace(`"port":80`, `"port":0`),
		"a number too large":       replace(`"port":80`, `"port":80000`),
		"an unknown protocol":      replace(`"tcp"`, `"sctp"`),
		"others can change it": func(t *testing.T, f File, _ *machine) {
			if err := os.Chmod(string(f), 0o666); err != nil {
				t.Fatal(err)
			}
		},
		"a directory": func(t *testing.T, f File, _ *machine) {
			if err := errors.Join(os.Remove(string(f)), os.Mkdir(string(f), 0o700)); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &machine{booted: time.Now().Add(-24 * time.Hour), id: "boot"}
				f := saved(t, m, false)
				spoil(t, f, m)
				if ports, err := f.load(m.clock()); err == nil || len(ports) > 0 || !strings.Contains(err.Error(), string(f)) {
					t.Errorf("%d ports, %v", len(ports), err)
				}
			})
		})
	}
	if ports, err := File(filepath.Join(t.TempDir(), "none")).Load(); err != nil || ports != nil {
		t.Errorf("without a file: %v, %v", ports, err)
	}
}

// TestFilesOfTwoAgents: two agents never have one file.
func TestFilesOfTwoAgents(t *testing.T) {
	files := map[File]string{}
	for _, control := range []string{"/run/fairlead/control.sock", "/run/fairlead/control", "/run/other/control.sock", "/run/fairlead/other.sock"} {
		f := Beside(control)
		if other, ok := files[f]; ok {
			t.Errorf("%s and %s have the file %s", other, control, f)
		}
		files[f] = control
	}
}

// TestSavesNowAndThen: whatever changes, the file is written once a minute, and a
// suspension counts though the table's times do not have it.
func TestSavesNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{booted: time.Now().Add(-24 * time.Hour), id: "boot"}
		f := Beside(filepath.Join(t.TempDir(), "control.sock"))
		pubs := tableOf(publication(80, time.Now()))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go newKeeper(f, m.clock(), slog.New(slog.DiscardHandler)).run(ctx, pubs)
		writes := 0
		last := []byte(nil)
		for range 600 {
			time.Sleep(time.Second)
			pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) {
				p := publication(81, time.Now().Add(-time.Hour))
				tx.Put(p.Key, p)
			})
			synctest.Wait()
			if b := read(t, f); !bytes.Equal(b, last) {
				writes, last = writes+1, b
			}
		}
		if writes < 9 || writes > 11 {
			t.Errorf("%d writes in 600 s", writes)
		}
		m.booted = m.booted.Add(-8 * time.Hour) // it slept
		cancel()
		synctest.Wait()
		ports, err := f.load(m.clock())
		if err != nil || len(ports) != 2 {
			t.Fatalf("%d ports, %v", len(ports), err)
		}
		if age := time.Since(ports[0].Since); age != 8*time.Hour+600*time.Second {
			t.Errorf("age %v", age)
		}
	})
}

// TestSavesTakeLittleTime: saves that are slow are rare.
func TestSavesTakeLittleTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{booted: time.Now().Add(-24 * time.Hour), id: "boot", cost: time.Second}
		f := Beside(filepath.Join(t.TempDir(), "control.sock"))
		pubs := tableOf()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			newKeeper(f, m.clock(), slog.New(slog.DiscardHandler)).run(ctx, pubs)
			close(done)
		}()
		for range 1400 {
			time.Sleep(10 * time.Second)
			pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) {
				p := publication(80, time.Now())
				tx.Put(p.Key, p)
			})
		}
		synctest.Wait()
		if m.saves != 4 {
			t.Errorf("%d saves of %v in 14,000 s, want 4", m.saves, m.cost)
		}
		cancel()
		<-done
	})
}

// TestSaysOnceThatItCannotSave: a directory that is gone costs one line of log, and is tried
// again only if ports change.
func TestSaysOnceThatItCannotSave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{booted: time.Now(), id: "boot"}
		var log bytes.Buffer
		ctx, cancel := context.WithCancel(t.Context())
		k := newKeeper(File(filepath.Join(t.TempDir(), "none", "file")), m.clock(), slog.New(slog.NewTextHandler(&log, nil)))
		pubs := tableOf(publication(80, time.Now()))
		done := make(chan struct{})
		go func() {
			k.run(ctx, pubs)
			close(done)
		}()
		for want := 1; want <= 2; want++ {
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			if m.saves != want {
				t.Errorf("%d attempts, want %d", m.saves, want)
			}
			pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Delete(publication(80, time.Time{}).Key) })
		}
		cancel()
		<-done
		if n := strings.Count(log.String(), "\n"); n != 1 {
			t.Errorf("%d lines:\n%s", n, &log)
		}
	})
}

// A save of many ports, of which no list is made, takes little memory at once, and keeps none.
func TestSaveTakesLittleMemory(t *testing.T) {
	m := &machine{booted: time.Now(), id: "boot"}
	f := File(filepath.Join(t.TempDir(), "file"))
	k := newKeeper(f, m.clock(), slog.New(slog.DiscardHandler))
	pubs := many(10_000)
	k.note(false)
	most := uint64(0)
	heap := func() uint64 {
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	runtime.GC()
	before := heap()
	err := k.writePorts(bufio.NewWriterSize(writerFunc(func(b []byte) (int, error) {
		runtime.GC()
		most = max(most, heap()-before)
		return len(b), nil
	}), 1<<17), pubs.View())
	if err != nil || most > 1<<19 {
		t.Errorf("%d bytes in use, %v; want at most half a megabyte", most, err)
	}
	runtime.KeepAlive(pubs)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func many(n uint16) *Publications {
	var all []port.Publication
	for i := range n {
		all = append(all, publication(1+i, time.Now().Add(-time.Hour)))
	}
	return tableOf(all...)
}

// A file that would be larger than what Load reads is not written; the old one stays.
func TestTooManyPorts(t *testing.T) {
	m := &machine{booted: time.Now().Add(-24 * time.Hour), id: "boot"}
	f := File(filepath.Join(t.TempDir(), "file"))
	k := newKeeper(f, m.clock(), slog.New(slog.DiscardHandler))
	k.note(false)
	if err := k.write(many(10).View(), true); err != nil {
		t.Fatal(err)
	}
	large := publication(80, time.Now())
	large.Origins[0].ID = strings.Repeat("x", maxFile)
	if err := k.write(tableOf(large).View(), true); err == nil || !strings.Contains(err.Error(), "16777216 bytes") {
		t.Errorf("%v, want an error with the limit", err)
	}
	if ports, err := f.load(m.clock()); err != nil || len(ports) != 10 {
		t.Errorf("%d ports, %v; want those of before", len(ports), err)
	}
}

// Ports that opened before, between and after suspensions have the ages that they have, and a
// laptop that sleeps each night remembers no more nights than it has ports.
func TestSuspensions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const night, day, nights = 8 * time.Hour, 16 * time.Hour, 100
		m := &machine{booted: time.Now(), id: "boot"}
		f := File(filepath.Join(t.TempDir(), "file"))
		k := newKeeper(f, m.clock(), slog.New(slog.DiscardHandler))
		opened := func(day int) bool { return day == 0 || day == 3 || day == 50 || day == nights }
		var all []port.Publication
		for i := range nights + 1 {
			if opened(i) {
				p := publication(uint16(1+i), time.Now())
				p.Origins[1].Since = p.Since.Add(time.Minute)
				all = append(all, p)
			}
			k.note(false)
			if err := k.write(tableOf(all...).View(), true); err != nil {
				t.Fatal(err)
			}
			time.Sleep(day)
			if i < nights {
				k.note(false) // before the night
				m.booted = m.booted.Add(-night)
			}
		}
		if n := len(k.times.periods); n > len(all)+2 {
			t.Errorf("%d periods for %d ports", n, len(all))
		}
		if err := k.write(tableOf(all...).View(), true); err != nil {
			t.Fatal(err)
		}
		ports, err := f.load(m.clock())
		if err != nil || len(ports) != len(all) {
			t.Fatalf("%d ports, %v", len(ports), err)
		}
		for _, p := range ports {
			of := int(p.Port) - 1
			want := time.Duration(nights-of)*(day+night) + day
			if age := time.Since(p.Since); age != want {
				t.Errorf("port of day %d is %v old, want %v", of, age, want)
			}
			if age := time.Since(p.Origins[1].Since); age != want-time.Minute {
				t.Errorf("origin of day %d is %v old, want %v", of, age, want-time.Minute)
			}
		}
	})
}

// Two readings of the clocks that are not of one instant are no suspension.
func TestLateReadingIsNoSuspension(t *testing.T) {
	var k times
	began := time.Now()
	for i := range 1000 {
		at := began.Add(time.Duration(i) * time.Second)
		k.look(at, time.Hour+time.Duration(i)*time.Second+time.Duration(i%2)*jitter)
	}
	if len(k.periods) != 1 {
		t.Errorf("%d periods, want 1", len(k.periods))
	}
	if got := k.at(began.Add(-2 * time.Hour)); got != 0 {
		t.Errorf("before the boot: %v, want 0", got)
	}
}

func BenchmarkSave(b *testing.B) {
	m := &machine{booted: time.Now(), id: "boot"}
	k := newKeeper(File(filepath.Join(b.TempDir(), "file")), m.clock(), slog.New(slog.DiscardHandler))
	view := many(10_000).View()
	k.note(false)
	b.ReportAllocs()
	for b.Loop() {
		if err := k.write(view, false); err != nil {
			b.Fatal(err)
		}
	}
}
