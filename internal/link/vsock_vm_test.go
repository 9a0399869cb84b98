// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/link/wire"
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
	told(t, host, agent.s)
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

// Only the host may dial unless the options allow others.
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

// Who dials nobody is told whether the machine is there.
func TestVsockNoListener(t *testing.T) {
	for _, tt := range []struct {
		cid   uint32
		errno unix.Errno
		want  string
	}{
		{CIDLocal, unix.ECONNRESET, "nothing listens at this port"},
		{1005, unix.ENODEV, "no machine that runs here has this CID"},
	} {
		_, err := Dial(ctx10(t), Endpoint{Network: NetworkVsock, CID: tt.cid, Port: 1005}, opts(t, RoleHost))
		if !errors.Is(err, tt.errno) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("CID %d: %v", tt.cid, err)
		}
	}
}

// vsockPair are the two ends of a connection over vsock's loopback.
func vsockPair(b *testing.B) (near, far net.Conn) {
	b.Helper()
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
	b.Cleanup(func() { _, _ = near.Close(), far.Close() })
	return near, far
}

// chunks writes as forward does: into a chunk that it has room for.
type chunks struct {
	c     *flowConn
	frame []byte
}

func (w chunks) Write(p []byte) (int, error) {
	n := copy(w.frame[wire.ChunkHeader:], p)
	return n, w.c.WriteChunk(w.frame[:wire.ChunkHeader+n])
}

// BenchmarkVsockThroughput is BenchmarkThroughput over vsock's loopback: a flow
// with a connection of its own, one that is a stream of the session, and a bare
// connection.
func BenchmarkVsockThroughput(b *testing.B) {
	ao := opts(b, RoleAgent)
	ao.AllowCIDs = []uint32{CIDLocal}
	b.Run("connection", func(b *testing.B) {
		l := listen(b, Endpoint{Network: NetworkVsock, CID: CIDAny, Port: 1011}, ao)
		l.start()
		host, err := Dial(ctx10(b), Endpoint{Network: NetworkVsock, CID: CIDLocal, Port: 1011}, opts(b, RoleHost))
		if err != nil {
			b.Fatal(err)
		}
		closed(b, host)
		agent, err := l.Accept(ctx10(b))
		if err != nil {
			b.Fatal(err)
		}
		closed(b, agent)
		g, h := flow(b, agent, host)
		throughput(b, chunks{h.(*flowConn), make([]byte, wire.ChunkHeader+64<<10)}, g)
	})
	b.Run("stream", func(b *testing.B) {
		near, far := vsockPair(b)
		host, agent := shake(b, opts(b, RoleHost), ao, near, far)
		if host.err != nil || agent.err != nil {
			b.Fatal(host.err, agent.err)
		}
		g, h := flow(b, agent.s, host.s)
		throughput(b, h, g)
	})
	b.Run("plain", func(b *testing.B) {
		near, far := vsockPair(b)
		throughput(b, near, far)
	})
}

// BenchmarkVsockFromTCP carries what a TCP connection brings to a vsock one: by
// read and write, and by splice(2).
func BenchmarkVsockFromTCP(b *testing.B) {
	run := func(b *testing.B, relay func(dst *vsock.Conn, src *net.TCPConn)) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = ln.Close() }()
		client, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		src, err := ln.Accept()
		if err != nil {
			b.Fatal(err)
		}
		near, far := vsockPair(b)
		done := make(chan struct{})
		go func() {
			defer close(done)
			relay(near.(*vsock.Conn), src.(*net.TCPConn))
		}()
		throughput(b, client, far)
		_, _ = client.Close(), src.Close()
		<-done
	}
	for _, size := range []int{16 << 10, 64 << 10, 256 << 10} {
		b.Run(fmt.Sprintf("copied by %d KiB", size>>10), func(b *testing.B) {
			run(b, func(dst *vsock.Conn, src *net.TCPConn) {
				_, _ = io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, size))
			})
		})
	}
	b.Run("spliced", func(b *testing.B) { run(b, spliceAll) })
}

// spliceAll moves src to dst by splice(2) until either fails.
func spliceAll(dst *vsock.Conn, src *net.TCPConn) {
	var pipe [2]int
	if unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return
	}
	defer func() { _, _ = unix.Close(pipe[0]), unix.Close(pipe[1]) }()
	_, _ = unix.FcntlInt(uintptr(pipe[0]), unix.F_SETPIPE_SZ, 256<<10)
	from, ferr := src.SyscallConn()
	to, terr := dst.SyscallConn()
	if ferr != nil || terr != nil {
		return
	}
	for {
		var n int64
		_ = from.Read(func(fd uintptr) bool {
			var err error
			n, err = unix.Splice(int(fd), nil, pipe[1], nil, 256<<10, unix.SPLICE_F_NONBLOCK)
			return !errors.Is(err, unix.EAGAIN)
		})
		if n <= 0 {
			return
		}
		for n > 0 {
			var m int64
			_ = to.Write(func(fd uintptr) bool {
				var err error
				m, err = unix.Splice(pipe[0], nil, int(fd), nil, int(n), unix.SPLICE_F_NONBLOCK)
				return !errors.Is(err, unix.EAGAIN)
			})
			if m <= 0 {
				return
			}
			n -= m
		}
	}
}
