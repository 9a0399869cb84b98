// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

func want(t testing.TB, got port.Outcomes, expected map[uint16]port.State) {
	t.Helper()
	if s := states(got); !maps.Equal(s, expected) {
		t.Errorf("outcomes %v, want %v", s, expected)
	}
}

func TestPendingWithoutHost(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	out := r.mustSync()
	want(t, out, map[uint16]port.State{80: port.Pending, 81: port.Pending})
	if got := out[key(80)][0].Reason.String(); got != "no host connected" {
		t.Errorf("reason %q", got)
	}
	want(t, r.mustSync(), nil) // returned once
	r.put(pub(key(82), "c"))
	want(t, r.mustSync(), map[uint16]port.State{82: port.Pending})

	p := r.connect("h") // and Wake receives
	want(t, during(r.mustSync, func() {
		s := p.next().Snapshot
		p.ack(s.Generation, key(80), key(81), key(82))
	}), map[uint16]port.State{80: port.Active, 81: port.Active, 82: port.Active})

	_ = p.Close()
	for _, ok := r.sink.Peer(); ok; _, ok = r.sink.Peer() {
		<-r.sink.Wake()
	}
	want(t, r.mustSync(), map[uint16]port.State{80: port.Pending, 81: port.Pending, 82: port.Pending})
	want(t, r.mustSync(), nil)
}

func TestSnapshotThenChanges(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	p := r.connect("h")
	if got, ok := r.sink.Peer(); !ok || got.Name != "h" {
		t.Errorf("peer %+v, %v", got, ok)
	}
	want(t, during(r.mustSync, func() {
		s := p.next().Snapshot
		if s == nil || s.Epoch != "E1" || s.Generation != 1 || len(s.Publications) != 2 ||
			s.Publications[0].Key != key(80) || s.Publications[0].Owner.Name != "a" || s.Publications[0].Source != "socket" {
			t.Errorf("snapshot %+v", s)
		}
		p.say(wire.Control{Ack: &wire.Ack{Generation: 1, Outcomes: append(active(key(80)),
			wire.Outcome{Key: key(81), State: port.Conflict, HostAddress: netip.MustParseAddrPort("127.0.0.1:81"), Reason: wire.FromReason(port.Because(port.SystemFailed, "held\nby x"))})}})
	}), map[uint16]port.State{80: port.Active, 81: port.Conflict})

	r.put(pub(key(82), "c"))
	r.remove(key(80))
	want(t, during(r.mustSync, func() {
		c := p.next().Change
		if c == nil || c.Base != 1 || c.Generation != 3 || len(c.Put) != 1 || c.Put[0].Key != key(82) || !slices.Equal(c.Removed, []port.Key{key(80)}) {
			t.Errorf("change %+v", c)
		}
		p.ack(3, key(82))
	}), map[uint16]port.State{82: port.Active})

	// Nothing changed: nothing is sent, and nothing waited for.
	sent := r.sink.Stats().FramesOut
	want(t, r.mustSync(), nil)
	if st := r.sink.Stats(); st.FramesOut != sent || st.Snapshots != 1 || st.Changes != 1 {
		t.Errorf("stats %+v", st)
	}

	// A hint that builds on what this host never saw: a snapshot, never a guess.
	r.put(pub(key(83), "d"))
	_, _ = r.sub.Take()
	r.synced = 4
	r.put(pub(key(84), "e"))
	want(t, during(r.mustSync, func() {
		s := p.next().Snapshot
		if s == nil || len(s.Publications) != 4 {
			t.Errorf("snapshot %+v", s)
		}
		p.ack(5, key(81), key(82), key(83), key(84))
	}), map[uint16]port.State{81: port.Active, 82: port.Active, 83: port.Active, 84: port.Active})
}

func TestAckWithoutOutcome(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	p := r.connect("h")
	want(t, during(r.mustSync, func() { p.ack(p.next().Snapshot.Generation, key(80)) }),
		map[uint16]port.State{80: port.Active, 81: port.Pending})
}

