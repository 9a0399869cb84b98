// SPDX-License-Identifier: Apache-2.0

package route

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// hijack returns a server that takes each connection over.
func hijack(t *testing.T, take func(conn *net.TCPConn, rw *bufio.ReadWriter)) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(wait.Limit()))
		take(conn.(*net.TCPConn), rw)
	}
}

const (
	upgrade   = "GET / HTTP/1.1\r\nHost: web.localhost\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
	switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
)

// What a client sends behind a request to upgrade, before the answer, reaches the server.
func TestBytesBehindAnUpgrade(t *testing.T) {
	_, at := published(t, hijack(t, func(conn *net.TCPConn, rw *bufio.ReadWriter) {
		_, _ = io.WriteString(conn, switching)
		_, _ = io.Copy(conn, rw)
	}))
	for _, early := range []string{"", "e", "early ", strings.Repeat("early ", 10<<10)} {
		conn := dial(t, at)
		_, _ = io.WriteString(conn, upgrade+early)
		b := make([]byte, len(switching))
		if _, err := io.ReadFull(conn, b); err != nil || string(b) != switching {
			t.Fatalf("%d bytes: %q, %v", len(early), b, err)
		}
		_, _ = io.WriteString(conn, "late")
		_ = conn.CloseWrite()
		if b, err := io.ReadAll(conn); err != nil || string(b) != early+"late" {
			t.Errorf("of %d bytes %d came back, %v", len(early), len(b)-len("late"), err)
		}
	}
}

// What a client sends on an upgraded connection does not look complete when the client is reset.
func TestUpgradedClientIsReset(t *testing.T) {
	got := make(chan error, 1)
	_, at := published(t, hijack(t, func(conn *net.TCPConn, rw *bufio.ReadWriter) {
		_, _ = io.WriteString(conn, switching)
		_, err := io.ReadAll(rw)
		got <- err
	}))
	conn := dial(t, at)
	_, _ = io.WriteString(conn, upgrade)
	if _, err := io.ReadFull(conn, make([]byte, len(switching))); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(conn, "half")
	_ = conn.SetLinger(0)
	_ = conn.Close()
	select {
	case err := <-got:
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the server read %v, want a reset", err)
		}
	case <-time.After(wait.Limit()):
		t.Error("the server got no end")
	}
}

const upgradePost = "POST / HTTP/1.1\r\nHost: web.localhost\r\nConnection: Upgrade\r\nUpgrade: x\r\n"

// A server that changes the protocol in the middle of a request gets the rest of it first.
func TestUpgradeInTheMiddleOfARequest(t *testing.T) {
	for _, size := range []int{5, 4 << 10, 1 << 20} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			switched := make(chan struct{})
			got := make(chan []byte, 1)
			_, at := published(t, hijack(t, func(conn *net.TCPConn, rw *bufio.ReadWriter) {
				_, _ = io.WriteString(conn, switching)
				close(switched)
				b, _ := io.ReadAll(rw)
				got <- b
			}))
			conn := dial(t, at)
			body := strings.Repeat("b", size)
			_, _ = fmt.Fprintf(conn, "%sContent-Length: %d\r\n\r\n%s", upgradePost, size, body[:2])
			<-switched
			_, _ = io.WriteString(conn, body[2:]+"early")
			if _, err := io.ReadFull(conn, make([]byte, len(switching))); err != nil {
				t.Fatal(err)
			}
			_ = conn.CloseWrite()
			if b := <-got; string(b) != body+"early" {
				t.Errorf("the server read %d bytes, and %.40q at their end", len(b), b[max(0, len(b)-40):])
			}
		})
	}
}

// A change of protocol behind which the request does not end is refused.
func TestUpgradeInTheMiddleOfARequestIsRefused(t *testing.T) {
	r, at := published(t, hijack(t, func(conn *net.TCPConn, rw *bufio.ReadWriter) {
		_, _ = io.WriteString(conn, switching)
		_, _ = io.Copy(io.Discard, rw)
	}), func(o *Options) { o.HeaderTimeout = time.Second }) // also for the head
	conn := dial(t, at)
	_, _ = io.WriteString(conn, upgradePost+"Content-Length: 9\r\n\r\nx")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusBadGateway || !resp.Close {
		t.Errorf("%+v", resp)
	}
	if s := r.Stats(); s.Results["ok"] != 0 || s.Results["failed"] != 1 {
		t.Errorf("%+v", s)
	}
}

