// SPDX-License-Identifier: Apache-2.0

package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

// history is every state that a table had.
type history struct {
	mu  sync.Mutex
	was map[uint64]map[string]string
}

func (h *history) change(t *rowTable, f func(*table.Tx[string, row])) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := t.Update(f)
	h.was[g] = content(t)
}

// Two tables in each direction, over connections that cut, spoil and drop messages at any
// place: what a receiver shows was a state of the sender, and when it is quiet they are equal.
func TestModel(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { model(t, rand.New(rand.NewPCG(seed, 1))) })
		})
	}
}

func model(t *testing.T, r *rand.Rand) {
	var tables [2]*rowTable
	var past [2]history
	var shown [2]mirror
	for i := range tables {
		tables[i] = newTable()
		past[i].was = map[uint64]map[string]string{0: {}}
	}
	step := func(side int) {
		past[side].change(tables[side], func(tx *table.Tx[string, row]) {
			for range 1 + r.IntN(1+r.IntN(60)) {
				k := fmt.Sprint("k", r.IntN(70))
				if r.IntN(3) == 0 {
					tx.Delete(k)
				} else {
					tx.Put(k, row{k, fmt.Sprint(r.IntN(5))})
				}
			}
		})
	}
	const rounds = 30
	for round := range rounds {
		clean := round == rounds-1
		pa, pb := newPipe(1 + r.IntN(4))
		if !clean {
			spoilers(r.Uint64(), pa, pb)
		}
		var ends [2]*Session
		for i, p := range []*pipe{pa, pb} {
			ends[i] = New(p, Options{})
			ends[i].part = 8
			k, other := kind(fmt.Sprint("t", i)), kind(fmt.Sprint("t", 1-i))
			if i == 1 {
				k.Answers = "t0"
			}
			Send(ends[i], k, from(tables[i]))
			Receive(ends[i], other, func(s Step[string, row]) error {
				_ = shown[1-i].apply(s)
				past[1-i].mu.Lock()
				defer past[1-i].mu.Unlock()
				if want := past[1-i].was[s.Generation]; want == nil || !shown[1-i].equals(want) {
					t.Errorf("table %d shows at generation %d what it was not", 1-i, s.Generation)
				}
				return nil
			})
		}
		stop := run(t, pa, pb, ends[0], ends[1])
		for range r.IntN(40) {
			step(r.IntN(2))
			time.Sleep(time.Duration(r.IntN(3)) * time.Second)
		}
		if clean {
			time.Sleep(time.Minute)
			synctest.Wait()
			for i := range tables {
				if !shown[i].equals(content(tables[i])) {
					t.Errorf("table %d is not equal when it is quiet", i)
				}
			}
		}
		if _, err := stop(); err == nil {
			t.Error("a session ended without an error")
		}
	}
}

// spoilers has a connection lose and spoil some messages, and cut at some time.
func spoilers(seed uint64, ends ...*pipe) {
	r := rand.New(rand.NewPCG(seed, 2))
	var mu sync.Mutex
	cutAfter, rate := r.IntN(200), 2+r.IntN(100)
	for _, p := range ends {
		p.full = r.IntN(3) == 0
		p.spoil = func(b []byte) []byte {
			mu.Lock()
			defer mu.Unlock()
			if cutAfter--; cutAfter < 0 {
				p.close()
			}
			switch r.IntN(rate) {
			case 0:
				return nil
			case 1:
				return b[:len(b)/2]
			}
			return b
		}
	}
}

// one sends a table from a to b.
func one(t *testing.T, k Kind[string, row], f From[string, row, string, row], m *mirror) (a, b *Session, pa, pb *pipe) {
	t.Helper()
	pa, pb = newPipe(100)
	a, b = New(pa, Options{Stats: new(Stats)}), New(pb, Options{})
	Send(a, k, f)
	Receive(b, k, m.apply)
	return a, b, pa, pb
}

