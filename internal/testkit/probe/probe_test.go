// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
)

// serve runs f for each connection to a new port.
func serve(t *testing.T, f func(*net.TCPConn)) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go f(c.(*net.TCPConn))
		}
	}()
	return l.Addr().String()
}

func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// wasReset is a dial that reports what connect(2) does when the reset came first.
func wasReset() (net.Conn, error) {
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNRESET)}
}

func TestAsk(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := At(l.Addr().String())
	_ = l.Close()
	for name, c := range map[string]struct {
		dial func() (net.Conn, error)
		want Answer
	}{
		"nobody listens":        {closed, Closed},
		"reset in the dial":     {wasReset, Reset},
		"reset after it":        {At(serve(t, reset)), Reset},
		"from another address":  {From("127.0.0.2", serve(t, reset)), Reset},
		"reset after a request": {At(serve(t, func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 8)); reset(c) })), Reset},
		"end":                   {At(serve(t, func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 8)); _ = c.Close() })), Ended},
		"data":                  {At(serve(t, func(c *net.TCPConn) { _, _ = io.WriteString(c, "hello"); _, _ = c.Read(make([]byte, 8)) })), Data},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				if got, err := Ask(c.dial, "ask"); got != c.want || err != nil {
					t.Fatalf("answer %q, %v, want %q", got, err, c.want)
				}
				if open, err := Listens(c.dial); open != (c.want != Closed) || err != nil {
					t.Fatalf("listens %t, %v", open, err)
				}
			}
		})
	}
}

// What shows nothing of the port is neither open nor closed.
func TestOtherErrorsAreNoAnswer(t *testing.T) {
	unreachable := func() (net.Conn, error) { return nil, syscall.ENETUNREACH }
	if got, err := Ask(unreachable, ""); got != "" || !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("answer %q, %v", got, err)
	}
	if err := WantClosed(unreachable); !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("closed: %v", err)
	}
	if err := Want(Closed, unreachable, ""); !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("answer: %v", err)
	}
}
