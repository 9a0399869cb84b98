// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

func key(n uint16) port.Key {
	return port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}
}

func pub(k port.Key, name string) port.Publication {
	return port.Publication{
		Fact: port.Fact{
			Key: k, Source: "socket", Owner: port.Owner{Kind: port.OwnerContainer, Name: name},
			Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.AddrPortFrom(port.Loopback(k.Address), k.Port)}},
		},
		Origins: []port.OriginInfo{{Origin: port.Origin{Source: "socket", ID: "1"}}},
	}
}

// sessions hands out what the test puts in.
type sessions chan link.Session

func (s sessions) Accept(ctx context.Context) (link.Session, error) {
	select {
	case v, ok := <-s:
		if !ok {
			return nil, errors.New("no more sessions")
		}
		return v, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// rig is a sink, and the reconciler that it follows.
type rig struct {
	t    testing.TB
	sink *Sink
	feed sessions
	from *table.Table[port.Key, port.Publication]
	rec  *reconcile.Reconciler
	stop func() error
}

// newRig starts a sink. The rig ends with the test, or with stop.
func newRig(t testing.TB, edit ...func(*Options)) *rig {
	t.Helper()
	return newRigOf(t, reconcile.Options{}, edit...)
}

func newRigOf(t testing.TB, ro reconcile.Options, edit ...func(*Options)) *rig {
	t.Helper()
	r := &rig{t: t, feed: make(sessions), from: table.New[port.Key, port.Publication](port.Key.Compare)}
	o := Options{
		Logger: slog.New(slog.DiscardHandler),
		Lookup: func(k port.Key) (port.Publication, bool) { return r.rec.Wanted().View().Get(k) },
		Serve:  echo, ServeUDP: echoUDP,
	}
	for _, f := range edit {
		f(&o)
	}
	var err error
	if r.sink, err = New(r.feed, o); err != nil {
		t.Fatal(err)
	}
	ro.Follower, ro.Logger = r.sink, o.Logger
	r.rec = reconcile.New(r.from, nil, ro)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	var following sync.WaitGroup
	following.Go(func() { _ = r.rec.Run(ctx) })
	go func() { ended <- r.sink.Run(ctx) }()
	r.stop = sync.OnceValue(func() error { cancel(); following.Wait(); return <-ended })
	t.Cleanup(func() {
		if err := r.stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v", err)
		}
	})
	return r
}

// echo is a Serve that sends back what it gets.
func echo(_ context.Context, st net.Conn, req forward.Request) error {
	if err := req.Answer(nil); err != nil {
		return err
	}
	_, err := io.Copy(st, st)
	return errors.Join(err, st.Close())
}

// echoUDP is a ServeUDP that sends back what it gets.
func echoUDP(_ context.Context, client forward.Datagrams, req forward.Request) error {
	if err := req.Answer(nil); err != nil {
		return err
	}
	var frame forward.Frame
	for {
		n, err := client.Receive(frame[forward.FrameHead:])
		if errors.Is(err, io.EOF) {
			return client.Close()
		}
		if err == nil {
			err = client.Send(frame[:forward.FrameHead+n])
		}
		if err != nil {
			return err
		}
	}
}

// put changes the wanted set, and waits for that.
func (r *rig) put(pubs ...port.Publication) {
	r.t.Helper()
	r.from.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, p := range pubs {
			tx.Put(p.Key, p)
		}
	})
	r.eventually("it is wanted", func() bool {
		p := pubs[len(pubs)-1]
		got, ok := r.rec.Wanted().View().Get(p.Key)
		return ok && got.Equal(p)
	})
}

func (r *rig) remove(keys ...port.Key) {
	r.t.Helper()
	r.from.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, k := range keys {
			tx.Delete(k)
		}
	})
	r.eventually("it is not wanted", func() bool { return !r.rec.Wanted().View().Has(keys[len(keys)-1]) })
}