func TestResync(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"))
	p := r.connect("h")
	during(r.mustSync, func() { p.ack(p.next().Snapshot.Generation, key(80)) })

	// In answer to a change: within the same Sync.
	r.put(pub(key(81), "b"))
	want(t, during(r.mustSync, func() {
		if c := p.next().Change; c == nil {
			t.Error("no change")
		}
		p.say(wire.Control{Resync: &wire.Resync{Reason: "gap"}})
		if s := p.next().Snapshot; s == nil || len(s.Publications) != 2 {
			t.Errorf("snapshot %+v", s)
		}
		p.ack(2, key(80), key(81))
	}), map[uint16]port.State{80: port.Active, 81: port.Active})

	// Unasked: Wake brings it.
	drain(r.sink.Wake())
	p.say(wire.Control{Resync: &wire.Resync{Reason: "lost state"}})
	<-r.sink.Wake()
	want(t, during(r.mustSync, func() {
		if s := p.next().Snapshot; s == nil || s.Generation != 2 {
			t.Errorf("snapshot %+v", s)
		}
		p.ack(2, key(80), key(81))
	}), map[uint16]port.State{80: port.Active, 81: port.Active})
	if st := r.sink.Stats(); st.Resyncs != 2 || st.Snapshots != 3 {
		t.Errorf("stats %+v", st)
	}
}

// The host is sent the sources that are missing, and a complete snapshot once there are
// none, even if no port changed.
func TestIncompleteSnapshot(t *testing.T) {
	missing := map[uint64][]string{1: {"docker", "kube"}, 2: {"docker", "kube"}}
	r := newRig(t, func(o *Options) { o.Incomplete = func(generation uint64) []string { return missing[generation] } })
	r.put(pub(key(80), "a"))
	p := r.connect("h")
	during(r.mustSync, func() {
		if s := p.next().Snapshot; s == nil || !slices.Equal(s.Incomplete, missing[1]) {
			t.Errorf("snapshot %+v", s)
		}
		p.ack(1, key(80))
	})
	want(t, r.mustSync(), nil)

	r.put(pub(key(81), "b"))
	during(r.mustSync, func() {
		if c := p.next().Change; c == nil {
			t.Error("no change")
		}
		p.say(wire.Control{Resync: &wire.Resync{Reason: "gap"}})
		if s := p.next().Snapshot; s == nil || !slices.Equal(s.Incomplete, missing[2]) {
			t.Errorf("snapshot %+v", s)
		}
		p.ack(2, key(80), key(81))
	})

	delete(missing, 2)
	want(t, during(r.mustSync, func() {
		if s := p.next().Snapshot; s == nil || s.Generation != 2 || len(s.Publications) != 2 || s.Incomplete != nil {
			t.Errorf("snapshot %+v", s)
		}
		p.ack(2, key(80), key(81))
	}), map[uint16]port.State{80: port.Active, 81: port.Active})
	want(t, r.mustSync(), nil)
	if st := r.sink.Stats(); st.Snapshots != 3 || st.Changes != 1 {
		t.Errorf("stats %+v", st)
	}
}

func drain(c <-chan struct{}) {
	select {
	case <-c:
	default:
	}
}

func TestUnsolicitedOutcomes(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	p := r.connect("h")
	during(r.mustSync, func() { p.ack(p.next().Snapshot.Generation, key(80), key(81)) })
	drain(r.sink.Wake())

	p.say(wire.Control{Outcomes: &wire.Outcomes{Outcomes: []wire.Outcome{
		{Key: key(80), State: port.Failed, Reason: wire.FromReason(port.Because(port.SystemFailed, "listener died"))},
		{Key: key(99), State: port.Active, HostAddress: netip.MustParseAddrPort("127.0.0.1:99")}, // never sent
	}}})
	<-r.sink.Wake()
	want(t, r.mustSync(), map[uint16]port.State{80: port.Failed})
	if n := r.sink.Stats().Stray; n != 1 {
		t.Errorf("%d stray outcomes", n)
	}
	want(t, r.mustSync(), nil) // delivered once
}

// Outcomes ahead of an Ack belong to it; those of one key are bounded.
func TestOutcomesAheadOfAck(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	p := r.connect("h")
	out := during(r.mustSync, func() {
		gen := p.next().Snapshot.Generation
		many := make([]wire.Outcome, 1000)
		for i := range many {
			many[i] = active(key(80))[0]
		}
		p.say(wire.Control{Outcomes: &wire.Outcomes{Outcomes: many}})
		p.ack(gen, key(81))
	})
	want(t, out, map[uint16]port.State{80: port.Active, 81: port.Active})
	if n := len(out[key(80)]); n != maxOutcomes {
		t.Errorf("%d outcomes of one key", n)
	}
}

