// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

func TestPortAppearsCarriesAndVanishes(t *testing.T) {
	r := newRig(t).start()
	for _, addr := range []string{"0.0.0.0:7001", "127.0.0.1:7002", "[::]:7003", "[::1]:7004", "127.0.0.53:7005"} {
		t.Run(addr, func(t *testing.T) {
			network := "tcp4"
			outside := "127.0.0.1"
			if strings.HasPrefix(addr, "[") {
				network, outside = "tcp6", "::1"
			}
			l := r.guest.listen(t, network, addr)
			go echo.Serve(l)
			k := "tcp " + addr
			r.wantState(k, "active")
			_, port, _ := net.SplitHostPort(addr)
			c := echoThrough(t, r, net.JoinHostPort(outside, port))
			_ = l.Close()
			r.wantState(k, "")
			// A server that drains closes its listener first: the flow goes on.
			if err := roundTrip(c, "still"); err != nil {
				t.Error("an established flow was cut with its publication:", err)
			}
			r.eventually("the host's port is closed", func() error {
				return probe.WantClosed(r.outside.dialer(net.JoinHostPort(outside, port)))
			})
		})
	}
}

// A socket of both families is a publication in each.
func TestDualStack(t *testing.T) {
	r := newRig(t).start()
	l := r.guest.listen(t, "tcp", ":7000") // Go's default: [::], MPTCP, both families
	go echo.Serve(l)
	keys := []string{"tcp 0.0.0.0:7000", "tcp [::]:7000"}
	for i, at := range []string{"127.0.0.1:7000", "[::1]:7000"} {
		r.wantState(keys[i], "active")
		if _, p := r.state(keys[i]); len(p.HostAddresses) != 1 || p.HostAddresses[0].String() != at || len(p.Origins) != 1 {
			t.Errorf("%s: at %v by %v, want at %s", keys[i], p.HostAddresses, p.Origins, at)
		}
		_ = echoThrough(t, r, at).Close()
	}
	_ = l.Close()
	for _, k := range keys {
		r.wantState(k, "")
	}
}

func TestHTTP(t *testing.T) {
	r := newRig(t).start()
	l := r.guest.listen(t, "tcp4", "0.0.0.0:8080")
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "guest") })}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	r.wantState("tcp 0.0.0.0:8080", "active")
	client := http.Client{Transport: &http.Transport{DialContext: func(_ context.Context, network, addr string) (net.Conn, error) {
		return r.outside.Dial(network, addr)
	}}}
	r.eventually("the page", func() error {
		resp, err := client.Get("http://127.0.0.1:8080/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "guest" {
			return fmt.Errorf("body = %q, %w", b, err)
		}
		return nil
	})
}

func TestHalfClose(t *testing.T) {
	r := newRig(t).start()
	l := r.guest.listen(t, "tcp4", "127.0.0.1:7000")
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b, _ := io.ReadAll(c) // until the client ends its writing side
			_, _ = fmt.Fprintf(c, "got %d bytes", len(b))
			_ = c.Close()
		}
	}()
	r.wantState("tcp 127.0.0.1:7000", "active")
	r.eventually("an answer after the half-close", func() error {
		c, err := r.outside.Dial("tcp", "127.0.0.1:7000")
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, _ = c.Write(make([]byte, 100_000))
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		if b, err := io.ReadAll(c); string(b) != "got 100000 bytes" {
			return fmt.Errorf("answer = %q, %w", b, err)
		}
		return nil
	})
}

func TestResetReachesTheOtherSide(t *testing.T) {
	r := newRig(t).start()
	l := r.guest.listen(t, "tcp4", "127.0.0.1:7000")
	r.wantState("tcp 127.0.0.1:7000", "active")
	var c net.Conn
	r.eventually("a connection is reset by its server", func() (err error) {
		if c, err = r.outside.Dial("tcp", "127.0.0.1:7000"); err != nil {
			return err
		}
		t.Cleanup(func() { _ = c.Close() })
		_, _ = io.WriteString(c, "x")
		_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(time.Minute))
		s, err := l.Accept()
		if err != nil {
			return err
		}
		_, err = io.ReadFull(s, make([]byte, 1))
		_ = s.(*net.TCPConn).SetLinger(0)
		return errors.Join(err, s.Close())
	})
	_ = c.SetReadDeadline(time.Now().Add(wait.Limit()))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client read %v, want a reset", err)
	}
}