func (r *rig) eventually(what string, f func() bool) {
	r.t.Helper()
	for range 60_000 { // a busy machine may take long
		if f() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	r.t.Fatal("not so: ", what)
}

// want waits until these are all outcomes, by the numbers of their ports.
func (r *rig) want(expected map[uint16]port.State) {
	r.t.Helper()
	var got map[uint16]port.State
	defer func() {
		if r.t.Failed() {
			r.t.Logf("outcomes %v, want %v", got, expected)
		}
	}()
	r.eventually("the outcomes", func() bool {
		got = make(map[uint16]port.State)
		for k, list := range r.rec.Outcomes().View().All() {
			got[k.Port] = list[0].State
		}
		return maps.Equal(got, expected)
	})
}

// outcomes are those of one key.
func (r *rig) outcomes(k port.Key) reconcile.Outcomes {
	list, _ := r.rec.Outcomes().View().Get(k)
	return list
}

// peer is a host that a test plays.
type peer struct {
	t testing.TB
	link.Session
	at uint64 // generation of its outcomes
}

// connect gives the sink a session, and returns its other end once the sink has it.
func (r *rig) connect(name string) *peer {
	r.t.Helper()
	tok, err := link.NewToken(strings.Repeat("t", 32))
	if err != nil {
		r.t.Fatal(err)
	}
	o := link.Options{
		Identity: name, Name: name, Token: tok, Logger: slog.New(slog.DiscardHandler),
		HandshakeTimeout: time.Minute, // a busy machine may take long
	}
	a, b := net.Pipe()
	type result struct {
		s   link.Session
		err error
	}
	c := make(chan result, 1)
	ao, ho := o, o
	ao.Role, ao.MaxStreams, ho.Role = link.RoleAgent, 2000, link.RoleHost
	go func() {
		s, err := link.Server(context.Background(), a, ao)
		c <- result{s, err}
	}()
	host, err := link.Client(context.Background(), b, ho)
	agent := <-c
	if err != nil || agent.err != nil {
		r.t.Fatal(err, agent.err)
	}
	r.t.Cleanup(func() { _ = host.Close() })
	before := r.sink.Stats().Sessions
	r.feed <- agent.s
	for r.sink.Stats().Sessions == before {
		time.Sleep(time.Millisecond)
	}
	return &peer{t: r.t, Session: host}
}

// frame is a message with its rows.
type frame struct {
	wire.Frame
	put     []port.Fact
	removed []port.Key
}

func (p *peer) read() (wire.Frame, error) {
	b, err := p.Control().Read(context.Background())
	if err != nil {
		return wire.Frame{}, err
	}
	return wire.DecodeFrame(b)
}

// of returns the next message about a table.
func (p *peer) of(name string) wire.Frame {
	p.t.Helper()
	for {
		f, err := p.read()
		if err != nil {
			p.t.Errorf("control: %v (session: %v)", err, p.Err())
			return f
		}
		if f.Table == name {
			return f
		}
	}
}

// next returns the next message about the wanted set.
func (p *peer) next() frame {
	p.t.Helper()
	f := frame{Frame: p.of("wanted")}
	p.take(&f)
	return f
}

func (p *peer) take(f *frame) {
	p.t.Helper()
	var err error
	if f.put, err = wire.DecodeRows(f.Put, replica.Wanted().Check); err != nil {
		p.t.Error(err)
	}
	if f.removed, err = wire.DecodeRows(f.Removed, port.Key.Check); err != nil {
		p.t.Error(err)
	}
}

func (p *peer) say(f wire.Frame) {
	p.t.Helper()
	if err := p.send(f); err != nil {
		p.t.Errorf("say %+v: %v", f, err)
	}
}

func (p *peer) send(f wire.Frame) error {
	b, err := wire.EncodeFrame(&f)
	if err == nil {
		err = p.Control().Write(context.Background(), b)
	}
	return err
}

func active(k port.Key) port.Answer {
	return port.NewAnswer(k, []port.Outcome{{State: port.Active, HostAddress: netip.AddrPortFrom(port.Loopback(k.Address), k.Port)}})
}

func list[T any](t testing.TB, items []T) (b []byte) {
	t.Helper()
	for i, v := range items {
		row, err := wire.EncodeRow(v)
		if err != nil {
			t.Fatal(err)
		}
		b = append(append(b, "[,"[min(i, 1)]), row...)
	}
	if b != nil {
		b = append(b, ']')
	}
	return b
}

// answers returns the next change of the outcomes.
func (p *peer) answers(put []port.Answer, removed ...port.Key) wire.Frame {
	p.t.Helper()
	p.at++
	return wire.Frame{Table: "outcomes", Base: p.at - 1, Generation: p.at, Put: list(p.t, put), Removed: list(p.t, removed)}
}

// ack says that a generation was seen, with these ports active.
func (p *peer) ack(generation uint64, keys ...port.Key) {
	p.t.Helper()
	var put []port.Answer
	for _, k := range keys {
		put = append(put, active(k))
	}
	f := p.answers(put)
	f.Seen = []wire.Seen{{Table: "wanted", Generation: generation}}
	p.say(f)
}

// serve acknowledges everything until the session ends.
func (p *peer) serve() {
	for {
		f, err := p.read()
		if err != nil {
			return
		}
		if f.Table != "wanted" {
			continue
		}
		w := frame{Frame: f}
		p.take(&w)
		var put []port.Answer
		for _, q := range w.put {
			put = append(put, active(q.Key))
		}
		a := p.answers(put, w.removed...)
		if !f.More {
			a.Seen = []wire.Seen{{Table: "wanted", Generation: f.Generation}}
		}
		if p.send(a) != nil {
			return
		}
	}
}