// A host that is suspended while a port changes keeps its session and its flows.
func TestSuspendedHostKeepsItsSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.put(pub(key(80), "a"))
		p := r.connect("h")
		during(r.mustSync, func() { p.ack(p.next().Snapshot.Generation, key(80)) })
		flow, _ := p.open(key(80))

		r.put(pub(key(81), "b"))
		change := make(chan wire.Control)
		go func() {
			time.Sleep(20 * time.Second) // suspended
			change <- p.next()
		}()
		for range 3 {
			out, err := r.sync(5 * time.Second)
			if err == nil || p.Err() != nil {
				t.Fatalf("Sync = %v, session %v; want an error and a session", err, p.Err())
			}
			want(t, out, map[uint16]port.State{81: port.Pending})
		}
		want(t, during(r.mustSync, func() { p.ack((<-change).Change.Generation, key(81)) }), map[uint16]port.State{81: port.Active})
		if !alive(flow) {
			t.Error("the flow was lost")
		}
		if st := r.sink.Stats(); st.Silent != 0 || st.Sessions != 1 || st.Changes != 1 {
			t.Errorf("stats %+v", st)
		}
		_ = r.stop()
		_ = p.Close()
		synctest.Wait()
	})
}

// A host that never answers loses its session when Patience is over.
func TestSilentHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.put(pub(key(80), "a"))
		p := r.connect("h")
		go func() { _, _ = io.Copy(io.Discard, p.in) }()
		begin := time.Now()
		for p.Err() == nil && time.Since(begin) < time.Hour {
			out, err := r.sync(5 * time.Second)
			if (err == nil) != (p.Err() != nil) {
				t.Errorf("Sync = %v, session %v", err, p.Err())
			}
			want(t, out, map[uint16]port.State{80: port.Pending})
		}
		if d := time.Since(begin); d < time.Minute || d > time.Minute+5*time.Second {
			t.Errorf("closed after %s", d)
		}
		var c *link.CloseError
		if !errors.As(p.Err(), &c) || c.Reason != link.ReasonSilent {
			t.Errorf("the host received %v", p.Err())
		}
		if st := r.sink.Stats(); st.Silent != 1 || st.Connected || st.Snapshots != 1 {
			t.Errorf("stats %+v", st)
		}
		_ = r.stop()
		_ = p.Close()
		synctest.Wait()
	})
}

// A host that does not even read: the snapshot is larger than the buffers between.
func TestHostThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 5000 {
			r.put(pub(key(uint16(i+1)), "a"))
		}
		p := r.connect("h")
		out, err := r.sync(5 * time.Second)
		if err != nil || len(out) != 5000 || out[key(1)][0].State != port.Pending {
			t.Errorf("%d outcomes, %v", len(out), err)
		}
		<-p.Done()
		_ = r.stop()
		_ = p.Close()
		synctest.Wait()
	})
}

// A slow host keeps its session beyond the deadline, and nothing is sent again.
func TestSlowHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.put(pub(key(80), "a"), pub(key(81), "b"))
		p := r.connect("h")
		type result struct {
			out port.Outcomes
			err error
		}
		sync := func() result { out, err := r.sync(5 * time.Second); return result{out, err} }
		during(sync, func() { p.ack(p.next().Snapshot.Generation, key(80), key(81)) })
		r.put(pub(key(82), "c"), pub(key(83), "d"))
		res := during(sync, func() {
			p.next()
			p.say(wire.Control{Outcomes: &wire.Outcomes{Outcomes: active(key(82))}})
		})
		if res.err == nil || !strings.Contains(res.err.Error(), "not acknowledged generation 2") {
			t.Error(res.err)
		}
		want(t, res.out, map[uint16]port.State{82: port.Active, 83: port.Pending})
		// What changed meanwhile follows, with what changed since the last Sync that succeeded.
		r.put(pub(key(84), "e"))
		res = during(sync, func() {
			if c := p.next().Change; c == nil || c.Base != 2 || c.Generation != 3 {
				t.Errorf("change %+v", c)
			}
			p.ack(2, key(83))
			p.ack(3, key(82), key(84))
		})
		if res.err != nil {
			t.Error(res.err)
		}
		want(t, res.out, map[uint16]port.State{82: port.Active, 83: port.Active, 84: port.Active})

		// A host that never acknowledges is given up, even if it sends outcomes.
		r.put(pub(key(85), "f"))
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			for p.Err() == nil {
				_ = wire.WriteControl(p.Control(), wire.Control{Outcomes: &wire.Outcomes{Outcomes: active(key(80))}})
				time.Sleep(time.Second)
			}
		}()
		begin := time.Now()
		for p.Err() == nil && time.Since(begin) < time.Hour {
			_ = sync()
		}
		if d := time.Since(begin); d > 2*time.Minute {
			t.Errorf("gave up after %s", d)
		}
		<-closed
		_ = r.stop()
		_ = p.Close()
		synctest.Wait()
	})
}

