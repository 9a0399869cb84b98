// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/relay"
)

// listenerRig is a guest with the listener sink, a container behind it, and
// WSL's relay between it and the outside.
func listenerRig(t *testing.T, flags ...string) (r *rig, pod *space) {
	t.Helper()
	r = newRig(t, append([]string{"--sink", "listener", "--listener-settle", "100ms"}, flags...)...)
	pod = container(t, r.guest)
	r.startListening()
	return r, pod
}

// startListening starts the agent, with WSL's relay to the outside.
func (r *rig) startListening() {
	r.t.Helper()
	r.startAgent()
	r.eventually("the agent is ready", func() error {
		l, err := r.list()
		if err == nil && !l.Ready() {
			err = errors.New("not ready")
		}
		return err
	})
	wsl := &relay.Relay{Guest: r.guest.Space, Outside: r.outside.Space, Interval: 100 * time.Millisecond}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := wsl.Run(ctx); err != nil {
			r.t.Error(err)
		}
	})
	r.t.Cleanup(func() { cancel(); wg.Wait() })
}

const ruleTo8081 = `nft -f - <<'END'
table ip fl { chain pre { type nat hook prerouting priority -100; tcp dport 8081 dnat to 10.88.0.2:80; udp dport 8082 dnat to 10.88.0.2:80; }; }
END`

// throughRelay connects outside until somebody answers a line.
func (r *rig) throughRelay(addr, want string) {
	r.t.Helper()
	r.eventually("an answer through the relay", func() error {
		c, err := r.outside.Dial("tcp", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if _, err := io.WriteString(c, "hello\n"); err != nil {
			return err
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		b, err := io.ReadAll(c)
		if err == nil && string(b) != want {
			err = fmt.Errorf("answer %q, want %q", b, want)
		}
		return err
	})
}

// answer serves name after the client has ended its side: without half-close
// there is no answer.
func answer(l net.Listener, name string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			b, _ := io.ReadAll(c)
			_, _ = fmt.Fprintf(c, "%s got %s", name, b)
		}()
	}
}

// The incumbent's placeholders accept and close whatever reaches them.
func TestPlaceholderServesWhatReachesIt(t *testing.T) {
	r, pod := listenerRig(t)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	r.guest.sh(t, ruleTo8081)
	r.wantState("tcp 0.0.0.0:8081", "active")
	r.throughRelay("127.0.0.1:8081", "pod got hello\n")
	// UDP was not asked for, and that is said.
	r.wantState("udp 0.0.0.0:8082", "denied")
	r.eventually("the two rules and no socket of our own", func() error {
		l, err := r.list()
		if err == nil && len(l.Publications) != 2 {
			err = fmt.Errorf("publications %+v", l.Publications)
		}
		return err
	})
	r.eventually("doctor says how refused ports are seen", func() error { // it asks with limits of its own
		out, errs, _ := fairlead(t, "doctor", "--control", r.agentCtl)
		if !strings.Contains(out, "refused-port") {
			return errors.New(out + errs)
		}
		return nil
	})
	r.guest.sh(t, "nft delete table ip fl")
	r.wantState("tcp 0.0.0.0:8081", "")
	r.eventually("the port is closed", func() error { return probe.WantClosed(r.guest.dialer("127.0.0.1:8081")) })
}

func TestPlaceholderForUDP(t *testing.T) {
	r, pod := listenerRig(t, "--listener-udp")
	udp := pod.listenPacket(t, "udp4", "0.0.0.0:80")
	go echo.ServePackets(udp)
	r.guest.sh(t, ruleTo8081)
	r.wantState("udp 0.0.0.0:8082", "active")
	for range 3 { // each client has its own way back
		c, err := r.guest.Dial("udp", "127.0.0.1:8082")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		r.eventually("an answer", func() error { return roundTrip(c, "datagram") })
	}
}

// Where connections of an earlier server are left, the agent is refused a port before it
// gets it. It does not take that for another program, which it would release the port for.
func TestLeftConnectionsDoNotReleasePort(t *testing.T) {
	r, pod := listenerRig(t)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	for p := 8081; p < 8099; p++ {
		at := fmt.Sprintf("127.0.0.1:%d", p)
		l := r.guest.listen(t, "tcp4", at)
		client, err := r.guest.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		server, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = server.Close() // first, so that its end stays in TIME_WAIT
		_, _ = io.ReadAll(client)
		_ = client.Close()
		_ = l.Close()
	}
	r.guest.sh(t, `nft -f - <<'END'
table ip fl { chain pre { type nat hook prerouting priority -100; tcp dport 8081-8099 dnat to 10.88.0.2:80; }; }
END`)
	for p := 8081; p <= 8099; p++ {
		r.wantState(fmt.Sprintf("tcp 0.0.0.0:%d", p), "active")
	}
	// Refusals are reported in their order.
	if l, err := r.guest.Listen("tcp4", "127.0.0.1:8099"); err == nil {
		_ = l.Close()
	}
	r.agent.Prints("released a port for a program that wants it", "127.0.0.1:8099")
	if n := strings.Count(r.agent.Output(), "released a port"); n != 1 {
		t.Errorf("%d ports were released, want that of this test alone:\n%s", n, r.agent.Output())
	}
}