// A request is passed on without its wish to upgrade where its body is chunked, as nobody tells
// when all of it has been sent, and of HTTP/1.0, which has no upgrades.
func TestRequestsThatDoNotUpgrade(t *testing.T) {
	_, at := published(t, func(w http.ResponseWriter, q *http.Request) {
		b, err := io.ReadAll(q.Body)
		fmt.Fprint(w, string(b), err, q.Header["Upgrade"], q.Header["Connection"])
	})
	for request, want := range map[string]string{
		upgradePost + "Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n": "body<nil> [] [close]",
		strings.Replace(upgrade, "HTTP/1.1", "HTTP/1.0", 1):                      "<nil> [] [close]",
	} {
		conn := dial(t, at)
		_, _ = io.WriteString(conn, request)
		if code, body := answer(t, bufio.NewReader(conn)); code != http.StatusOK || body != want {
			t.Errorf("%.20q: %d %q, want %q", request, code, body, want)
		}
	}
}

// A server that changes the protocol unasked gets no connection, in the middle of a chunked
// request neither.
func TestUpgradeUnasked(t *testing.T) {
	for _, request := range []string{
		"GET / HTTP/1.1\r\nHost: web.localhost\r\n\r\n",
		upgradePost + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1\r\nx\r\n", 1<<17),
	} {
		_, at := published(t, hijack(t, func(conn *net.TCPConn, rw *bufio.ReadWriter) {
			_, _ = io.WriteString(conn, switching)
			_, _ = io.Copy(io.Discard, rw)
		}))
		conn := dial(t, at)
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			_, _ = io.WriteString(conn, request)
		}()
		const want = "The server cannot be used by name: it changed the protocol unasked, or without saying to which\n"
		if code, body := answer(t, bufio.NewReader(conn)); code != http.StatusBadGateway || body != want {
			t.Errorf("%.20q: %d %q", request, code, body)
		}
		<-sent
	}
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
	got := make(chan string, 1)
	_, at := published(t, hijack(t, func(conn *net.TCPConn, rw *bufio.ReadWriter) {
		_, _ = io.WriteString(conn, switching+"bye")
		_ = conn.CloseWrite()
		b, err := io.ReadAll(rw)
		got <- fmt.Sprint(len(b), err)
	}))
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

// The reset of a server that has sent its end reaches a client that sends nothing.
func TestUpgradedServerIsResetAfterItsEnd(t *testing.T) {
	proceed := make(chan struct{})
	r, at := published(t, hijack(t, func(conn *net.TCPConn, _ *bufio.ReadWriter) {
		_, _ = io.WriteString(conn, switching)
		_ = conn.CloseWrite()
		<-proceed
		_ = conn.SetLinger(0)
	}))
	conn := dial(t, at)
	_, _ = io.WriteString(conn, upgrade)
	if b, err := io.ReadAll(conn); err != nil || string(b) != switching {
		t.Errorf("read %q, %v", b, err)
	}
	close(proceed)
	wait.Until(t, "the connection is closed", func() error {
		if s := r.Stats(); s.HTTP != 0 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// Connections beyond the limit are reset and counted, and do not wait.
func TestConnectionsBeyondTheLimit(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	r := New(Options{Host: newFake(), Logger: slog.New(slog.DiscardHandler)})
	l := r.listener(ln, &r.open[0])
	l.most = 1
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

// At the limit the oldest silent connection makes room, whatever other listeners have open.
func TestSilentConnectionMakesRoomAtTheLimit(t *testing.T) {
	r := New(Options{Host: newFake(), Logger: slog.New(slog.DiscardHandler)})
	for range 2 {
		ln, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		_ = ln.(*net.TCPListener).SetDeadline(time.Now().Add(wait.Limit()))
		l := r.listener(ln, &r.open[1])
		l.most = 1
		idle := dial(t, ln.Addr())
		first, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		l.silent.Enter(first)
		dial(t, ln.Addr())
		second, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer second.Close()
		if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("the silent connection: %v, want its end", err)
		}
	}
	if s := r.Stats(); s.Limited != 0 || s.TLS != 2 {
		t.Errorf("%+v", s)
	}
}

// While few descriptors are left new connections are reset, and most silent ones make room.
func TestSilentConnectionsMakeRoom(t *testing.T) {
	var before syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
			r, at, atTLS := serve(t, newFake())
			open := &r.open[0]
			if secure {
				at, open = atTLS, &r.open[1]
			}
			var held []*net.TCPConn
			for range 2 * maxSilentScarce {
				held = append(held, dial(t, at))
			}
			wait.Until(t, "all are accepted", func() error {
				if n := open.Load(); n != int64(len(held)) {
					return fmt.Errorf("%d are", n)
				}
				return nil
			})
			next, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			now := before
			now.Cur = uint64(next.Fd()) + 16 // fewer are free than are kept for other uses
			_ = next.Close()
			defer func() { _ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &before) }()
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
				if n := open.Load(); n != maxSilentScarce || r.Stats().Refused != 1 {
					return fmt.Errorf("%d are open, %+v", n, r.Stats())
				}
				return nil
			})
		})
	}
}

