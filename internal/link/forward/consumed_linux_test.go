// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"
)

// writesFirst is a connection whose failed write comes before its next read. The
// write then returns after that read if slow is set.
type writesFirst struct {
	*net.TCPConn
	slow   bool
	once   sync.Once
	failed chan struct{} // closed when a write has failed
	ended  chan struct{} // closed when a read has returned the end
}

func newWritesFirst(c net.Conn, slow bool) *writesFirst {
	return &writesFirst{TCPConn: c.(*net.TCPConn), slow: slow, failed: make(chan struct{}), ended: make(chan struct{})}
}

func (c *writesFirst) Write(b []byte) (int, error) {
	n, err := c.TCPConn.Write(b)
	if errors.Is(err, syscall.ECONNRESET) {
		c.once.Do(func() { close(c.failed) })
		if c.slow {
			<-c.ended
			time.Sleep(10 * time.Millisecond)
		}
	}
	return n, err
}

func (c *writesFirst) Read(b []byte) (int, error) {
	<-c.failed
	n, err := c.TCPConn.Read(b)
	if errors.Is(err, io.EOF) {
		close(c.ended)
	}
	return n, err
}

// The kernel reports a reset once. If a write gets it, reads return the end, which
// must not make the answer so far look complete.
func TestResetSeenByWrite(t *testing.T) {
	for _, slow := range []bool{false, true} {
		name := "write returns first"
		if slow {
			name = "read returns first"
		}
		t.Run(name, func(t *testing.T) {
			client, innerA := pair(t, "tcp")
			server, innerB := pair(t, "tcp")
			_, _ = innerA.SetDeadline(time.Time{}), innerB.SetDeadline(time.Time{})
			write(t, server, "partial answer")
			Reset(server)
			done := make(chan error, 1)
			go func() { done <- Splice(t.Context(), innerA, newWritesFirst(innerB, slow), nil) }()
			write(t, client, "x")
			got, err := io.ReadAll(client)
			if string(got) != "partial answer" || !isReset(err) {
				t.Errorf("client read %q, %v; want the partial answer and a reset", got, err)
			}
			if err := await(t, done); !isReset(err) {
				t.Errorf("Splice = %v, want a reset", err)
			}
		})
	}
}