// A host that acknowledges every change, but is always behind, keeps its session.
func TestHostThatIsAlwaysBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.put(pub(key(80), "a"))
		p := r.connect("h")
		gens := make(chan uint64, 100)
		go func() {
			defer close(gens)
			for {
				c, err := wire.ReadControl(p.in)
				switch {
				case err != nil:
					return
				case c.Snapshot != nil:
					gens <- c.Snapshot.Generation
				case c.Change != nil:
					gens <- c.Change.Generation
				}
			}
		}()
		acked := make(chan struct{})
		go func() {
			defer close(acked)
			for gen := range gens {
				time.Sleep(5 * time.Second)
				_ = wire.WriteControl(p.Control(), wire.Ack{Generation: gen}.Split()[0])
			}
		}()
		for i := range 60 {
			r.put(pub(key(uint16(81+i)), "b"))
			_, _ = r.sync(4 * time.Second)
		}
		if err := p.Err(); err != nil {
			t.Errorf("session ended: %v", err)
		}
		_ = r.stop()
		_ = p.Close()
		<-acked
		synctest.Wait()
	})
}

func TestTakeover(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"))
	first := r.connect("first")
	var second *peer
	// The Sync that waits for the first continues with the second.
	want(t, during(r.mustSync, func() {
		first.next()
		second = r.connect("second")
		p := second.next()
		if p.Snapshot == nil {
			t.Errorf("got %+v", p)
		}
		second.ack(1, key(80))
	}), map[uint16]port.State{80: port.Active})
	<-first.Done()
	var c *link.CloseError
	if !errors.As(first.Err(), &c) || c.Reason != link.ReasonReplaced || !c.Remote {
		t.Errorf("the first received %v", first.Err())
	}
	if p, ok := r.sink.Peer(); !ok || p.Name != "second" {
		t.Errorf("peer %+v", p)
	}
	r.put(pub(key(81), "b"))
	want(t, during(r.mustSync, func() { second.next(); second.ack(2, key(81)) }), map[uint16]port.State{81: port.Active})
	if st := r.sink.Stats(); st.Replaced != 1 || st.Sessions != 2 {
		t.Errorf("stats %+v", st)
	}
}

// Two hosts that replace each other are reported; a new host, and one that lost its
// own connection, are not.
func TestRivals(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		host string
		want []string
	}{{"a", nil}, {"a", nil}, {"b", nil}, {"a", []string{"b", "a"}}, {"b", []string{"a", "b"}}} {
		_ = r.connect(c.host)
		if got := r.sink.Stats().Rivals; !slices.Equal(got, c.want) {
			t.Errorf("%s connected: rivals %q, want %q", c.host, got, c.want)
		}
	}
}

func TestSessionLostDuringSync(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"))
	p := r.connect("h")
	want(t, during(r.mustSync, func() { p.next(); _ = p.Close() }), map[uint16]port.State{80: port.Pending})
}

func TestShutdownDuringSync(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"))
	p := r.connect("h")
	ctx, cancel := context.WithCancel(context.Background())
	view, _ := r.sub.Take()
	errs := during(func() error {
		_, err := r.sink.Sync(ctx, view, reconcileAll)
		return err
	}, func() { p.next(); cancel() })
	if !errors.Is(errs, context.Canceled) {
		t.Error(errs)
	}
	if err := r.stop(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	<-p.Done()
	var c *link.CloseError
	if !errors.As(p.Err(), &c) || c.Reason != link.ReasonShutdown {
		t.Errorf("the host received %v", p.Err())
	}
}

func TestRunEndsWithItsAcceptor(t *testing.T) {
	s, err := New(closedSessions(), Options{Epoch: "E", Logger: discard(), Serve: echo, ServeUDP: echoUDP, Lookup: func(port.Key) (port.Publication, bool) { return port.Publication{}, false }})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "no more sessions") {
		t.Error(err)
	}
}

