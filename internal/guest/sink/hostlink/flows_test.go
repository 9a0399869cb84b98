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
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func closedSessions() sessions {
	c := make(sessions)
	close(c)
	return c
}

// open asks for a flow and returns the answer.
func (p *peer) open(k port.Key) (link.Stream, wire.FlowReply) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	st, err := p.Open(ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := wire.WriteRequest(st, wire.FlowRequest{Key: k}); err != nil {
		p.t.Fatal(err)
	}
	reply, err := wire.ReadReply(st)
	if err != nil {
		p.t.Errorf("flow to %s: %v", k, err)
	}
	return st, reply
}

// alive reports whether a flow still echoes: bytes, or a datagram.
func alive(st link.Stream) bool {
	frame := []byte("\x00\x01x")
	if _, err := st.Write(frame); err != nil {
		return false
	}
	_, err := io.ReadFull(st, make([]byte, len(frame)))
	return err == nil
}

// settle waits until the sink has counted n ended flows.
func (r *rig) settle(n uint64) map[string]uint64 {
	r.t.Helper()
	for range 24_000 { // two minutes: a busy machine may take long
		var sum uint64
		flows := r.sink.Stats().Flows
		for _, v := range flows {
			sum += v
		}
		if sum == n {
			maps.DeleteFunc(flows, func(_ string, v uint64) bool { return v == 0 })
			return flows
		}
		time.Sleep(5 * time.Millisecond)
	}
	r.t.Fatalf("flows %v, want %d in all", r.sink.Stats().Flows, n)
	return nil
}

func TestFlows(t *testing.T) {
	r := newRig(t)
	udp := port.Key{Protocol: port.UDP, Address: key(53).Address, Port: 53}
	r.put(pub(key(80), "a"), pub(udp, "b"))
	p := r.connect("h")
	for _, k := range []port.Key{key(80), udp} {
		st, reply := p.open(k)
		if reply.Status != wire.FlowOK || !alive(st) {
			t.Errorf("%s: %+v", k, reply)
		}
		_ = st.CloseWrite()
		if _, err := st.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("end of flow: %v", err)
		}
	}
	for _, k := range []port.Key{key(81), {Protocol: port.UDP, Address: key(80).Address, Port: 80}} {
		st, reply := p.open(k)
		if reply.Status != wire.FlowForbidden || reply.Reason != "no such publication" {
			t.Errorf("%s: %+v", k, reply)
		}
		if _, err := st.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("after a refusal: %v", err)
		}
		_ = st.Close()
	}
	st, err := p.Open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Write([]byte("\x00\x00\x00\x02{}")); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Read(make([]byte, 1)); !errors.Is(err, link.ErrReset) {
		t.Errorf("malformed request: %v", err)
	}
	if got := r.settle(5); got[FlowServed] != 2 || got[FlowForbidden] != 2 || got[FlowMalformed] != 1 {
		t.Errorf("counted %v", got)
	}
	if n := r.sink.Stats().FlowsOpen; n != 0 {
		t.Errorf("%d flows open", n)
	}
}

func TestServeArguments(t *testing.T) {
	got := make(chan forward.Request, 1)
	r := newRig(t, func(o *Options) {
		o.Serve = func(_ context.Context, st net.Conn, req forward.Request) error {
			got <- req
			err := errors.New("connection refused")
			return errors.Join(err, req.Answer(&forward.DialError{Refused: true, Err: err}), st.Close())
		}
	})
	r.put(pub(key(80), "web"))
	p := r.connect("h")
	st, reply := p.open(key(80))
	if reply.Status != wire.FlowRefused || reply.Reason != "connection refused" {
		t.Errorf("reply %+v", reply)
	}
	_ = st.Close()
	if req := <-got; req.Publication.Owner.Name != "web" || req.Publication.Key != key(80) {
		t.Errorf("request %+v", req)
	}
	if got := r.settle(1); got[FlowFailed] != 1 {
		t.Errorf("counted %v", got)
	}
}

// What is withdrawn while its server is dialled gets no flow: the address that was dialled may
// be another server's by then.
func TestNoFlowToWhatWasWithdrawnWhileDialling(t *testing.T) {
	server, err := forward.NewServer(forward.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var r *rig
	r = newRig(t, func(o *Options) {
		o.Serve = func(ctx context.Context, st net.Conn, req forward.Request) error {
			r.remove(req.Publication.Key)
			return server.Serve(ctx, st, req)
		}
		o.ServeUDP = func(ctx context.Context, client forward.Datagrams, req forward.Request) error {
			r.remove(req.Publication.Key)
			return server.ServeUDP(ctx, client, req)
		}
	})
	p := r.connect("h")
	udp := port.Key{Protocol: port.UDP, Address: key(53).Address, Port: 53}
	for _, k := range []port.Key{key(80), udp} {
		q := pub(k, "a")
		q.Dial = []netip.AddrPort{l.Addr().(*net.TCPAddr).AddrPort()}
		r.put(q)
		st, reply := p.open(k)
		if reply.Status != wire.FlowForbidden || reply.Reason != "not published any more" {
			t.Errorf("%s: %+v", k, reply)
			_ = st.Reset()
			continue
		}
		if n, err := st.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("%s: read %d bytes, %v", k, n, err)
		}
		_ = st.Close()
	}
	if got := r.settle(2); got[FlowForbidden] != 2 {
		t.Errorf("counted %v", got)
	}
}

