// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

type tableTx = table.Tx[port.Key, port.Publication]

const (
	isActive  = port.Active
	isPending = port.Pending
)

// Without a host all is pending, which is in sync.
func TestPendingWithoutHost(t *testing.T) {
	r := newRig(t)
	<-r.rec.FirstSync()
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	r.want(map[uint16]port.State{80: isPending, 81: isPending})
	if got := r.outcomes(key(80))[0].Reason.String(); got != "no host connected" {
		t.Errorf("reason %q", got)
	}
	r.remove(key(81))
	r.want(map[uint16]port.State{80: isPending})
	p := r.connect("h")
	p.ack(p.next().Generation, key(80))
	r.want(map[uint16]port.State{80: isActive})
	_ = p.Close()
	r.want(map[uint16]port.State{80: isPending})
	if got := r.outcomes(key(80))[0].Reason.Code(); got != port.NoHost {
		t.Errorf("reason %v", got)
	}
}

// With a host it is in sync once the host has seen the first set.
func TestFirstSyncWaitsForTheHost(t *testing.T) {
	ready := make(chan struct{})
	r := newRigOf(t, reconcile.Options{Ready: ready, ReadyTimeout: time.Hour})
	p := r.connect("h")
	r.from.Update(func(tx *tableTx) { tx.Put(key(80), pub(key(80), "a")) })
	close(ready)
	f := p.next()
	select {
	case <-r.rec.FirstSync():
		t.Error("in sync before the host has seen anything")
	default:
	}
	p.ack(f.Generation, key(80))
	<-r.rec.FirstSync()
	r.want(map[uint16]port.State{80: isActive})
	if st := r.rec.Stats(); len(st) != 1 || st[0].Sink != "hostlink" || st[0].Syncs == 0 {
		t.Errorf("%+v", st)
	}
}

func TestSnapshotThenChanges(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	p := r.connect("h")
	if got, ok := r.sink.Peer(); !ok || got.Name != "h" {
		t.Errorf("peer %+v, %v", got, ok)
	}
	f := p.next()
	if f.Base != 0 || len(f.put) != 2 || f.put[0].Key != key(80) || f.put[0].Owner.Name != "a" || f.put[0].Source != "socket" {
		t.Errorf("snapshot %+v", f)
	}
	conflict := port.NewAnswer(key(81), []port.Outcome{{State: port.Conflict, HostAddress: netip.MustParseAddrPort("127.0.0.1:81"), Reason: port.Because(port.SystemFailed, "held\nby x")}})
	a := p.answers([]port.Answer{active(key(80)), conflict})
	a.Seen = []wire.Seen{{Table: "wanted", Generation: f.Generation}}
	p.say(a)
	r.want(map[uint16]port.State{80: isActive, 81: port.Conflict})

	r.put(pub(key(82), "c"))
	f = p.next()
	if f.Base == 0 || len(f.put) != 1 || f.put[0].Key != key(82) {
		t.Errorf("change %+v", f)
	}
	r.remove(key(80))
	f = p.next()
	if !slices.Equal(f.removed, []port.Key{key(80)}) {
		t.Errorf("change %+v", f)
	}
	p.ack(f.Generation, key(82))
	r.want(map[uint16]port.State{81: port.Conflict, 82: isActive})
	if st := r.sink.Stats(); st.Changes < 2 {
		t.Errorf("stats %+v", st)
	}
}

// What the host has seen and gives no outcome of is pending; an outcome that it takes back too.
func TestSeenWithoutOutcome(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	p := r.connect("h")
	p.ack(p.next().Generation, key(80))
	r.want(map[uint16]port.State{80: isActive, 81: isPending})
	if got := r.outcomes(key(81))[0].Reason.Code(); got != port.Unstatement {
		t.Errorf("reason %v", got)
	}
	p.say(p.answers(nil, key(80)))
	r.want(map[uint16]port.State{80: isPending, 81: isPending})
	// A change that leaves the outcome as it is.
	p.say(p.answers([]port.Answer{active(key(80))}))
	r.want(map[uint16]port.State{80: isActive, 81: isPending})
	r.put(pub(key(80), "another"))
	p.ack(p.next().Generation)
	r.put(pub(key(82), "c"))
	p.ack(p.next().Generation, key(82))
	r.want(map[uint16]port.State{80: isActive, 81: isPending, 82: isActive})
}

func TestUnsolicitedOutcomes(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	p := r.connect("h")
	p.ack(p.next().Generation, key(80), key(81))
	r.want(map[uint16]port.State{80: isActive, 81: isActive})
	died := port.NewAnswer(key(80), []port.Outcome{{State: port.Failed, Reason: port.Because(port.SystemFailed, "listener died")}})
	p.say(p.answers([]port.Answer{died, active(key(99))})) // one was never sent
	r.want(map[uint16]port.State{80: port.Failed, 81: isActive})
	if n := r.sink.Stats().Stray; n != 1 {
		t.Errorf("%d stray outcomes", n)
	}
}