// A placeholder never takes a port from a real server, and yields it as soon as the
// agent sees that one wants it. The incumbent shares the port with it instead.
func TestServerTakesPlaceholderPort(t *testing.T) {
	r, pod := listenerRig(t)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	r.guest.sh(t, ruleTo8081)
	r.wantState("tcp 0.0.0.0:8081", "active")
	r.throughRelay("127.0.0.1:8081", "pod got hello\n")
	refused := 0
	var server net.Listener
	r.eventually("a server gets the port", func() error {
		l, err := r.guest.Listen("tcp4", "0.0.0.0:8081")
		if errors.Is(err, syscall.EADDRINUSE) {
			refused++
		}
		server = l
		return err
	})
	defer func() { _ = server.Close() }()
	t.Logf("refused %d times", refused)
	go answer(server, "server")
	for range 20 { // nobody else has the port
		r.throughRelay("127.0.0.1:8081", "server got hello\n")
	}
	r.wantState("tcp 0.0.0.0:8081", "active")
	r.eventually("two origins, the rule and the server", func() error {
		if _, p := r.state("tcp 0.0.0.0:8081"); len(p.Origins) != 2 {
			return fmt.Errorf("%+v", p.Origins)
		}
		return nil
	})
	// An agent that restarts leaves the port to the server.
	if code := r.agent.Stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	r.startAgent()
	r.wantState("tcp 0.0.0.0:8081", "active")
	r.throughRelay("127.0.0.1:8081", "server got hello\n")
}

func TestEarlierServerKeepsItsPort(t *testing.T) {
	r, pod := listenerRig(t)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	go answer(r.guest.listen(t, "tcp4", "127.0.0.1:8081"), "server")
	r.guest.sh(t, ruleTo8081)
	r.wantState("tcp 127.0.0.1:8081", "active")
	r.wantState("tcp 0.0.0.0:8081", "conflict")
	for range 20 {
		r.throughRelay("127.0.0.1:8081", "server got hello\n")
	}
}

// Nobody else can open a port that is bound, and the conflict names the holder. The
// program that bound it can still listen.
func TestBoundPortIsLeftToItsOwner(t *testing.T) {
	r, pod := listenerRig(t)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	fd := -1
	if err := r.guest.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrInet4{Port: 8081})
	}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	r.guest.sh(t, ruleTo8081)
	r.wantState("tcp 0.0.0.0:8081", "conflict")
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	r.eventually("the reason names who has it", func() error {
		if _, p := r.state("tcp 0.0.0.0:8081"); !strings.Contains(p.Reason, "in use by another socket") &&
			!strings.Contains(p.Reason, strings.TrimSpace(string(comm))) {
			return fmt.Errorf("reason %q: want it to name %s", p.Reason, comm)
		}
		return nil
	})
	time.Sleep(time.Second) // several attempts
	if err := unix.Listen(fd, 5); err != nil {
		t.Errorf("whoever bound the port cannot listen: %v", err)
	}
	r.wantState("tcp 0.0.0.0:8081", "active")
}

func TestSinksSideBySide(t *testing.T) {
	r := newRig(t, "--sink", "hostlink,listener", "--listener-settle", "100ms")
	pod := container(t, r.guest)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	r.start()
	r.guest.sh(t, ruleTo8081)
	r.eventually("both sinks have it", func() error {
		_, p := r.state("tcp 0.0.0.0:8081")
		states := map[string]port.State{}
		for _, o := range p.Outcomes {
			states[o.Sink] = o.State
		}
		if states["hostlink"] != port.Active || states["listener"] != port.Active {
			return fmt.Errorf("outcomes are %+v", p.Outcomes)
		}
		return nil
	})
	r.throughRelay("127.0.0.1:8081", "pod got hello\n") // over the link here
}

// The agent logs in one line which sinks it found, and uses them.
func TestAutoSinkSaysWhy(t *testing.T) {
	r := newRig(t, "--sink", "auto")
	r.start()
	r.guest.listen(t, "tcp4", "127.0.0.1:8083")
	r.wantState("tcp 127.0.0.1:8083", "active")
	r.agent.Prints("sinks chosen", "reason=")
	if n := strings.Count(r.agent.Output(), "sinks chosen"); n != 1 {
		t.Errorf("%d lines say which sinks were chosen", n)
	}
}

// A signal ends the agent gracefully, and an agent starts where a killed one left its
// sockets. The incumbent exits with status 1, ignores SIGINT, and fails on the socket
// that it left.
func TestSignalsAndStaleSockets(t *testing.T) {
	r := newRig(t)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGKILL} {
		r.startAgent()
		r.eventually("the agent answers", func() error { _, err := r.list(); return err })
		if code := r.agent.Stop(sig); sig != syscall.SIGKILL && code != 0 {
			t.Errorf("after %v exit code %d, want 0", sig, code)
		}
	}
	r.startAgent()
	r.eventually("the agent answers", func() error { _, err := r.list(); return err })
}
