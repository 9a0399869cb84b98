// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
)

// upload is more than sockets and buffers hold.
const upload = 64 << 20

// rejected has a client send an upload to a server that has closed after the first
// bytes, and returns how the client's sending and receiving ended.
func rejected(t *testing.T, client net.Conn, server func() net.Conn, answer string) (sent, received error) {
	t.Helper()
	write(t, client, "begin")
	s := server()
	readN(t, s, 5)
	if answer != "" {
		write(t, s, answer)
	}
	_ = s.Close()
	if answer != "" {
		if got := readN(t, client, len(answer)); got != answer {
			t.Errorf("client read %q, want %q", got, answer)
		}
	}
	data := make([]byte, 1<<20)
	for range upload / len(data) {
		if _, sent = client.Write(data); sent != nil {
			return sent, nil
		}
	}
	if sent = client.(*net.TCPConn).CloseWrite(); sent != nil {
		return sent, nil
	}
	_, received = io.Copy(io.Discard, client)
	return nil, received
}

func wantRejected(t *testing.T, sent, received error) {
	t.Helper()
	if sent == nil && received == nil {
		t.Errorf("%d bytes were sent and the connection ended in order, though the server had closed", upload)
	}
}

// A server that closes in the middle of an upload got only a part of it: the client
// is not to take its own end and the server's for those of a complete transfer.
func TestUploadToAServerThatClosedIsReset(t *testing.T) {
	for _, answer := range []string{"", "413 too large"} {
		name := "without an answer"
		if answer != "" {
			name = "after an answer"
		}
		t.Run(name, func(t *testing.T) {
			for _, n := range []string{"tcp", "unix"} {
				t.Run(n, func(t *testing.T) {
					a, b, result := spliced(t.Context(), t, "tcp", n, nil)
					sent, received := rejected(t, a, func() net.Conn { return b }, answer)
					wantRejected(t, sent, received)
					if await(t, result) == nil {
						t.Error("Splice = nil though bytes were lost")
					}
				})
			}
			t.Run("link", func(t *testing.T) {
				ln, pub := listen(t)
				g := newGuest(t, ServerOptions{}, pub)
				sent, received := rejected(t, g.connect(t, pub.Key), func() net.Conn {
					c, err := ln.Accept()
					if err != nil {
						t.Fatal(err)
					}
					return c
				}, answer)
				wantRejected(t, sent, received)
			})
		})
	}
}

// drained is a connection that is read after a write to the other side has failed.
type drained struct {
	*net.TCPConn
	failed <-chan struct{}
	once   sync.Once
	begun  chan struct{} // closed at that read
}

func (c *drained) Read(b []byte) (int, error) {
	select {
	case <-c.failed:
		c.once.Do(func() { close(c.begun) })
	default:
	}
	return c.TCPConn.Read(b)
}

// endsLater is a connection to which writes fail before its end is read.
type endsLater struct {
	*net.TCPConn
	failed  chan struct{}
	drained <-chan struct{}
}

func (c *endsLater) Write([]byte) (int, error) {
	close(c.failed)
	return 0, syscall.EPIPE
}

func (c *endsLater) Read(b []byte) (int, error) {
	<-c.drained
	return c.TCPConn.Read(b)
}

// A server that takes no more and has not ended may still answer. If it ends without
// an answer, the client is reset.
func TestEndWithoutAnswerAfterFailedWriteIsAReset(t *testing.T) {
	client, innerA := pair(t, "tcp")
	server, innerB := pair(t, "tcp")
	to := &endsLater{TCPConn: innerB.(*net.TCPConn), failed: make(chan struct{})}
	from := &drained{TCPConn: innerA.(*net.TCPConn), failed: to.failed, begun: make(chan struct{})}
	to.drained = from.begun
	done := make(chan error, 1)
	go func() { done <- Splice(t.Context(), from, to, nil) }()
	write(t, client, "nobody reads this")
	_ = server.Close()
	if got, err := io.ReadAll(client); len(got) > 0 || !isReset(err) {
		t.Errorf("client read %q, %v; want a reset", got, err)
	}
	if await(t, done) == nil {
		t.Error("Splice = nil though bytes were lost")
	}
}