// The host is sent the sources that are missing, and that none is, even if no port changed.
func TestIncompleteSet(t *testing.T) {
	ready := make(chan struct{})
	r := newRigOf(t, reconcile.Options{Ready: ready, ReadyTimeout: time.Millisecond, Missing: func() []string { return []string{"docker", "kube"} }})
	r.from.Update(func(tx *tableTx) { tx.Put(key(80), pub(key(80), "a")) })
	p := r.connect("h")
	f := p.next()
	if !slices.Equal(f.Partial, []string{"docker", "kube"}) {
		t.Errorf("%+v", f)
	}
	p.ack(f.Generation, key(80))
	close(ready)
	if f := p.next(); len(f.Partial) > 0 || f.Base == 0 || len(f.put) > 0 || f.Generation != f.Base {
		t.Errorf("%+v", f)
	}
}

// A host that asks for it is sent all again.
func TestResync(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"))
	p := r.connect("h")
	p.ack(p.next().Generation, key(80))
	p.say(wire.Frame{Resync: "lost state"})
	f := p.next()
	if f.Base != 0 || len(f.put) != 1 {
		t.Errorf("%+v", f)
	}
	p.ack(f.Generation, key(80))
	r.put(pub(key(81), "b"))
	p.ack(p.next().Generation, key(81))
	r.want(map[uint16]port.State{80: isActive, 81: isActive})
	if st := r.sink.Stats(); st.Resyncs != 1 || st.Sessions != 1 {
		t.Errorf("stats %+v", st)
	}
}

// A host that is suspended while a port changes keeps its session and its flows. What it has
// answered before remains.
func TestSuspendedHostKeepsItsSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.put(pub(key(80), "a"))
		p := r.connect("h")
		p.ack(p.next().Generation, key(80))
		flow, _ := p.open(key(80))
		r.want(map[uint16]port.State{80: isActive})
		r.put(pub(key(81), "b"), pub(key(80), "another"))
		time.Sleep(6 * time.Second)
		r.want(map[uint16]port.State{80: isActive, 81: isPending})
		if got := r.outcomes(key(81))[0].Reason.Code(); got != port.Unanswered {
			t.Errorf("reason %v", got)
		}
		time.Sleep(14 * time.Second)
		p.ack(p.next().Generation, key(81))
		r.want(map[uint16]port.State{80: isActive, 81: isActive})
		if !alive(flow) {
			t.Error("the flow was lost")
		}
		if st := r.sink.Stats(); st.Silent != 0 || st.Sessions != 1 {
			t.Errorf("stats %+v", st)
		}
		_ = r.stop()
		_ = p.Close()
		synctest.Wait()
	})
}

// A host that never answers loses its session when Patience is over; so does one that does not
// read.
func TestSilentHost(t *testing.T) {
	for name, reads := range map[string]bool{"reads": true, "does not read": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				var many []port.Publication
				for i := range 5000 { // more than the buffers between
					many = append(many, pub(key(uint16(i+1)), "a"))
				}
				r.put(many...)
				p := r.connect("h")
				if reads {
					go func() {
						for {
							if _, err := p.read(); err != nil {
								return
							}
						}
					}()
				}
				begin := time.Now()
				<-p.Done()
				if d := time.Since(begin); d > time.Minute+5*time.Second || reads && d < 59*time.Second { // it began before
					t.Errorf("closed after %s", d)
				}
				var c *link.CloseError
				if !errors.As(p.Err(), &c) && reads || reads && c.Reason != link.ReasonSilent {
					t.Errorf("the host received %v", p.Err())
				}
				r.eventually("it is counted", func() bool { st := r.sink.Stats(); return st.Silent == 1 && !st.Connected })
				if o := r.outcomes(key(1)); len(o) != 1 || o[0].State != isPending {
					t.Errorf("%+v", o)
				}
				_ = r.stop()
				_ = p.Close()
				synctest.Wait()
			})
		})
	}
}

func TestTakeover(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"), pub(key(81), "b"))
	first := r.connect("first")
	first.ack(first.next().Generation, key(80), key(81))
	r.want(map[uint16]port.State{80: isActive, 81: isActive})
	second := r.connect("second")
	f := second.next()
	if f.Base != 0 {
		t.Errorf("got %+v", f)
	}
	<-first.Done()
	var c *link.CloseError
	if !errors.As(first.Err(), &c) || c.Reason != link.ReasonReplaced || !c.Remote {
		t.Errorf("the first received %v", first.Err())
	}
	if p, ok := r.sink.Peer(); !ok || p.Name != "second" {
		t.Errorf("peer %+v", p)
	}
	second.ack(f.Generation, key(80)) // and nothing of the other, which the first had
	r.want(map[uint16]port.State{80: isActive, 81: isPending})
	if st := r.sink.Stats(); st.Replaced != 1 || st.Sessions != 2 {
		t.Errorf("stats %+v", st)
	}
}