func TestLargeSet(t *testing.T) {
	r := newRig(t)
	const n = 10_000
	var pubs []port.Publication
	for i := range n {
		p := pub(key(uint16(i+1)), "a")
		p.Owner.Labels = map[string]string{"big": strings.Repeat("\x01", 20)}
		pubs = append(pubs, p)
	}
	r.put(pubs...)
	p := r.connect("h")
	go p.serve()
	out := r.mustSync()
	if len(out) != n {
		t.Errorf("%d outcomes", len(out))
	}
	for k, o := range out {
		if len(o) != 1 || o[0].State != port.Active {
			t.Fatalf("%s: %+v", k, o)
		}
	}
	// A change of all of them comes in parts, too.
	for i := range pubs {
		pubs[i].Owner.Name = "b"
	}
	r.put(pubs...)
	if out := r.mustSync(); len(out) != n {
		t.Errorf("%d outcomes", len(out))
	}
	// And one change of one is one small frame.
	before := r.sink.Stats()
	r.put(pub(key(1), "c"))
	want(t, r.mustSync(), map[uint16]port.State{1: port.Active})
	after := r.sink.Stats()
	if d := after.BytesOut - before.BytesOut; after.FramesOut-before.FramesOut != 1 || d > 500 {
		t.Errorf("%d frames of %d bytes", after.FramesOut-before.FramesOut, d)
	}
	if after.Snapshots != 1 || after.Changes != 2 {
		t.Errorf("stats %+v", after)
	}
}

func TestPublicationLimit(t *testing.T) {
	const limit = 1000
	r := newRig(t, func(o *Options) { o.maxPublications = limit })
	var pubs []port.Publication
	for i := range limit + 10 {
		pubs = append(pubs, pub(key(uint16(i+1)), ""))
	}
	r.put(pubs...)
	p := r.connect("h")
	go p.serve()
	count := func(out port.Outcomes) (active, failed int) {
		for _, o := range out {
			switch o[0].State {
			case port.Active:
				active++
			case port.Failed:
				failed++
			}
		}
		return active, failed
	}
	if a, f := count(r.mustSync()); a != limit || f != 10 {
		t.Errorf("%d active, %d failed", a, f)
	}
	// When there is room again, those that were left out come in.
	var gone []port.Key
	for _, p := range pubs[:20] {
		gone = append(gone, p.Key)
	}
	r.remove(gone...)
	if a, f := count(r.mustSync()); a != limit-10 || f != 0 {
		t.Errorf("%d active, %d failed", a, f)
	}
	if st := r.sink.Stats(); st.Snapshots != 2 {
		t.Errorf("stats %+v", st)
	}
}

// One publication that cannot be sent does not hold up the others.
func TestUnsendablePublication(t *testing.T) {
	r := newRig(t)
	odd := key(81)
	odd.Address = netip.MustParseAddr("fe80::1%a b\x1b")
	raw := key(82)
	r.put(pub(key(80), "a"), pub(odd, "b"), pub(raw, "comm\xff"))
	p := r.connect("h")
	go p.serve()
	want(t, r.mustSync(), map[uint16]port.State{80: port.Active, 81: port.Failed, 82: port.Active})
	r.put(pub(odd, "c"), pub(key(80), "c"))
	want(t, r.mustSync(), map[uint16]port.State{80: port.Active, 81: port.Failed})
	r.remove(odd)
	want(t, r.mustSync(), nil)
}