// A change leaves by whoever made it, in one message.
func TestChangeLeavesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, m := newTable(), new(mirror)
		a, b, pa, pb := one(t, kind("t"), from(src), m)
		stop := run(t, pa, pb, a, b)
		synctest.Wait()
		if !a.out.TryLock() {
			t.Fatal("somebody writes")
		}
		a.out.Unlock()
		before := a.o.Stats.FramesOut.Load()
		put(src, row{"a", "1"})
		if n := a.o.Stats.FramesOut.Load() - before; n != 1 {
			t.Errorf("%d messages left with the change", n)
		}
		synctest.Wait()
		if !m.equals(map[string]string{"a": "1"}) {
			t.Errorf("%+v", m.has)
		}
		_, _ = stop()
	})
}

// What the connection does not take at once is left to another goroutine.
func TestChangeWaitsForNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, m := newTable(), new(mirror)
		a, _, pa, _ := one(t, kind("t"), from(src), m)
		pa.out = make(chan []byte) // takes nothing
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- a.Run(ctx) }()
		for i := range 100 {
			put(src, row{"a", fmt.Sprint(i)})
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// What is only shown never holds up the others, and follows at its pace.
func TestPacedTableWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow, fast := kind("slow"), kind("fast")
		slow.Rate, slow.Acked = 100, false
		pa, pb := newPipe(0)
		a, b := New(pa, Options{}), New(pb, Options{})
		shown, wanted := newTable(), newTable()
		for i := range 1000 {
			put(shown, row{fmt.Sprint(i), strings.Repeat("x", 100)})
		}
		var sm, fm mirror
		Send(a, slow, from(shown))
		Send(a, fast, from(wanted))
		Receive(b, slow, sm.apply)
		var at []time.Duration
		began := time.Now()
		Receive(b, fast, func(s Step[string, row]) error {
			at = append(at, time.Since(began))
			if sm.steps > 0 {
				t.Error("it came after what is shown")
			}
			return fm.apply(s)
		})
		b.o.Wait = func(ctx context.Context, rows, _ int) error { // the peer takes a second for 64 rows
			time.Sleep(time.Duration(rows) * time.Second / 64)
			return nil
		}
		stop := run(t, pa, pb, a, b)
		time.Sleep(2 * time.Second) // in the middle of the large one
		put(wanted, row{"w", "1"})
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if !fm.equals(map[string]string{"w": "1"}) {
			t.Errorf("%v after 3 s", fm.has)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if !sm.equals(content(shown)) || sm.steps != 1 {
			t.Errorf("%d rows in %d steps", len(sm.has), sm.steps)
		}
		put(shown, row{"0", "a"})
		time.Sleep(pacedPause / 2)
		put(shown, row{"0", "b"})
		time.Sleep(pacedPause)
		synctest.Wait()
		if sm.steps != 2 || sm.has["0"] != "b" {
			t.Errorf("%d steps, %q; want one for both", sm.steps, sm.has["0"])
		}
		_, _ = stop()
	})
}