// What the host before had open is not shown as open on one that does not answer.
func TestTakeoverByASilentHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.put(pub(key(80), "a"))
		first := r.connect("first")
		first.ack(first.next().Generation, key(80))
		r.want(map[uint16]port.State{80: isActive})
		second := r.connect("second")
		second.next()
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if o := r.outcomes(key(80)); len(o) != 1 || o[0].Reason.Code() != port.Unanswered {
			t.Errorf("%+v", o)
		}
		_ = r.stop()
		_ = second.Close()
		synctest.Wait()
	})
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

func TestShutdownIsSaid(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"))
	p := r.connect("h")
	p.next()
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
	s, err := New(closedSessions(), Options{Logger: discard(), Serve: echo, ServeUDP: echoUDP, Lookup: func(port.Key) (port.Publication, bool) { return port.Publication{}, false }})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no more sessions") {
		t.Error(err)
	}
}

func TestPublicationLimit(t *testing.T) {
	const limit = 100
	r := newRig(t, func(o *Options) { o.maxPublications = limit })
	var pubs []port.Publication
	for i := range limit + 10 {
		pubs = append(pubs, pub(key(uint16(i+1)), ""))
	}
	r.put(pubs...)
	p := r.connect("h")
	go p.serve()
	count := func(active, failed int) {
		t.Helper()
		r.eventually(fmt.Sprint(active, " active, ", failed, " failed"), func() bool {
			n := make(map[port.State]int)
			for _, o := range r.rec.Outcomes().View().All() {
				n[o[0].State]++
			}
			return n[isActive] == active && n[port.Failed] == failed
		})
	}
	count(limit, 10)
	// When there is room again, those that were left out come in.
	var gone []port.Key
	for _, p := range pubs[:20] {
		gone = append(gone, p.Key)
	}
	r.remove(gone...)
	count(limit-10, 0)
}

// One publication that cannot be sent does not hold up the others.
func TestUnsendablePublication(t *testing.T) {
	r := newRig(t)
	odd := key(81)
	odd.Address = netip.MustParseAddr("fe80::1%a b\x1b")
	r.put(pub(key(80), "a"), pub(odd, "b"), pub(key(82), "comm\xff"))
	p := r.connect("h")
	go p.serve()
	r.want(map[uint16]port.State{80: isActive, 81: port.Failed, 82: isActive})
	r.put(pub(odd, "c"), pub(key(80), "c"))
	r.want(map[uint16]port.State{80: isActive, 81: port.Failed, 82: isActive})
	r.remove(odd)
	r.want(map[uint16]port.State{80: isActive, 82: isActive})
}

// A host that sends what no host sends is closed, and the next one is served.
func TestHostileControl(t *testing.T) {
	frame := func(body string) []byte {
		n := len(body)
		return append([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, body...)
	}
	big := strings.Repeat(`{},`, port.MaxListItems)
	for name, msg := range map[string][]byte{
		"garbage":           frame("\x00\xff"),
		"too many items":    frame(`{"table":"outcomes","generation":1,"put":[` + big + `{}]}`),
		"agent's table":     frame(`{"table":"wanted","generation":1,"put":[]}`),
		"ack of the future": frame(`{"seen":[{"table":"wanted","generation":1000}]}`),
		"resync for ever":   frame(`{"resync":"again"}`),
		"a large one":       frame(`{"` + strings.Repeat("x", wire.MaxControlFrame/4) + `":1}`),
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.put(pub(key(80), "a"))
			p := r.connect("evil")
			p.ack(p.next().Generation, key(80))
			go func() { // what it is sent
				for {
					if _, err := p.read(); err != nil {
						return
					}
				}
			}()
			for p.Control().Write(t.Context(), msg) == nil && p.Err() == nil {
				time.Sleep(time.Microsecond)
			}
			<-p.Done()
			var c *link.CloseError
			if !errors.As(p.Err(), &c) || c.Reason != link.ReasonProtocol || !c.Remote {
				t.Errorf("the host received %v", p.Err())
			}
			if n := r.sink.Stats().Malformed; n > 100 {
				t.Errorf("%d messages dropped", n)
			}
			q := r.connect("good")
			q.ack(q.next().Generation, key(80))
			r.want(map[uint16]port.State{80: isActive})
		})
	}
}