func TestUDP(t *testing.T) {
	r := newRig(t).start()
	s := r.guest.listenPacket(t, "udp4", "0.0.0.0:7000")
	go func() {
		b := make([]byte, 64<<10)
		for {
			n, from, err := s.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = s.WriteTo(append([]byte(from.String()+" "), b[:n]...), from)
		}
	}()
	r.wantState("udp 0.0.0.0:7000", "active")
	seen := map[string]bool{}
	for i := range 10 {
		c, err := r.outside.Dial("udp", "127.0.0.1:7000")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		text := fmt.Sprintf("client %d", i)
		b := make([]byte, 1024)
		r.eventually("an answer", func() error {
			_ = c.SetDeadline(time.Now().Add(500 * time.Millisecond))
			if _, err := io.WriteString(c, text); err != nil {
				return err
			}
			n, err := c.Read(b)
			if err != nil {
				return err
			}
			from, said, _ := strings.Cut(string(b[:n]), " ")
			if said != text {
				return fmt.Errorf("client %d got %q", i, said)
			}
			seen[from] = true
			return nil
		})
	}
	if len(seen) != 10 {
		t.Errorf("the server saw %d clients, want 10: each has a flow of its own", len(seen))
	}
}

func TestConflictNamesHolder(t *testing.T) {
	r := newRig(t)
	r.hostFlags = []string{"--keep-privileges"} // the holder, this process, has all capabilities
	r.start()
	taken := r.outside.listen(t, "tcp4", "127.0.0.1:7000")
	go echo.Serve(r.guest.listen(t, "tcp4", "0.0.0.0:7000"))
	r.wantState("tcp 0.0.0.0:7000", "conflict")
	r.eventually("the holder is named", func() error {
		if _, p := r.state("tcp 0.0.0.0:7000"); !strings.Contains(p.Reason, fmt.Sprint(os.Getpid())) {
			return fmt.Errorf("reason = %q, want the holder's pid %d in it", p.Reason, os.Getpid())
		}
		return nil
	})
	_ = taken.Close()
	r.wantState("tcp 0.0.0.0:7000", "active")
}

func TestRulesReloadResetsOnlyDeniedFlows(t *testing.T) {
	file := filepath.Join(t.TempDir(), "agent.yaml")
	write := func(s string) {
		t.Helper()
		// As editors do: a file that is written in place could be read while it is
		// empty.
		if err := errors.Join(os.WriteFile(file+".new", []byte(s), 0o600), os.Rename(file+".new", file)); err != nil {
			t.Fatal(err)
		}
	}
	write("rules: []\n")
	r := newRig(t, "--config", file).start()
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:7000"))
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:7001"))
	keep, cut := echoThrough(t, r, "127.0.0.1:7000"), echoThrough(t, r, "127.0.0.1:7001")

	write("rules:\n- {name: no, match: {ports: 7001}, action: deny}\n- {match: {ports: 7000}, action: allow, hostPort: 7100}\n")
	r.wantState("tcp 127.0.0.1:7001", "denied")
	r.eventually("the remapped port", func() error {
		_, p := r.state("tcp 127.0.0.1:7000")
		if len(p.HostAddresses) != 1 || p.HostAddresses[0].Port() != 7100 {
			return fmt.Errorf("at %v", p.HostAddresses)
		}
		return nil
	})
	if err := roundTrip(keep, "still"); err != nil {
		t.Error("a flow that is allowed was cut by a reload:", err)
	}
	r.eventually("a denied flow is cut", func() error {
		if roundTrip(cut, "x") == nil {
			return errors.New("it still answers")
		}
		return nil
	})

	write("rules:\n- {match: {prots: 1}, action: deny}\n")
	r.agent.Prints("agent.yaml:2:") // line and column
	if s, _ := r.state("tcp 127.0.0.1:7001"); s != "denied" {
		t.Errorf("after a bad file the port is %q, want the old rules to stand", s)
	}
	if err := roundTrip(keep, "still"); err != nil {
		t.Error("a flow was cut by a bad file:", err)
	}
}