// Rows beyond the limits, and those that nobody would accept, are left out until they fit.
func TestLimits(t *testing.T) {
	src, m := newTable(), new(mirror)
	k := kind("t")
	k.Max, k.MaxBytes = 3, 400
	f := from(src)
	var mu sync.Mutex
	refused := make(map[string]bool)
	f.Sent = func(_ table.View[string, row], keys []string, no map[string]error) {
		mu.Lock()
		defer mu.Unlock()
		for _, k := range keys {
			delete(refused, k)
		}
		for k := range no {
			refused[k] = true
		}
	}
	a, b, pa, pb := one(t, k, f, m)
	run(t, pa, pb, a, b)
	is := func(what string, want map[string]string, no ...string) {
		t.Helper()
		eventually(t, what, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return m.equals(want) && m.left() == len(no) && slices.Equal(slices.Sorted(maps.Keys(refused)), no)
		})
	}
	put(src, row{"a", "1"}, row{"b", "bad"}, row{"c", "1"}, row{"d", "1"}, row{"e", "1"})
	is("three rows", map[string]string{"a": "1", "c": "1", "d": "1"}, "b", "e")
	remove(src, "a")
	is("room for one more", map[string]string{"c": "1", "d": "1", "e": "1"}, "b")
	put(src, row{"b", "good"})
	is("no room", map[string]string{"c": "1", "d": "1", "e": "1"}, "b")
	put(src, row{"c", "bad"})
	is("one became bad, another takes its place", map[string]string{"b": "good", "d": "1", "e": "1"}, "c")
	remove(src, "b", "c")
	put(src, row{"d", strings.Repeat("x", 350)}, row{"e", strings.Repeat("y", 100)})
	is("too many bytes", map[string]string{"d": strings.Repeat("x", 350)}, "e")
	put(src, row{"d", "1"})
	is("and room again", map[string]string{"d": "1", "e": strings.Repeat("y", 100)})
}

// The limit of bytes is the same on both sides, however many messages a step comes in.
func TestLimitOfBytesIsExact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, m := newTable(), new(mirror)
		k := kind("t")
		k.MaxBytes = 0
		for i := range 100 {
			r := row{fmt.Sprint(i), "x"}
			put(src, r)
			b, _ := wire.EncodeRow(r)
			k.MaxBytes += len(b)
		}
		a, b, pa, pb := one(t, k, from(src), m)
		a.part = 8
		b.o.Stats = new(Stats)
		stop := run(t, pa, pb, a, b)
		time.Sleep(time.Second)
		synctest.Wait()
		if !m.equals(content(src)) || b.o.Stats.Malformed.Load() > 0 {
			t.Errorf("%d rows came, %d messages were refused", len(m.has), b.o.Stats.Malformed.Load())
		}
		_, _ = stop()
	})
}

// What a host keeps of a guest is within its limit, also of rows that take more memory than
// their encoding: the sender leaves out what is beyond it, and a receiver takes no more.
func TestLimitOfMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := Wanted()
		k.MaxBytes = 1 << 20
		src := table.New[port.Key, port.Fact](port.Key.Compare)
		const rows = 100
		src.Update(func(tx *table.Tx[port.Key, port.Fact]) {
			for i := range uint16(rows) {
				p := port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 1 + i}, Decision: port.Decision{Allow: true}}
				p.Others = make([]port.OtherOwner, port.MaxOthers)
				tx.Put(p.Key, p)
			}
		})
		send := func(k Kind[port.Key, port.Fact]) (n, bytes, omitted int, malformed uint64) {
			pa, pb := newPipe(100)
			a, b := New(pa, Options{}), New(pb, Options{Stats: new(Stats)})
			Send(a, k, From[port.Key, port.Fact, port.Key, port.Fact]{
				Table: src, Key: func(k port.Key) port.Key { return k }, Row: func(p port.Fact) port.Fact { return p },
			})
			limited := Wanted()
			limited.MaxBytes = 1 << 20
			Receive(b, limited, func(s Step[port.Key, port.Fact]) error {
				for _, p := range s.Put {
					n, bytes = n+1, bytes+p.TextBytes()
				}
				omitted = s.Omitted
				return nil
			})
			stop := run(t, pa, pb, a, b)
			time.Sleep(time.Second)
			synctest.Wait()
			_, _ = stop()
			return n, bytes, omitted, b.o.Stats.Malformed.Load()
		}
		if n, bytes, omitted, malformed := send(k); n == 0 || bytes > 1<<20 || n+omitted != rows || malformed > 0 {
			t.Errorf("%d rows came of %d bytes, %d were left out, %d messages were refused", n, bytes, omitted, malformed)
		}
		k.MaxBytes = 1 << 30
		if n, _, _, malformed := send(k); n != 0 || malformed == 0 {
			t.Errorf("of a peer without a limit %d rows were applied, and %d messages refused", n, malformed)
		}
	})
}

