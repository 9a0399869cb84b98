// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/wire"
)

func key(n uint16) port.Key {
	return port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}
}

func pub(k port.Key, name string) port.Publication {
	return port.Publication{
		Key: k, Owner: port.Owner{Kind: port.OwnerContainer, Name: name},
		Origins:  []port.OriginInfo{{Origin: port.Origin{Source: "socket", ID: "1"}}},
		Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.AddrPortFrom(port.Loopback(k.Address), k.Port)}},
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

// rig is a sink, the wanted table that feeds it, and what drives it.
type rig struct {
	t      testing.TB
	sink   *Sink
	feed   sessions
	wanted *table.Table[port.Key, port.Publication]
	sub    *table.Subscription[port.Key, port.Publication]
	keys   map[port.Key]struct{} // changed since the last Sync that succeeded
	synced uint64
	stop   func() error
}

// newRig starts a sink. The rig ends with the test, or with stop.
func newRig(t testing.TB, edit ...func(*Options)) *rig {
	t.Helper()
	r := &rig{t: t, feed: make(sessions), keys: make(map[port.Key]struct{}), wanted: table.New[port.Key, port.Publication](port.Key.Compare)}
	o := Options{
		Epoch: "E1", Logger: slog.New(slog.DiscardHandler),
		Lookup: func(k port.Key) (port.Publication, bool) { return r.wanted.View().Get(k) },
		Serve:  echo, ServeUDP: echoUDP,
	}
	for _, f := range edit {
		f(&o)
	}
	var err error
	if r.sink, err = New(r.feed, o); err != nil {
		t.Fatal(err)
	}
	r.sub = r.wanted.Subscribe()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.sink.Run(ctx) }()
	r.stop = sync.OnceValue(func() error { cancel(); return <-ended })
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

func (r *rig) put(pubs ...port.Publication) {
	r.wanted.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, p := range pubs {
			tx.Put(p.Key, p)
		}
	})
}

func (r *rig) remove(keys ...port.Key) {
	r.wanted.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, k := range keys {
			tx.Delete(k)
		}
	})
}

// sync does what the reconciler's worker does.
func (r *rig) sync(timeout time.Duration) (port.Outcomes, error) {
	view, change := r.sub.Take()
	for _, k := range change.Keys {
		r.keys[k] = struct{}{}
	}
	hint := reconcile.Change{Base: r.synced, Generation: view.Generation()}
	for k := range r.keys {
		hint.Keys = append(hint.Keys, k)
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	out, err := r.sink.Sync(ctx, view, hint)
	if err == nil {
		r.synced = view.Generation()
		clear(r.keys)
	}
	return out, err
}

func (r *rig) mustSync() port.Outcomes {
	r.t.Helper()
	out, err := r.sync(time.Minute)
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

// peer is a host that a test plays.
type peer struct {
	t testing.TB
	link.Session
	in io.Reader
	j  wire.Joiner
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
	<-r.sink.Wake() // that it is there; what the test waits for comes later
	return &peer{t: r.t, Session: host, in: bufio.NewReader(host.Control())}
}

// next returns the next whole control message.
func (p *peer) next() wire.Control {
	p.t.Helper()
	for {
		c, err := wire.ReadControl(p.in)
		if err != nil {
			p.t.Errorf("control: %v (session: %v)", err, p.Err())
			return wire.Control{}
		}
		whole, done, err := p.j.Add(c)
		if err != nil {
			p.t.Error(err)
		}
		if done {
			return whole
		}
	}
}

func (p *peer) say(msgs ...wire.Control) {
	p.t.Helper()
	for _, m := range msgs {
		if err := wire.WriteControl(p.Control(), m); err != nil {
			p.t.Errorf("say %+v: %v", m, err)
		}
	}
}

func active(keys ...port.Key) (out []wire.Outcome) {
	for _, k := range keys {
		out = append(out, wire.Outcome{Key: k, State: port.Active, HostAddress: netip.AddrPortFrom(port.Loopback(k.Address), k.Port)})
	}
	return out
}

func (p *peer) ack(gen uint64, keys ...port.Key) {
	p.t.Helper()
	p.say(wire.Ack{Generation: gen, Outcomes: active(keys...)}.Split()...)
}

// serve acknowledges everything until the session ends.
func (p *peer) serve() {
	for {
		c, err := wire.ReadControl(p.in)
		if err != nil {
			return
		}
		whole, done, err := p.j.Add(c)
		if err != nil {
			p.t.Error(err)
		}
		if !done {
			continue
		}
		var gen uint64
		var pubs []wire.Publication
		if s := whole.Snapshot; s != nil {
			gen, pubs = s.Generation, s.Publications
		} else {
			gen, pubs = whole.Change.Generation, whole.Change.Put
		}
		ack := wire.Ack{Generation: gen}
		for _, q := range pubs {
			ack.Outcomes = append(ack.Outcomes, active(q.Key)...)
		}
		for _, m := range ack.Split() {
			if err := wire.WriteControl(p.Control(), m); err != nil {
				return
			}
		}
	}
}

// during runs f while the peer does its part, and waits for both.
func during[T any](f func() T, do func()) T {
	done := make(chan T, 1)
	go func() { done <- f() }()
	do()
	return <-done
}

func states(out port.Outcomes) map[uint16]port.State {
	m := make(map[uint16]port.State)
	for k, o := range out {
		if len(o) > 0 {
			m[k.Port] = o[0].State
		}
	}
	return m
}