// Messages that are in order but useless, at line rate, hold up nothing.
func TestFloodingHost(t *testing.T) {
	r := newRig(t)
	r.put(pub(key(80), "a"))
	p := r.connect("chatty")
	p.ack(p.next().Generation, key(80))
	const rounds = 2000
	for range rounds {
		p.say(p.answers([]port.Answer{active(key(80)), active(key(9999))}))
	}
	r.put(pub(key(81), "b"))
	p.ack(p.next().Generation, key(81))
	r.want(map[uint16]port.State{80: isActive, 81: isActive})
	if n := r.sink.Stats().Stray; n != rounds {
		t.Errorf("%d stray outcomes", n)
	}
}

// Without a table to report, neither ports nor NAT rules are sent.
func TestNothingUnpublishedIsSentUnasked(t *testing.T) {
	r := newRig(t)
	denied := pub(key(80), "web")
	denied.Decision.Allow = false
	r.from.Update(func(tx *tableTx) { tx.Put(key(80), denied) })
	p := r.connect("h")
	for _, name := range []string{"unpublished", "unread"} {
		if f := p.of(name); len(f.Put) > 0 || f.Omitted > 0 || f.More {
			t.Errorf("%+v", f)
		}
	}
}

// A flow to a port that is only reported is refused.
func TestFlowToUnpublishedPortForbidden(t *testing.T) {
	r := newRig(t)
	denied := pub(key(80), "web")
	denied.Decision.Allow = false
	r.sink.o.Unpublished.Update(func(tx *tableTx) { tx.Put(key(80), denied) })
	p := r.connect("h")
	if rows, err := wire.DecodeRows(p.of("unpublished").Put, replica.Unpublished().Check); err != nil || len(rows) != 1 || rows[0].Key != key(80) {
		t.Errorf("%+v, %v", rows, err)
	}
	st, reply := p.open(key(80))
	if reply.Status != wire.FlowForbidden {
		t.Errorf("%+v", reply)
	}
	if b, err := io.ReadAll(st); len(b) > 0 || err != nil && !errors.Is(err, link.ErrReset) {
		t.Errorf("%q, %v", b, err)
	}
	p = r.connect("another")
	r.sink.o.Unpublished.Update(func(tx *tableTx) { tx.Put(key(80), pub(key(80), "web")) })
	if f := p.of("unpublished"); f.Base != 0 {
		t.Errorf("%+v", f)
	}
}

// NAT rules that are not understood are sent, and what becomes of them.
func TestUnreadRulesAreReported(t *testing.T) {
	one, two := wire.NewUnread("ip nat pre", "meta mark 7", "meta mark"), wire.NewUnread("ip nat pre", "meta mark 8", "meta mark")
	lists := make(chan []wire.Unread, 2)
	lists <- []wire.Unread{one, two, one}
	changed := make(chan struct{}, 1)
	r := newRig(t, func(o *Options) {
		o.Unread, o.UnreadChanged = func() []wire.Unread { return <-lists }, changed
	})
	p := r.connect("h")
	rules := func(list []byte) []wire.Unread {
		got, err := wire.DecodeRows(list, wire.Unread.Check)
		if err != nil {
			t.Error(err)
		}
		return got
	}
	if got := rules(p.of("unread").Put); !slices.Equal(got, []wire.Unread{one, two}) {
		t.Errorf("%+v", got)
	}
	lists <- []wire.Unread{two}
	changed <- struct{}{}
	if got := rules(p.of("unread").Removed); !slices.Equal(got, []wire.Unread{one}) {
		t.Errorf("%+v", got)
	}
}

func TestOptions(t *testing.T) {
	good := Options{Logger: discard(), Serve: echo, ServeUDP: echoUDP, Lookup: func(port.Key) (port.Publication, bool) { return port.Publication{}, false }}
	for name, edit := range map[string]func(*Options){
		"no lookup": func(o *Options) { o.Lookup = nil },
		"no serve":  func(o *Options) { o.Serve = nil },
		"no logger": func(o *Options) { o.Logger = nil },
		"negative":  func(o *Options) { o.MaxFlows = -1 },
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

func BenchmarkChange(b *testing.B) {
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r := newRig(b)
			for i := range n {
				r.put(pub(key(uint16(i+1)), "a"))
			}
			p := r.connect("h")
			go p.serve()
			syncs := func() uint64 { return r.rec.Stats()[0].Syncs }
			r.eventually("in sync", func() bool { return syncs() > 0 })
			b.ResetTimer()
			for i := range b.N {
				before := syncs()
				r.put(pub(key(1), fmt.Sprint(i)))
				for syncs() == before {
					time.Sleep(time.Microsecond)
				}
			}
		})
	}
}