// Keys that are removed take room in a message too.
func TestRemovedKeysBesideLargeRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, m := newTable(), new(mirror)
		k := kind("t")
		k.MaxBytes = 8 << 20
		long := strings.Repeat("k", 200)
		var old []string
		for i := range 400 {
			old = append(old, long+fmt.Sprint(i))
			put(src, row{old[i], ""})
		}
		a, b, pa, pb := one(t, k, from(src), m)
		stop := run(t, pa, pb, a, b)
		time.Sleep(time.Second)
		src.Update(func(tx *table.Tx[string, row]) {
			for i := range 10 {
				tx.Put(fmt.Sprint(i), row{fmt.Sprint(i), strings.Repeat("x", 104_000-5)})
			}
			for _, k := range old {
				tx.Delete(k)
			}
		})
		time.Sleep(time.Second)
		synctest.Wait()
		if !m.equals(content(src)) {
			t.Errorf("%d rows came, want 10", len(m.has))
		}
		if err, _ := stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// Who says nothing of what it has seen is sent little more: what changes meanwhile is one step.
func TestFewStepsAreUnseen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, m := newTable(), new(mirror)
		a, b, pa, pb := one(t, kind("t"), from(src), m)
		pa.out = make(chan []byte, 10_000)
		pb.in = pa.out
		var quick atomic.Bool
		b.o.Wait = func(ctx context.Context, _, _ int) error {
			if !quick.Load() {
				time.Sleep(time.Second / 2)
			}
			return nil
		}
		stop := run(t, pa, pb, a, b)
		for i := range 1000 {
			put(src, row{"a", fmt.Sprint(i)})
			time.Sleep(time.Millisecond)
		}
		if n := a.o.Stats.FramesOut.Load(); n > 100 {
			t.Errorf("%d messages left in the time in which the peer takes two", n)
		}
		quick.Store(true)
		time.Sleep(time.Second)
		synctest.Wait()
		if !m.equals(content(src)) {
			t.Errorf("%v, want the last change", m.has)
		}
		_, _ = stop()
	})
}

// A partial table says so, and says when it is complete, though no row changed.
func TestPartial(t *testing.T) {
	src, m := newTable(), new(mirror)
	var mu sync.Mutex
	missing := []string{"docker"}
	f := from(src)
	f.Partial = func(uint64) []string {
		mu.Lock()
		defer mu.Unlock()
		return missing
	}
	put(src, row{"a", "1"})
	a, b, pa, pb := one(t, kind("t"), f, m)
	run(t, pa, pb, a, b)
	eventually(t, "partial", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return slices.Equal(m.partial, missing) })
	mu.Lock()
	missing = nil
	mu.Unlock()
	a.Changed()
	eventually(t, "complete", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return m.steps == 2 && len(m.partial) == 0 })
	if m.whole != 1 || m.at != 1 {
		t.Errorf("%+v", m)
	}
}

// A table that answers another one comes with what was seen of that.
func TestAnswersComeWithWhatWasSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, answers := newTable(), newTable()
		pa, pb := newPipe(100)
		var got mirror
		seen := uint64(0)
		f := from(asked)
		a := New(pa, Options{After: func() {
			for i := range seen {
				if n := fmt.Sprint(i); got.has[n] != "yes" {
					t.Errorf("generation %d was seen and %s has no answer: %v", seen, n, got.has)
				}
			}
		}})
		f.Acked = func(g uint64) { seen = g }
		k := kind("answers")
		k.Answers, k.Acked = "asked", false
		Send(a, kind("asked"), f)
		Receive(a, k, got.apply)
		b := New(pb, Options{})
		Send(b, k, from(answers))
		Receive(b, kind("asked"), func(s Step[string, row]) error {
			for _, r := range s.Put {
				put(answers, row{r.Key, "yes"})
			}
			return nil
		})
		stop := run(t, pa, pb, a, b)
		for i := range 300 {
			put(asked, row{fmt.Sprint(i), "?"})
			if i%7 == 0 {
				time.Sleep(time.Second)
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if seen != 300 {
			t.Errorf("seen is %d", seen)
		}
		_, _ = stop()
	})
}

