// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"runtime"
	"testing"
	"time"
)

// spliced returns the outer ends of two connections that are spliced, and what
// Splice returned.
func spliced(ctx context.Context, t *testing.T, networkA, networkB string, m *Meter) (a, b net.Conn, result <-chan error) {
	t.Helper()
	a, innerA := pair(t, networkA)
	b, innerB := pair(t, networkB)
	_, _ = innerA.SetDeadline(time.Time{}), innerB.SetDeadline(time.Time{})
	done := make(chan error, 1)
	go func() { done <- Splice(ctx, innerA, innerB, m) }()
	return a, b, done
}

func closeWriting(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
}

func await(t *testing.T, result <-chan error) error {
	t.Helper()
	select {
	case err := <-result:
		return err
	case <-time.After(patience):
		t.Fatal("splice did not end")
		return nil
	}
}

var networks = []struct{ a, b string }{{"tcp", "tcp"}, {"tcp", "unix"}, {"unix", "tcp"}, {"unix", "unix"}}

func TestHalfClose(t *testing.T) {
	for _, n := range networks {
		t.Run(n.a+" "+n.b, func(t *testing.T) {
			a, b, result := spliced(t.Context(), t, n.a, n.b, nil)
			write(t, a, "question")
			closeWriting(t, a)
			if got := readAll(t, b); got != "question" {
				t.Errorf("b read %q", got)
			}
			write(t, b, "answer, after the end of the question")
			closeWriting(t, b)
			if got := readAll(t, a); got != "answer, after the end of the question" {
				t.Errorf("a read %q", got)
			}
			if err := await(t, result); err != nil {
				t.Errorf("Splice = %v", err)
			}
		})
	}
}

func TestReset(t *testing.T) {
	for _, dir := range []string{"a", "b"} {
		t.Run(dir, func(t *testing.T) {
			a, b, result := spliced(t.Context(), t, "tcp", "tcp", nil)
			write(t, a, "x")
			readN(t, b, 1)
			if dir == "b" {
				a, b = b, a
			}
			Reset(a)
			if _, err := b.Read(make([]byte, 1)); !isReset(err) {
				t.Errorf("read at the other side = %v, want a reset", err)
			}
			if err := await(t, result); !isReset(err) {
				t.Errorf("Splice = %v, want a reset", err)
			}
		})
	}
}

func TestResetAfterHalfClose(t *testing.T) {
	if runtime.GOOS != "linux" {
		return // the kernel does not report it
	}
	a, b, result := spliced(t.Context(), t, "tcp", "tcp", nil)
	closeWriting(t, a)
	if got := readAll(t, b); got != "" {
		t.Errorf("b read %q", got)
	}
	// b is silent, so that nothing but the reset itself can end the splice.
	Reset(a)
	if err := await(t, result); err == nil {
		t.Error("Splice = nil, want a reset")
	}
	eventually(t, "b is reset", func() bool {
		_, err := b.Write([]byte("x"))
		return err != nil
	})
}

// Whichever direction notices first that a side closed, both end.
func TestOneSideClosesWhileOtherSends(t *testing.T) {
	for range 50 {
		a, b, result := spliced(t.Context(), t, "tcp", "tcp", nil)
		closeWriting(t, a)
		if got := readAll(t, b); got != "" {
			t.Errorf("b read %q", got)
		}
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			for range 20 {
				if _, err := b.Write(make([]byte, 1<<10)); err != nil {
					return
				}
			}
			_ = b.Close()
		}()
		readN(t, a, 1)
		Reset(a)
		_ = await(t, result)
		<-sent
	}
}

func TestContextResetsBoth(t *testing.T) {
	cause := errors.New("no longer allowed")
	ctx, cancel := context.WithCancelCause(t.Context())
	a, b, result := spliced(ctx, t, "tcp", "tcp", nil)
	write(t, a, "x")
	readN(t, b, 1)
	cancel(cause)
	if err := await(t, result); !errors.Is(err, cause) {
		t.Errorf("Splice = %v, want %v", err, cause)
	}
	for _, c := range []net.Conn{a, b} {
		if _, err := c.Read(make([]byte, 1)); !isReset(err) {
			t.Errorf("read = %v, want a reset", err)
		}
	}
}

// A server that stops reading may still answer; the client that continues to send
// must get the answer, not a reset in its place.
func TestAnswerAfterReadShutdown(t *testing.T) {
	a, b, result := spliced(t.Context(), t, "tcp", "unix", nil)
	if err := b.(*net.UnixConn).CloseRead(); err != nil {
		t.Fatal(err)
	}
	for range 8 {
		write(t, a, "body that nobody reads")
	}
	write(t, b, "413 too large")
	if got := readN(t, a, 13); got != "413 too large" {
		t.Errorf("a read %q", got)
	}
	_ = b.Close()
	if got := readAll(t, a); got != "" {
		t.Errorf("a read %q", got)
	}
	_ = a.Close()
	if err := await(t, result); err == nil {
		t.Error("Splice = nil though bytes were lost")
	}
}

func TestBulk(t *testing.T) {
	const size = 24<<20 + 7 // beyond where splice(2) takes over, and one chunk of it
	data := bytes.Repeat([]byte("fairlead "), size/9+1)[:size]
	want := sha256.Sum256(data)
	for _, n := range networks {
		t.Run(n.a+" "+n.b, func(t *testing.T) {
			var m Meter
			a, b, result := spliced(t.Context(), t, n.a, n.b, &m)
			send := func(c net.Conn) {
				_, _ = io.Copy(c, bytes.NewReader(data))
				_ = c.(interface{ CloseWrite() error }).CloseWrite()
			}
			sums := make(chan [32]byte, 2)
			receive := func(c net.Conn) {
				h := sha256.New()
				_, _ = io.Copy(h, c)
				sums <- [32]byte(h.Sum(nil))
			}
			go send(a)
			go receive(a)
			go send(b)
			receive(b)
			for range 2 {
				if got := <-sums; got != want {
					t.Error("other bytes arrived than were sent")
				}
			}
			if err := await(t, result); err != nil {
				t.Errorf("Splice = %v", err)
			}
			if m.AToB.Load() != size || m.BToA.Load() != size {
				t.Errorf("meter = %d, %d, want %d", m.AToB.Load(), m.BToA.Load(), size)
			}
		})
	}
}

func TestBackPressure(t *testing.T) {
	var m Meter
	a, b, result := spliced(t.Context(), t, "unix", "unix", &m)
	const size = 64 << 20
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = a.Write(make([]byte, size))
		_ = a.(*net.UnixConn).CloseWrite()
	}()
	// Nobody reads b: the meter comes to rest at what sockets and buffer hold.
	var last uint64
	eventually(t, "the sender is held back", func() bool {
		time.Sleep(20 * time.Millisecond)
		now := m.AToB.Load()
		still := now == last && now > 0
		last = now
		return still
	})
	if last > size/4 {
		t.Errorf("%d bytes were taken that nobody reads", last)
	}
	n, err := io.Copy(io.Discard, b)
	if err != nil || n != size {
		t.Errorf("b read %d bytes, %v; want %d", n, err, size)
	}
	<-sent
	_ = b.Close()
	if err := await(t, result); err != nil {
		t.Errorf("Splice = %v", err)
	}
}