// An answer that breaks off ends by a reset: what ends by its connection's end would look complete.
func TestTruncatedConnections(t *testing.T) {
	for name, c := range map[string]struct{ request, answer string }{
		"HTTP/1.0":                     {"GET / HTTP/1.0\r\nHost: web.localhost\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"},
		"HTTP/1.0, reset":              {"GET / HTTP/1.0\r\nHost: web.localhost\r\n\r\n", "HTTP/1.0 200 OK\r\n\r\nhalf"},
		"HTTP/1.1, ended by its close": {"GET / HTTP/1.1\r\nHost: web.localhost\r\nConnection: close\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"},
		"in the middle of a request":   {"POST / HTTP/1.1\r\nHost: web.localhost\r\nContent-Length: 9\r\n\r\nx", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"},
		"upgraded":                     {upgrade, switching + "half"},
	} {
		t.Run(name, func(t *testing.T) {
			proceed := make(chan struct{})
			_, at := published(t, hijack(t, func(conn *net.TCPConn, _ *bufio.ReadWriter) {
				_, _ = io.WriteString(conn, c.answer)
				<-proceed
				_ = conn.SetLinger(0)
			}))
			conn := dial(t, at)
			_, _ = io.WriteString(conn, c.request)
			r := bufio.NewReader(conn)
			resp, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body := io.Reader(resp.Body)
			if resp.StatusCode == http.StatusSwitchingProtocols {
				body = r
			}
			_, err = io.ReadFull(body, make([]byte, len("half")))
			close(proceed)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(body); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("then %v, want a reset", err)
			}
		})
	}
}

// An answer that ends in order ends its connection in order.
func TestWholeConnections(t *testing.T) {
	for name, c := range map[string][3]string{
		"HTTP/1.0": {"GET / HTTP/1.0\r\nHost: web.localhost\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n0\r\n\r\n", "whole"},
		"close":    {"GET / HTTP/1.1\r\nHost: web.localhost\r\nConnection: close\r\n\r\n", "HTTP/1.0 200 OK\r\n\r\nwhole", "5\r\nwhole\r\n0\r\n\r\n"},
		"refused":  {"GET / HTTP/1.0\r\nHost: none.localhost\r\n\r\n", "", "Nothing"},
	} {
		_, at := published(t, hijack(t, func(conn *net.TCPConn, _ *bufio.ReadWriter) { _, _ = io.WriteString(conn, c[1]) }))
		conn := dial(t, at)
		_, _ = io.WriteString(conn, c[0])
		b, err := io.ReadAll(conn)
		if err != nil || !strings.Contains(string(b), "\r\n\r\n"+c[2]) {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

// What is under way when names end does not look complete, also where the client reads nothing.
func TestEndOfNamesCutsAnswers(t *testing.T) {
	for name, c := range map[string][2]string{
		"an answer":              {"GET / HTTP/1.0\r\nHost: web.localhost\r\n\r\n", "HTTP/1.0 200 OK\r\n\r\nhalf"},
		"an upgraded connection": {upgrade, switching + "half"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake()
			full := make(chan struct{})
			f.serve(t, hijack(t, func(conn *net.TCPConn, _ *bufio.ReadWriter) {
				_, err := io.WriteString(conn, c[1])
				for b := make([]byte, 1<<20); err == nil; {
					_ = conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
					_, err = conn.Write(b)
				}
				close(full)
				_, _ = io.Copy(io.Discard, conn) // until it ends
			}))
			r := New(Options{Host: f, Domain: "localhost", Logger: slog.New(slog.DiscardHandler)})
			ln, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- r.serveHTTP(ctx, ln) }()
			conn := dial(t, ln.Addr())
			_, _ = io.WriteString(conn, c[0])
			for b, n := make([]byte, 4<<10), 0; !strings.Contains(string(b[:n]), "half"); {
				more, err := conn.Read(b[n:])
				if n += more; err != nil {
					t.Fatalf("%q, %v", b[:n], err)
				}
			}
			<-full
			cancel()
			if err := <-done; !errors.Is(err, http.ErrServerClosed) {
				t.Error(err)
			}
			wait.Until(t, "the connection is closed", func() error {
				if s := r.Stats(); s.HTTP != 0 {
					return fmt.Errorf("%+v", s)
				}
				return nil
			})
			if _, err := io.Copy(io.Discard, conn); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("then %v, want a reset", err)
			}
		})
	}
}