// A peer that acknowledges nothing is late, and is given up in the end. One that is always
// behind is not.
func TestPatience(t *testing.T) {
	for _, behind := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			src, m := newTable(), new(mirror)
			var late atomic.Int64
			f := from(src)
			f.Late = func() { late.Add(1) }
			a, b, pa, pb := one(t, kind("t"), f, m)
			b.o.Wait = func(ctx context.Context, _, _ int) error {
				pause := time.Hour
				if behind {
					pause = 20 * time.Second
				}
				select {
				case <-time.After(pause):
				case <-ctx.Done():
				}
				return nil
			}
			stop := run(t, pa, pb, a, b)
			for i := range 30 {
				put(src, row{fmt.Sprint(i), ""})
				time.Sleep(15 * time.Second)
			}
			err, _ := stop()
			if errors.Is(err, ErrSilent) == behind || late.Load() == 0 {
				t.Errorf("always behind %v: ended with %v, %d times late", behind, err, late.Load())
			}
		})
	}
}

// Who asks for all tables is told again what was seen: the message that said so may be the one
// that was dropped.
func TestSeenIsSaidAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, m := newTable(), new(mirror)
		put(src, row{"a", "1"})
		f := from(src)
		var seen atomic.Uint64
		f.Acked = func(g uint64) { seen.Store(g) }
		a, b, pa, pb := one(t, kind("t"), f, m)
		spoilt := false
		pb.spoil = func(frame []byte) []byte {
			if bytes.Contains(frame, []byte(`"seen"`)) && !spoilt {
				spoilt = true
				return frame[:len(frame)/2]
			}
			return frame
		}
		stop := run(t, pa, pb, a, b)
		time.Sleep(5 * time.Minute)
		if err, _ := stop(); !errors.Is(err, context.Canceled) || !spoilt || seen.Load() != 1 {
			t.Errorf("ended with %v; spoilt: %v, seen is %d", err, spoilt, seen.Load())
		}
	})
}

