// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package link

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
)

// These run in a virtual machine with the vsock_loopback module, whose both
// ends have context id 1.

func TestVsockLoopback(t *testing.T) {
	e := Endpoint{Network: NetworkVsock, CID: CIDAny, Port: 1001}
	ao := opts(t, RoleAgent)
	ao.AllowCIDs = []uint32{CIDLocal}
	l := listen(t, e, ao)
	accepted := make(chan result, 1)
	go func() {
		s, err := l.Accept(context.Background())
		accepted <- result{s, err}
	}()
	host, err := Dial(ctx10(t), Endpoint{Network: NetworkVsock, CID: CIDLocal, Port: 1001}, opts(t, RoleHost))
	if err != nil {
		t.Fatal(err)
	}
	closed(t, host)
	agent := <-accepted
	if agent.err != nil {
		t.Fatal(agent.err)
	}
	closed(t, agent.s)
	echoed(t, host.Control(), agent.s.Control())
	g, h := flow(t, agent.s, host)
	msg := bytes.Repeat([]byte("vsock"), 1<<20)
	go func() {
		_, _ = h.Write(msg)
		_ = h.CloseWrite()
	}()
	if b, err := io.ReadAll(g); err != nil || !bytes.Equal(b, msg) {
		t.Errorf("%d bytes of %d, %v", len(b), len(msg), err)
	}
	if err := host.CloseWith(ReasonReplaced); err != nil {
		t.Error(err)
	}
	<-agent.s.Done()
	if err := agent.s.Err(); err == nil {
		t.Error("no reason")
	}
}

// Only the host may dial unless the options say otherwise.
func TestVsockRefusesOtherContexts(t *testing.T) {
	l := listen(t, Endpoint{Network: NetworkVsock, CID: CIDAny, Port: 1002}, opts(t, RoleAgent))
	l.start()
	_, err := Dial(ctx10(t), Endpoint{Network: NetworkVsock, CID: CIDLocal, Port: 1002}, opts(t, RoleHost))
	_ = refusal(t, err)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if n := l.Refused()[RefusedCID]; n != 1 {
		t.Errorf("counted %d", n)
	}
}

func TestVsockWrongToken(t *testing.T) {
	ao := opts(t, RoleAgent)
	ao.AllowCIDs = []uint32{CIDLocal}
	l := listen(t, Endpoint{Network: NetworkVsock, CID: CIDAny, Port: 1003}, ao)
	l.start()
	ho := opts(t, RoleHost)
	ho.Token = token(t, "another"+secret)
	_, err := Dial(ctx10(t), Endpoint{Network: NetworkVsock, CID: CIDLocal, Port: 1003}, ho)
	if r := refusal(t, err); r.Code != RefusedProof {
		t.Error(r)
	}
}

func TestVsockPortTaken(t *testing.T) {
	e := Endpoint{Network: NetworkVsock, CID: CIDAny, Port: 1004}
	listen(t, e, opts(t, RoleAgent))
	if l, err := Listen(ctx10(t), e, opts(t, RoleAgent)); err == nil {
		_ = l.Close()
		t.Error("listens twice")
	}
}

func TestVsockNobodyListens(t *testing.T) {
	if _, err := Dial(ctx10(t), Endpoint{Network: NetworkVsock, CID: CIDLocal, Port: 1005}, opts(t, RoleHost)); err == nil {
		t.Error("dialled nobody")
	}
}

// BenchmarkVsockThroughput is BenchmarkThroughput over vsock's loopback.
func BenchmarkVsockThroughput(b *testing.B) {
	connect := func(b *testing.B) (near, far net.Conn) {
		l, err := listenVsock(CIDAny, 1010)
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		if near, err = dialVsock(ctx10(b), CIDLocal, 1010); err != nil {
			b.Fatal(err)
		}
		if far, err = l.Accept(); err != nil {
			b.Fatal(err)
		}
		return near, far
	}
	b.Run("link", func(b *testing.B) {
		ao := opts(b, RoleAgent)
		ao.AllowCIDs = []uint32{CIDLocal}
		near, far := connect(b)
		host, agent := shake(b, opts(b, RoleHost), ao, near, far)
		if host.err != nil || agent.err != nil {
			b.Fatal(host.err, agent.err)
		}
		g, h := flow(b, agent.s, host.s)
		throughput(b, h, g)
	})
	b.Run("plain", func(b *testing.B) {
		near, far := connect(b)
		defer func() { _, _ = near.Close(), far.Close() }()
		throughput(b, near, far)
	})
}