func TestSocketsOfOtherNamespacesAreNotPublished(t *testing.T) {
	r := newRig(t).start()
	r.outside.listen(t, "tcp4", "127.0.0.1:7999")
	newSpace(t).listen(t, "tcp4", "127.0.0.1:7998")
	r.guest.listen(t, "tcp4", "127.0.0.1:7997")
	r.wantState("tcp 127.0.0.1:7997", "active")
	l, err := r.list()
	if err != nil {
		t.Fatal(err)
	}
	if got := shown(l); !slices.Equal(got, []string{"tcp 127.0.0.1:7997"}) {
		t.Errorf("published: %q", got)
	}
}

func TestOwnSocketsAreNotPublished(t *testing.T) {
	r := newRig(t, "--metrics-addr", "127.0.0.1:9111").start()
	r.guest.listen(t, "tcp4", "127.0.0.1:7000")
	r.wantState("tcp 127.0.0.1:7000", "active")
	if s, _ := r.state("tcp 127.0.0.1:9111"); s != "" {
		t.Errorf("the agent's own metrics port is published: %s", s)
	}
	r.eventually("the metrics", func() error {
		c, err := r.guest.Dial("tcp", "127.0.0.1:9111")
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, _ = io.WriteString(c, "GET /metrics HTTP/1.0\r\n\r\n")
		if b, err := io.ReadAll(c); !strings.Contains(string(b), "fairlead_publications{state=\"active\"} 1") {
			return fmt.Errorf("%.2000s, %w", b, err)
		}
		return nil
	})
}

func TestShortLivedListeners(t *testing.T) {
	r := newRig(t, "--hold-down", "0s").start()
	n := rounds.Of(t, "FAIRLEAD_SHORT", 10000)
	err := r.guest.Do(func() error {
		deadline := time.Now().Add(wait.Limit())
		for i := 0; i < n; i++ {
			l, err := net.Listen("tcp4", "127.0.0.1:7000")
			if errors.Is(err, syscall.EADDRINUSE) && time.Now().Before(deadline) {
				i-- // what was closed may linger while a dump looks at it
				continue
			}
			if err != nil {
				return err
			}
			_ = l.Close()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r.eventually("nothing is left", func() error {
		l, err := r.list()
		if err == nil && len(l.Publications) > 0 {
			err = fmt.Errorf("%d publications", len(l.Publications))
		}
		return err
	})
}

func TestWatch(t *testing.T) {
	r := newRig(t).start()
	r.guest.listen(t, "tcp4", "127.0.0.1:7000")
	r.wantState("tcp 127.0.0.1:7000", "active")
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit())
	defer cancel()
	var seen []string
	var l net.Listener
	err := status.NewClient(r.agentCtl).Watch(ctx, func(e status.Event) error {
		switch {
		case e.Type == status.Synced:
			l = r.guest.listen(t, "tcp4", "127.0.0.1:7001")
		case e.Publication != nil:
			line := fmt.Sprintf("%s %d %s", e.Type, e.Publication.Port, e.Publication.State)
			seen = append(seen, line)
			if e.Publication.Port == 7001 && e.Publication.State.String() == "active" && e.Type != status.Gone {
				_ = l.Close()
			}
			if e.Type == status.Gone {
				return io.EOF
			}
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		t.Fatal(err, seen)
	}
	isActive := func(s string) bool { return strings.HasSuffix(s, " 7001 active") }
	// A socket that takes long from bind(2) to listen(2) is denied at first. Once
	// active, it stays active until it is gone.
	i := slices.IndexFunc(seen, isActive)
	if seen[0] != "present 7000 active" || !strings.HasPrefix(seen[1], "added 7001 ") || i < 1 ||
		slices.ContainsFunc(seen[i:], func(s string) bool { return strings.Contains(s, " 7001 ") && !isActive(s) }) ||
		seen[len(seen)-1] != "removed 7001 active" {
		t.Errorf("events = %q", seen)
	}
}