// What no correct peer sends is dropped, asked for again, and ends the session if there is too
// much of it.
func TestHostilePeer(t *testing.T) {
	for name, body := range map[string]string{
		"garbage":             "\x00\xff",
		"no object":           `[]`,
		"unknown table":       `{"table":"x","put":[]}`,
		"rows of no table":    `{"put":[{"key":"a"}]}`,
		"bad row":             `{"table":"t","generation":1,"put":[{"key":"a","text":"bad"}]}`,
		"not a list":          `{"table":"t","generation":1,"put":{}}`,
		"too many rows":       `{"table":"t","generation":1,"put":[` + strings.Repeat(`{"key":"a"},`, 2000) + `{"key":"b"}]}`,
		"too many bytes":      `{"table":"t","generation":1,"put":[` + strings.Repeat(`{"key":"a","text":"`+strings.Repeat("x", 1000)+`"},`, 1050) + `{"key":"b"}]}`,
		"back in time":        `{"table":"t","base":5,"generation":4}`,
		"gap":                 `{"table":"t","base":5,"generation":6}`,
		"second part first":   `{"table":"t","generation":6,"part":1}`,
		"seen of the future":  `{"seen":[{"table":"own","generation":1000}]}`,
		"seen of an unknown":  `{"seen":[{"table":"x","generation":0}]}`,
		"resync for ever":     `{"resync":"again"}`,
		"negative omitted":    `{"table":"t","omitted":-1}`,
		"many sources":        `{"table":"t","partial":["a"` + strings.Repeat(`,"a"`, wire.MaxPartial) + `]}`,
		"generation too high": `{"table":"t","generation":18446744073709551616}`,
	} {
		t.Run(name, func(t *testing.T) {
			pa, pb := newPipe(1)
			m := new(mirror)
			s := New(pa, Options{})
			Send(s, kind("own"), from(newTable()))
			Receive(s, kind("t"), m.apply)
			ended := make(chan error)
			go func() { ended <- s.Run(t.Context()); pa.close() }()
			go func() {
				for {
					b, err := pb.Read(context.Background())
					if err != nil {
						return
					}
					if bytes.Contains(b, []byte(`"resync"`)) {
						select {
						case pb.out <- []byte(`{"table":"t","generation":3,"put":[{"key":"a"}]}`):
						case <-pb.cut:
						}
					}
				}
			}()
			pb.out <- []byte(`{"table":"t","generation":3,"put":[{"key":"a"}]}`)
			for {
				select {
				case pb.out <- []byte(body):
					continue
				case err := <-ended:
					if !errors.Is(err, ErrProtocol) {
						t.Error(err)
					}
				}
				break
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			if len(m.has) > 1 {
				t.Errorf("%d rows were applied", len(m.has))
			}
		})
	}
}

// A row that the peer refuses ends the session with the error of whoever applies it.
func TestApplyEndsTheSession(t *testing.T) {
	src := newTable()
	put(src, row{"a", "1"})
	pa, pb := newPipe(1)
	a, b := New(pa, Options{}), New(pb, Options{})
	Send(a, kind("t"), from(src))
	full := errors.New("full")
	Receive(b, kind("t"), func(Step[string, row]) error { return full })
	ended := make(chan error)
	go func() { _ = a.Run(t.Context()) }()
	go func() { ended <- b.Run(t.Context()); pb.close() }()
	if err := <-ended; !errors.Is(err, full) {
		t.Error(err)
	}
}

// A subscription ends with its session.
func TestSessionLeavesTheTable(t *testing.T) {
	src, m := newTable(), new(mirror)
	a, b, pa, pb := one(t, kind("t"), from(src), m)
	stop := run(t, pa, pb, a, b)
	put(src, row{"a", "1"})
	eventually(t, "it came", func() bool { return m.equals(content(src)) })
	_, _ = stop()
	out := a.o.Stats.FramesOut.Load()
	put(src, row{"b", "1"})
	if a.o.Stats.FramesOut.Load() != out {
		t.Error("a session that ended sends")
	}
}

// Whatever a peer sends, it is read without a panic, and what is applied is within the limits.
func FuzzFrame(f *testing.F) {
	for _, s := range []string{
		`{"table":"t","generation":1,"put":[{"key":"a","text":"x"}],"more":true}`,
		`{"table":"t","generation":1,"part":1,"removed":["a"]}`,
		`{"table":"t","base":1,"generation":2,"partial":["docker"],"omitted":3}`,
		`{"resync":"r","seen":[{"table":"t","generation":0}]}`,
	} {
		f.Add([]byte(s), []byte(s))
	}
	f.Fuzz(func(t *testing.T, one, two []byte) {
		m := &mirror{}
		s := New(nil, Options{})
		s.conn, _ = newPipe(100)
		k := kind("t")
		k.Max = 5
		Receive(s, k, func(st Step[string, row]) error {
			if len(st.Put) > 5 || len(st.Removed) > 5 || st.Omitted < 0 {
				t.Errorf("applied %+v", st)
			}
			return m.apply(st)
		})
		Send(s, k, from(newTable()))
		for _, b := range [][]byte{one, two, one} {
			err := s.take(t.Context(), b)
			if err != nil && !errors.Is(err, wire.ErrMalformed) && !errors.Is(err, ErrProtocol) {
				t.Fatalf("unexpected kind of error: %v", err)
			}
			if errors.Is(err, wire.ErrMalformed) {
				_ = s.fault(err)
			}
		}
	})
}
