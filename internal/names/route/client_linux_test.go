// SPDX-License-Identifier: Apache-2.0

package route

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/conns"
	"github.com/fairlead/fairlead/test/kit/wait"
)

// hijacking serves a server that takes each connection over.
func hijacking(t *testing.T, f *fake, take func(conn *net.TCPConn, rw *bufio.ReadWriter)) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		take(conn.(*net.TCPConn), rw)
	}))
	t.Cleanup(s.Close)
	f.put("vm", "web", 80, s.Listener.Addr().String())
}

const (
	upgrade   = "GET / HTTP/1.1\r\nHost: web.localhost\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
	switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
)

// dial connects to a listener.
func dial(t *testing.T, at fmt.Stringer) *net.TCPConn {
	t.Helper()
	conn, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(wait.Limit()))
	return conn.(*net.TCPConn)
}

// tried returns how a connection ends that sends nothing; the reset may come before it is made.
func tried(at fmt.Stringer) error {
	conn, err := net.Dial("tcp", at.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(wait.Limit()))
	_, err = conn.Read(make([]byte, 1))
	return err
}

// The end of one direction of an upgraded connection leaves the other open.
func TestUpgradeHalfClose(t *testing.T) {
	f := newFake()
	got := make(chan string, 1)
	hijacking(t, f, func(conn *net.TCPConn, rw *bufio.ReadWriter) {
		_, _ = io.WriteString(conn, switching+"bye")
		_ = conn.CloseWrite()
		b, err := io.ReadAll(rw)
		got <- fmt.Sprint(len(b), err)
	})
	_, at, _ := serve(t, f, nil)
	conn := dial(t, at)
	_, _ = io.WriteString(conn, upgrade)
	b, err := io.ReadAll(conn)
	if err != nil || string(b) != switching+"bye" {
		t.Errorf("read %q, %v", b, err)
	}
	if _, err := conn.Write(make([]byte, 1<<10)); err != nil {
		t.Error(err)
	}
	_ = conn.CloseWrite()
	select {
	case s := <-got:
		if s != "1024 <nil>" {
			t.Errorf("the server read %s", s)
		}
	case <-time.After(wait.Limit()):
		t.Error("the server got no end")
	}
}

// Connections beyond the limit are reset and counted, and do not wait.
func TestConnectionsBeyondTheLimit(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	r := New(Options{Host: newFake()})
	l := &listener{Listener: ln, r: r, silent: new(conns.Set), most: 1}
	came := make(chan net.Conn)
	go func() {
		defer close(came)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			came <- conn
		}
	}()
	dial(t, ln.Addr())
	first := <-came
	if err := tried(ln.Addr()); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("beyond the limit: %v, want a reset", err)
	}
	if s := r.Stats(); s.Limited != 1 || s.HTTP != 1 {
		t.Errorf("%+v", s)
	}
	for range 2 { // counts once
		_ = first.Close()
	}
	dial(t, ln.Addr())
	_ = (<-came).Close()
	if s := r.Stats(); s.Limited != 1 || s.HTTP != 0 {
		t.Errorf("%+v", s)
	}
	_ = ln.Close()
	<-came
}

// While few descriptors are left new connections are reset, and most silent ones make room.
func TestSilentConnectionsMakeRoom(t *testing.T) {
	var before, now syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &before) }()
	r, at, _ := serve(t, newFake(), nil)
	var held []*net.TCPConn
	for range 2 * maxSilentScarce {
		held = append(held, dial(t, at))
	}
	wait.Until(t, "all are accepted", func() error {
		if s := r.Stats(); s.HTTP != len(held) {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	now = before
	now.Cur = uint64(len(held)) * 3 // fewer are free than are kept for other uses
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &now); err != nil {
		t.Fatal(err)
	}
	if err := tried(at); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("while descriptors are scarce: %v, want a reset", err)
	}
	if _, err := held[0].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the oldest silent connection: %v, want its end", err)
	}
	wait.Until(t, "the newest remain", func() error {
		if s := r.Stats(); s.HTTP != maxSilentScarce || s.Refused != 1 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}