func TestHostileControl(t *testing.T) {
	frame := func(body string) []byte {
		n := len(body)
		return append([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, body...)
	}
	big := strings.Repeat(`{},`, wire.MaxListItems)
	for name, tt := range map[string]struct {
		msg     []byte
		dropped uint64 // at least
	}{
		"unknown message":   {frame(`{"reboot":{}}`), 64},
		"garbage":           {frame("\x00\xff"), 64},
		"too many items":    {frame(`{"outcomes":{"outcomes":[` + big + `{}]}}`), 64},
		"agent's message":   {frame(`{"snapshot":{"epoch":"E","publications":[]}}`), 64},
		"ack of the future": {frame(`{"ack":{"generation":1000}}`), 64},
		"resync for ever":   {frame(`{"resync":{"reason":"again"}}`), 64},
		"oversized":         {[]byte{0xff, 0xff, 0xff, 0xff}, 1},
		"a large one":       {frame(`{"` + strings.Repeat("x", wire.MaxControlFrame/4) + `":1}`), 64},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.put(pub(key(80), "a"))
			p := r.connect("evil")
			during(r.mustSync, func() { p.ack(p.next().Snapshot.Generation, key(80)) })
			var wg sync.WaitGroup
			began := time.Now()
			wg.Go(func() { // at line rate
				for p.Err() == nil {
					if _, err := p.Control().Write(tt.msg); err != nil {
						return
					}
				}
			})
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			<-p.Done()
			runtime.GC()
			runtime.ReadMemStats(&after)
			wg.Wait()
			var c *link.CloseError
			if !errors.As(p.Err(), &c) || c.Reason != link.ReasonProtocol || !c.Remote {
				t.Errorf("the host received %v", p.Err())
			}
			most := 100 + uint64(time.Since(began)/time.Second) // one more is forgiven each second
			if n := r.sink.Stats().Malformed; n < tt.dropped || n > most {
				t.Errorf("%d messages dropped", n)
			}
			if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 16<<20 {
				t.Errorf("%d bytes more in use", grown)
			}
			// The next host is served.
			q := r.connect("good")
			want(t, during(r.mustSync, func() { q.ack(q.next().Snapshot.Generation, key(80)) }), map[uint16]port.State{80: port.Active})
		})
	}
}

// Messages that are in order but useless, at line rate, take no memory and
// hold up no Sync.
func TestFloodingHost(t *testing.T) {
	r := newRig(t)
	var keys []port.Key
	for i := range 100 {
		keys = append(keys, key(uint16(i+1)))
		r.put(pub(keys[i], "a"))
	}
	p := r.connect("chatty")
	during(r.mustSync, func() { p.ack(p.next().Snapshot.Generation, keys...) })
	noise := wire.Control{Outcomes: &wire.Outcomes{Outcomes: active(append(keys, key(9999))...)}}
	const rounds = 2000
	for range rounds {
		p.say(noise)
	}
	r.put(pub(key(101), "b"))
	out := during(r.mustSync, func() { p.next(); p.ack(101, key(101)) })
	if len(out) != 101 || len(out[keys[0]]) != 1 {
		t.Errorf("%d keys, %d outcomes of one", len(out), len(out[keys[0]]))
	}
	if n := r.sink.Stats().Stray; n != rounds {
		t.Errorf("%d stray outcomes", n)
	}
}

func TestHostClosesControl(t *testing.T) {
	r := newRig(t)
	p := r.connect("h")
	_ = p.Control().CloseWrite()
	<-p.Done()
	var c *link.CloseError
	if !errors.As(p.Err(), &c) || c.Reason != link.ReasonProtocol {
		t.Errorf("the host received %v", p.Err())
	}
}

func TestOptions(t *testing.T) {
	good := Options{Epoch: "E", Logger: discard(), Serve: echo, ServeUDP: echoUDP, Lookup: func(port.Key) (port.Publication, bool) { return port.Publication{}, false }}
	for name, edit := range map[string]func(*Options){
		"no epoch":   func(o *Options) { o.Epoch = "" },
		"long epoch": func(o *Options) { o.Epoch = strings.Repeat("e", 65) },
		"no lookup":  func(o *Options) { o.Lookup = nil },
		"no serve":   func(o *Options) { o.Serve = nil },
		"no logger":  func(o *Options) { o.Logger = nil },
		"negative":   func(o *Options) { o.MaxFlows = -1 },
	} {
		o := good
		edit(&o)
		if _, err := New(closedSessions(), o); err == nil || !strings.Contains(err.Error(), "hostlink options") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s, err := New(closedSessions(), good); err != nil || s.Name() != "hostlink" {
		t.Error(err)
	}
}

func BenchmarkSync(b *testing.B) {
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r := newRig(b)
			for i := range n {
				r.put(pub(key(uint16(i+1)), "a"))
			}
			p := r.connect("h")
			go p.serve()
			r.mustSync()
			b.ResetTimer()
			for i := range b.N {
				r.put(pub(key(1), fmt.Sprint(i)))
				r.mustSync()
			}
		})
	}
}