func TestReset(t *testing.T) {
	causes := make(chan error, 10)
	r := newRig(t, func(o *Options) {
		o.Serve = func(ctx context.Context, st net.Conn, req forward.Request) error {
			err := echo(ctx, st, req)
			causes <- context.Cause(ctx)
			return err
		}
	})
	r.put(pub(key(80), "denied"), pub(key(81), "gone"), pub(key(82), "stays"))
	p := r.connect("h")
	denied, _ := p.open(key(80))
	denied2, _ := p.open(key(80))
	gone, _ := p.open(key(81))
	stays, _ := p.open(key(82))

	r.remove(key(80), key(81)) // a rule denies the one; the other's server closed its listener
	r.sink.Reset([]port.Key{key(80), key(9)})
	for _, st := range []link.Stream{denied, denied2} {
		if _, err := st.Read(make([]byte, 1)); !errors.Is(err, link.ErrReset) {
			t.Errorf("denied flow: %v", err)
		}
		if err := <-causes; !errors.Is(err, ErrCut) {
			t.Errorf("cause: %v", err)
		}
	}
	if !alive(gone) || !alive(stays) {
		t.Error("a flow that is not denied was cut")
	}
	if _, reply := p.open(key(80)); reply.Status != wire.FlowForbidden {
		t.Errorf("new flow to the denied port: %+v", reply)
	}
	if _, reply := p.open(key(81)); reply.Status != wire.FlowForbidden {
		t.Errorf("new flow to the port that is gone: %+v", reply)
	}
	// A lost link cuts all.
	_ = p.Close()
	for range 2 {
		if err := <-causes; !errors.Is(err, ErrLost) && err != nil {
			t.Errorf("cause: %v", err)
		}
	}
	if got := r.settle(6); got[FlowCut] != 2 || got[FlowLost] != 2 || got[FlowForbidden] != 2 {
		t.Errorf("counted %v", got)
	}
}

// A rule that comes while a flow is being authorised finds it in any case.
func TestResetRacesWithOpen(t *testing.T) {
	r := newRig(t)
	p := r.connect("h")
	for range 200 {
		r.put(pub(key(80), "a"))
		var wg sync.WaitGroup
		wg.Go(func() {
			r.remove(key(80))
			r.sink.Reset([]port.Key{key(80)})
		})
		st, err := p.Open(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		_ = wire.WriteRequest(st, wire.FlowRequest{Key: key(80)})
		wg.Wait()
		_ = st.SetReadDeadline(time.Now().Add(time.Minute))
		if reply, err := wire.ReadReply(st); err == nil && reply.Status == wire.FlowOK {
			if _, err := st.Read(make([]byte, 1)); !errors.Is(err, link.ErrReset) {
				t.Fatalf("the flow outlived the rule: %v", err)
			}
		}
		_ = st.Close()
	}
}

func TestFlowLimit(t *testing.T) {
	r := newRig(t, func(o *Options) { o.MaxFlows = 3 })
	r.put(pub(key(80), "a"))
	p := r.connect("h")
	var flows []link.Stream
	for range 3 {
		st, reply := p.open(key(80))
		if reply.Status != wire.FlowOK {
			t.Fatal(reply)
		}
		flows = append(flows, st)
	}
	if _, reply := p.open(key(80)); reply.Status != wire.FlowForbidden || !strings.Contains(reply.Reason, "limit of 3 flows") {
		t.Errorf("reply %+v", reply)
	}
	_ = flows[0].CloseWrite()
	if got := r.settle(2); got[FlowServed] != 1 || got[FlowLimit] != 1 {
		t.Errorf("counted %v", got)
	}
	if _, reply := p.open(key(80)); reply.Status != wire.FlowOK {
		t.Errorf("there is room again: %+v", reply)
	}
}

func TestSilentFlows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := r.connect("h")
		begin := time.Now()
		silent, err := p.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		slow, err := p.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				if _, err := slow.Write([]byte{0}); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
		}()
		if _, err := silent.Read(make([]byte, 1)); !errors.Is(err, link.ErrReset) {
			t.Error(err)
		}
		if d := time.Since(begin); d != 5*time.Second {
			t.Errorf("took %s", d)
		}
		if _, err := slow.Read(make([]byte, 1)); !errors.Is(err, link.ErrReset) {
			t.Error(err)
		}
		_ = p.Close()
		_ = r.stop()
		synctest.Wait()
	})
}

// Run returns only when the last flow has ended, and ends them all.
func TestRunWaitsForFlows(t *testing.T) {
	var running sync.WaitGroup
	running.Add(1)
	ended := make(chan struct{})
	r := newRig(t, func(o *Options) {
		o.Serve = func(ctx context.Context, _ net.Conn, _ forward.Request) error {
			running.Done()
			<-ctx.Done()
			close(ended)
			return ctx.Err()
		}
	})
	r.put(pub(key(80), "a"))
	p := r.connect("h")
	st, err := p.Open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if err := wire.WriteRequest(st, wire.FlowRequest{Key: key(80)}); err != nil {
		t.Fatal(err)
	}
	running.Wait()
	_ = r.stop()
	select {
	case <-ended:
	default:
		t.Error("Run returned before the flow")
	}
}
