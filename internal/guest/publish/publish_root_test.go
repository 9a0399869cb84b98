// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package publish

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/config/policy"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// containerVariable names the container that a process is in.
const containerVariable = "FAIRLEAD_TEST_CONTAINER"

// rig is an agent's server, and a container with a network namespace of its own.
type rig struct {
	t         testing.TB
	server    *Server
	socket    string
	container *netns.Space

	stop  func() // waits until the server has ended
	stale chan error

	mu       sync.Mutex
	bindings map[string]port.Binding
}

var testLimits = peer.Limits{Uses: 4, Connections: 16, Requests: 1000}

// everything lets the container "web" do all.
func everything() policy.Policy {
	all := []rules.PortRange{{First: 1, Last: 65535}}
	return policy.Policy{{Match: rules.Match{Name: "web"}, GuestPorts: all, HostPorts: all}}
}

func newRig(t testing.TB, p policy.Policy, limits peer.Limits) *rig {
	t.Helper()
	return newRigWith(t, p, limits, func(*rig) {}, nil)
}

// newRigWith calls prepare before the server runs, and before, unless it is nil, before the
// socket is waited for.
func newRigWith(t testing.TB, p policy.Policy, limits peer.Limits, prepare func(*rig), before func(*rig)) *rig {
	t.Helper()
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = space.Close() })
	r := &rig{t: t, container: space, stale: make(chan error, 1), socket: filepath.Join(t.TempDir(), "run", "publish.sock"), bindings: map[string]port.Binding{}}
	var f *forward.Server
	r.server = New(Options{
		Socket: r.socket, Policy: p, Limits: limits, Logger: slog.New(slog.DiscardHandler),
		Container: func([]string) (port.Owner, error) { return port.Owner{}, errors.New("not in a test") },
		Carry: func(ctx context.Context, conn net.Conn, pub port.Publication) error {
			return f.Carry(ctx, conn, pub)
		},
	})
	if f, err = forward.NewServer(forward.ServerOptions{Dial: r.server.Dial}); err != nil {
		t.Fatal(err)
	}
	r.server.peers.ContainerAt = ofEnvironment
	prepare(r)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.server.Run(ctx, r) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := wait.For(t, "the server to stop", done); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
		if len(r.bindings) > 0 || len(r.server.leases) > 0 {
			t.Errorf("left: %v, %v", r.bindings, r.server.leases)
		}
	})
	t.Cleanup(r.stop)
	if before != nil {
		before(r)
	}
	wait.Until(t, "the socket", func() error { _, err := os.Stat(r.socket); return err })
	return r
}

// An engine that starts before the agent makes a directory where it is to mount the socket.
// A container that has the directory mounted can put anything there. The agent goes on, and
// makes the socket when it can.
func TestSocketIsMadeLater(t *testing.T) {
	for _, c := range []struct {
		name string
		put  func(socket string) error
		want string
	}{
		{"directory", func(socket string) error { return os.Mkdir(socket, 0o700) }, "not a socket"},
		{"file", func(socket string) error { return os.WriteFile(socket, nil, 0o600) }, "not a socket"},
		{"link", func(socket string) error { return os.Symlink("/etc/passwd", socket) }, "not a socket"},
		{"listener of another process", func(socket string) error {
			l, err := net.Listen("unixpacket", socket)
			if err == nil {
				t.Cleanup(func() { _ = l.Close() })
			}
			return err
		}, "served by another process"},
		{"open directory", func(socket string) error { return os.Chmod(filepath.Dir(socket), 0o777) }, "others may write to it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRigWith(t, everything(), testLimits, func(r *rig) {
				if err := errors.Join(os.Mkdir(filepath.Dir(r.socket), 0o700), c.put(r.socket)); err != nil {
					t.Fatal(err)
				}
			}, func(r *rig) {
				if err := wait.For(t, "the source is stale", r.stale); !strings.Contains(err.Error(), c.want) {
					t.Errorf("stale for %v", err)
				}
				if err := errors.Join(os.RemoveAll(r.socket), os.Chmod(filepath.Dir(r.socket), 0o700)); err != nil {
					t.Fatal(err)
				}
			})
			_, n := guestServer(t)
			r.start(r.container, "web", fmt.Sprintf("hold %d %d", n, leasePort)).granted()
		})
	}
}

// ofEnvironment names the container of a process by its environment.
func ofEnvironment(dir int) (port.Owner, error) {
	b, err := cgroup.ReadAt(dir, "environ", 1<<20)
	if err != nil {
		return port.Owner{}, peer.ErrProcessEnded
	}
	for v := range bytes.SplitSeq(b, []byte{0}) {
		if name, ok := strings.CutPrefix(string(v), containerVariable+"="); ok {
			return port.Owner{Kind: port.OwnerContainer, Name: name, ID: name}, nil
		}
	}
	return port.Owner{}, peer.Refuse(peer.ReasonContainer, "no engine knows its container")
}

// Replace, Apply, Stale, Warn and Method implement registry.Feed.
func (r *rig) Replace([]port.Binding) {}
func (r *rig) Apply(c port.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range c.Drop {
		delete(r.bindings, o.ID)
	}
	for _, b := range c.Put {
		r.bindings[b.Origin.ID] = b
	}
}
func (r *rig) Stale(err error) {
	select {
	case r.stale <- err:
	default:
	}
}
func (r *rig) Warn([]string) {}
func (r *rig) Method(string) {}

func (r *rig) Lacks(port.Lack, string) {}

var _ registry.Feed = (*rig)(nil)

// published returns the only publication.
func (r *rig) published() (b port.Binding, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b = range r.bindings {
		ok = true
	}
	return b, ok && len(r.bindings) == 1
}

// process is a program in a container.
type process struct {
	*exec.Cmd
	out *bufio.Reader
	t   testing.TB
}

// start runs a role in a namespace. It is killed when the test ends.
func (r *rig) start(in *netns.Space, container, role string, inherited ...*os.File) *process {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	name, args, _ := strings.Cut(role, " ")
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), roleVariable+"="+name+" "+r.socket+" "+args)
	if container != "" {
		cmd.Env = append(cmd.Env, containerVariable+"="+container)
	}
	cmd.Stderr, cmd.ExtraFiles = os.Stderr, inherited
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = in.Start(cmd)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	p := &process{cmd, bufio.NewReader(out), r.t}
	r.t.Cleanup(p.kill)
	return p
}

func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait()
}

// line returns the next line that the program prints.
func (p *process) line() string {
	p.t.Helper()
	lines := make(chan string, 1)
	go func() {
		s, _ := p.out.ReadString('\n')
		lines <- strings.TrimSpace(s)
	}()
	return wait.For(p.t, "a line", lines)
}

func (p *process) granted() {
	p.t.Helper()
	if got := p.line(); got != "granted" {
		p.t.Fatalf("the client printed %q", got)
	}
}

// refusal returns the reason that the program prints.
func (p *process) refusal() peer.Refusal {
	p.t.Helper()
	line := p.line()
	var r peer.Refusal
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		p.t.Fatalf("the client printed %q", line)
	}
	return r
}

// guestServer listens on this machine's loopback, as a server of the guest.
func guestServer(t testing.TB) (*net.TCPListener, int) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.(*net.TCPListener), l.Addr().(*net.TCPAddr).Port
}

// server listens in the container.
func (r *rig) serverIn() (*net.TCPListener, int) {
	r.t.Helper()
	l, err := r.container.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = l.Close() })
	return l.(*net.TCPListener), l.Addr().(*net.TCPAddr).Port
}

// direction is one of the two ways.
type direction struct {
	name string
	// open makes a lease, and returns how to connect and where the connection arrives.
	open func(r *rig) (client *process, dial func() (net.Conn, error), server *net.TCPListener)
}

const leasePort = 4000

func directions() []direction {
	return []direction{
		{"to the guest", func(r *rig) (*process, func() (net.Conn, error), *net.TCPListener) {
			l, n := guestServer(r.t)
			p := r.start(r.container, "web", fmt.Sprintf("hold %d %d", n, leasePort))
			p.granted()
			return p, func() (net.Conn, error) { return r.container.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", leasePort)) }, l
		}},
		{"to the host", func(r *rig) (*process, func() (net.Conn, error), *net.TCPListener) {
			l, n := r.serverIn()
			p := r.start(r.container, "web", fmt.Sprintf("tohost %d %d", n, leasePort))
			p.granted()
			return p, r.fromHost, l
		}},
	}
}

// fromHost connects as the host does: over a flow that the agent serves.
func (r *rig) fromHost() (net.Conn, error) {
	b, ok := r.published()
	if !ok {
		return nil, syscall.ECONNREFUSED
	}
	front, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer front.Close()
	client, err := net.Dial("tcp4", front.Addr().String())
	if err != nil {
		return nil, err
	}
	conn, err := front.Accept()
	if err != nil {
		return nil, err
	}
	go func() {
		_ = r.server.opt.Carry(context.Background(), conn, port.Publication{Fact: port.Fact{Key: b.Key}, Dial: b.Dial})
	}()
	return client, nil
}

func pair(t testing.TB, dial func() (net.Conn, error), l *net.TCPListener) (client, server *net.TCPConn) {
	t.Helper()
	c, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = l.SetDeadline(time.Now().Add(wait.Limit()))
	s, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	for _, c := range []net.Conn{c, s} {
		_ = c.SetDeadline(time.Now().Add(wait.Limit()))
	}
	return c.(*net.TCPConn), s
}

// The two ends see what they would see of each other: bytes, the end of one direction, and
// resets.
func TestHalfCloseAndReset(t *testing.T) {
	for _, d := range directions() {
		t.Run(d.name, func(t *testing.T) {
			r := newRig(t, everything(), testLimits)
			_, dial, l := d.open(r)
			client, server := pair(t, dial, l)
			exchange(t, client, server)
			exchange(t, server, client)

			client, server = pair(t, dial, l)
			_, _ = client.Write([]byte("x"))
			_, _ = io.ReadFull(server, make([]byte, 1))
			forward.Reset(client)
			wantReset(t, server)

			client, server = pair(t, dial, l)
			_ = client.CloseWrite() // a reset after the end is passed on as well
			_, _ = io.ReadAll(server)
			forward.Reset(server)
			wantReset(t, client)
		})
	}
}

// exchange sends some bytes from a to b.
func exchange(t *testing.T, a, b *net.TCPConn) {
	t.Helper()
	if _, err := a.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 8)
	if _, err := io.ReadFull(b, buf); err != nil || string(buf) != "question" {
		t.Fatalf("%q, %v", buf, err)
	}
}

func wantReset(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v, want a reset", err)
	}
}

func TestHalfClose(t *testing.T) {
	for _, d := range directions() {
		t.Run(d.name, func(t *testing.T) {
			r := newRig(t, everything(), testLimits)
			_, dial, l := d.open(r)
			for _, first := range []string{"client", "server"} {
				a, b := pair(t, dial, l)
				if first == "server" {
					a, b = b, a
				}
				_, _ = a.Write([]byte("question"))
				_ = a.CloseWrite()
				if got, err := io.ReadAll(b); err != nil || string(got) != "question" {
					t.Errorf("%s first: %q, %v", first, got, err)
				}
				_, _ = b.Write([]byte("answer"))
				_ = b.Close()
				if got, err := io.ReadAll(a); err != nil || string(got) != "answer" {
					t.Errorf("%s first: %q, %v", first, got, err)
				}
			}
		})
	}
}

// A reader that is late and slow gets all bytes, and nothing is kept in memory meanwhile.
func TestSlowReader(t *testing.T) {
	const size = 64 << 20
	for _, d := range directions() {
		for _, upload := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, upload %v", d.name, upload), func(t *testing.T) {
				r := newRig(t, everything(), testLimits)
				_, dial, l := d.open(r)
				from, to := pair(t, dial, l)
				if !upload {
					from, to = to, from
				}
				sent := make(chan []byte, 1)
				go func() {
					h := sha256.New()
					src := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), h)
					_, _ = io.Copy(struct{ io.Writer }{from}, src)
					_ = from.CloseWrite()
					sent <- h.Sum(nil)
				}()
				time.Sleep(50 * time.Millisecond) // the reader is late: buffers fill
				h := sha256.New()
				n, err := io.Copy(h, &slowly{r: to})
				if err != nil || n != size || !bytes.Equal(h.Sum(nil), wait.For(t, "the writer", sent)) {
					t.Errorf("%d bytes, %v; want %d with the same hash", n, err, size)
				}
			})
		}
	}
}

// slowly pauses after each MiB.
type slowly struct {
	r    io.Reader
	read int
}

func (s *slowly) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if s.read += n; s.read >= 1<<20 {
		s.read = 0
		time.Sleep(time.Millisecond)
	}
	return n, err
}

// All that a request can be refused for, each with its reason.
func TestRefused(t *testing.T) {
	ours, _ := guestServer(t)
	ourFile, err := ours.File()
	if err != nil {
		t.Fatal(err)
	}
	defer ourFile.Close()
	third, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	foreign, err := third.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	foreignFile, err := foreign.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer foreignFile.Close()

	some := policy.Policy{
		{Match: rules.Match{Name: "web"}, GuestPorts: []rules.PortRange{{First: 80, Last: 81}}, HostPorts: []rules.PortRange{{First: 3000, Last: 3000}}},
		{Match: rules.Match{Name: "other"}, GuestPorts: []rules.PortRange{{First: 1, Last: 65535}}},
	}
	r := newRig(t, some, testLimits)
	for _, c := range []struct {
		name, container, role string
		inherited             *os.File
		want                  peer.Reason
	}{
		{"a process in no container", "", "hold 80", nil, peer.ReasonContainer},
		{"a container without an entry", "db", "hold 80", nil, peer.ReasonPolicy},
		{"a port of the guest that is not allowed", "web", "hold 82", nil, peer.ReasonPolicy},
		{"a port of the host that is not allowed", "web", "tohost 80 3001", nil, peer.ReasonPolicy},
		{"a port of the host of one that may reach the guest", "other", "tohost 80 80", nil, peer.ReasonPolicy},
		{"port 0", "web", "none 0", nil, peer.ReasonRequest},
		{"UDP", "web", "udp 80", nil, peer.ReasonDescriptor},
		{"a socket that does not listen", "web", "unlistened 80", nil, peer.ReasonDescriptor},
		{"a listener on all addresses", "web", "wildcard 80", nil, peer.ReasonDescriptor},
		{"a file", "web", "file 80", nil, peer.ReasonDescriptor},
		{"a unix socket", "web", "unix 80", nil, peer.ReasonDescriptor},
		{"no descriptor", "web", "none 80", nil, peer.ReasonDescriptor},
		{"two descriptors", "web", "two 80", nil, peer.ReasonDescriptor},
		{"a hundred descriptors", "web", "many 80", nil, peer.ReasonDescriptor},
		{"a listener of the agent's namespace", "web", "inherited 80", ourFile, peer.ReasonNamespace},
		{"a listener of a third namespace", "web", "inherited 80", foreignFile, peer.ReasonNamespace},
		{"a wrong nonce", "web", "nonce", nil, peer.ReasonRequest},
		{"a request of another process", "web", "other", nil, peer.ReasonContainer},
		{"no JSON", "web", "garbage {", nil, peer.ReasonRequest},
		{"a message that is too long", "web", "garbage " + strings.Repeat("x", 4096+1), nil, peer.ReasonRequest},
		{"an answer to no question", "web", "unasked 3000", nil, peer.ReasonRequest},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &rig{t: t, server: r.server, socket: r.socket, container: r.container}
			var files []*os.File
			if c.inherited != nil {
				files = append(files, c.inherited)
			}
			p := r.start(r.container, c.container, c.role, files...)
			if strings.HasPrefix(c.role, "unasked") {
				p.granted()
			}
			if got := p.refusal(); got.Reason != c.want {
				t.Errorf("refused for %v, want %s", got, c.want)
			}
		})
	}
}

// A container with the guest's own network is refused in both directions.
func TestRefusedInTheGuestsNetwork(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	here, err := netns.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	for _, role := range []string{"hold 80 0", "tohost 80 80"} {
		if got := r.start(here, "web", role).refusal(); got.Reason != peer.ReasonNamespace {
			t.Errorf("%s: %v", role, got)
		}
	}
}

func TestMPTCP(t *testing.T) {
	if fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP); err == nil {
		_ = unix.Close(fd)
	} else if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.EINVAL) {
		t.Logf("this kernel has no MPTCP: %v", err)
		return
	}
	r := newRig(t, everything(), testLimits)
	l, n := guestServer(t)
	r.start(r.container, "web", fmt.Sprintf("mptcp %d %d", n, leasePort)).granted()
	client, server := pair(t, func() (net.Conn, error) {
		return r.container.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", leasePort))
	}, l)
	exchange(t, client, server)
}

// kill -9 of the client frees the port and its connections.
func TestKilledClient(t *testing.T) {
	for _, d := range directions() {
		t.Run(d.name, func(t *testing.T) {
			r := newRig(t, everything(), testLimits)
			p, dial, l := d.open(r)
			client, server := pair(t, dial, l)
			p.kill()
			wantReset(t, client)
			wantReset(t, server)
			wait.Until(t, "the port is closed", func() error {
				c, err := dial()
				if err == nil {
					_ = c.Close()
					return errors.New("it is open")
				}
				return nil
			})
		})
	}
}

// A client that keeps its listener in another process, and makes it blocking, loses it all
// the same when it goes.
func TestBlockingListenerIsFreed(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	_, n := guestServer(t)
	p := r.start(r.container, "web", fmt.Sprintf("blocking %d %d", n, leasePort))
	pid, err := strconv.Atoi(strings.TrimPrefix(p.line(), "keeper "))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	p.granted()
	at := fmt.Sprintf("127.0.0.1:%d", leasePort)
	c, err := r.container.Dial("tcp4", at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = p.Process.Kill()
	wait.Until(t, "the port is closed", func() error {
		c, err := r.container.Dial("tcp4", at)
		if err == nil {
			_ = c.Close()
			return errors.New("it is open")
		}
		return nil
	})
}

// A client that listens again after each shutdown cannot keep an accept of the agent blocked.
func TestListensAgain(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	_, n := guestServer(t)
	p := r.start(r.container, "web", fmt.Sprintf("relisten %d %d", n, leasePort))
	p.granted()
	if got := p.line(); got != "closed" {
		t.Fatalf("the client printed %q", got)
	}
	wait.Until(t, "the lease ends", func() error { return r.idle("web") })
	r.stop()
}

// idle returns nil if a container uses nothing.
func (r *rig) idle(container string) error {
	if uses, connections := r.server.peers.Tenants.Usage(container); uses+connections > 0 {
		return fmt.Errorf("%d requests, %d connections", uses, connections)
	}
	return nil
}

// What a policy does not allow any more ends, with its connections, and is refused when it is
// asked for again. The rest goes on.
func TestLeaseEndsWithItsRight(t *testing.T) {
	for _, d := range directions() {
		t.Run(d.name, func(t *testing.T) {
			r := newRigWith(t, everything(), testLimits, func(r *rig) { r.server.peers.Check = time.Millisecond }, nil)
			p, dial, server := d.open(r)
			conn, err := dial()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			there, err := server.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer there.Close()
			number := uint16(server.Addr().(*net.TCPAddr).Port)
			only := func(guest, host uint16) policy.Policy {
				return policy.Policy{{
					Match:      rules.Match{Name: "web"},
					GuestPorts: []rules.PortRange{{First: guest, Last: guest}}, HostPorts: []rules.PortRange{{First: host, Last: host}},
				}}
			}
			r.server.SetPolicy(only(number, leasePort))
			time.Sleep(20 * time.Millisecond) // some looks at it
			if _, err := io.WriteString(conn, "x"); err != nil {
				t.Error(err)
			}
			if _, err := io.ReadFull(there, make([]byte, 1)); err != nil {
				t.Errorf("a lease that is still allowed: %v", err)
			}
			r.server.SetPolicy(only(1, 1))
			if got := p.refusal(); got.Reason != peer.ReasonPolicy {
				t.Errorf("the lease ended for %v", got)
			}
			if _, err := conn.Read(make([]byte, 1)); err == nil {
				t.Error("its connection goes on")
			}
			wait.Until(t, "nothing is left", func() error { return r.idle("web") })
			for _, role := range []string{fmt.Sprintf("hold %d %d", number, leasePort), fmt.Sprintf("tohost %d %d", number, leasePort)} {
				if got := r.start(r.container, "web", role).refusal(); got.Reason != peer.ReasonPolicy {
					t.Errorf("%s: %v", role, got)
				}
			}
		})
	}
}

// A lease ends with the process that asked for it, also where another one has the connection.
func TestLeaseEndsWithItsProcess(t *testing.T) {
	r := newRigWith(t, everything(), testLimits, func(r *rig) { r.server.peers.Check = time.Millisecond }, nil)
	p := r.start(r.container, "web", "handsover 4000")
	pid, err := strconv.Atoi(strings.TrimPrefix(p.line(), "keeper "))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	p.granted()
	p.kill()
	wait.Until(t, "the lease ends", func() error { return r.idle("web") })
}

// A lease ends when its process changes its container, but not while no engine names that.
func TestLeaseEndsWithItsContainer(t *testing.T) {
	var now atomic.Pointer[port.Owner]
	asked := make(chan struct{}, 100)
	r := newRigWith(t, everything(), testLimits, func(r *rig) {
		r.server.peers.Check = time.Millisecond
		r.server.peers.ContainerAt = func(int) (port.Owner, error) {
			select {
			case asked <- struct{}{}:
			default:
			}
			if o := now.Load(); o != nil {
				return *o, nil
			}
			return port.Owner{}, peer.Refuse(peer.ReasonContainer, "no engine knows its container")
		}
		now.Store(&port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "web"})
	}, nil)
	p := r.start(r.container, "web", "tohost 1 4000")
	p.granted()
	for _, o := range []*port.Owner{{Kind: port.OwnerContainer, Name: "web", ID: "in another engine"}, nil} {
		now.Store(o)
		for len(asked) > 0 {
			<-asked
		}
		for range 5 {
			wait.For(t, "a look at the process", asked)
		}
	}
	if _, ok := r.published(); !ok {
		t.Error("the lease ended while no engine, or another one, named the container")
	}
	now.Store(&port.Owner{Kind: port.OwnerContainer, Name: "another", ID: "another"})
	if got := p.refusal(); got.Reason != peer.ReasonContainer {
		t.Errorf("the lease ended for %v", got)
	}
	// The policy has no entry for the container's new name.
	now.Store(&port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "web"})
	p = r.start(r.container, "web", "tohost 1 4000")
	p.granted()
	now.Store(&port.Owner{Kind: port.OwnerContainer, Name: "renamed", ID: "web"})
	if got := p.refusal(); got.Reason != peer.ReasonPolicy {
		t.Errorf("the lease of a renamed container ended for %v", got)
	}
}

// A lack of descriptors fails the one connection, and ends no lease.
func TestLackOfDescriptors(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	l, n := r.serverIn()
	r.start(r.container, "web", fmt.Sprintf("tohost %d %d", n, leasePort)).granted()
	b, _ := r.published()
	dial := func() (net.Conn, error) { return r.server.Dial(t.Context(), "tcp", b.Dial[0]) }
	restore := noDescriptors(t)
	_, derr := dial()
	restore()
	if !errors.Is(derr, own.ErrDescriptors) {
		t.Errorf("dial: %v", derr)
	}
	if lost, err := l.Accept(); err == nil { // the one that the agent could not have
		_ = lost.Close()
	}
	a, c := pair(t, func() (net.Conn, error) {
		conn, err := dial()
		if err != nil {
			return nil, err
		}
		return conn.(*passed).TCPConn, nil
	}, l)
	exchange(t, a, c)
}

// noDescriptors leaves this process no descriptor until restore is called.
func noDescriptors(t *testing.T) (restore func()) {
	t.Helper()
	var limit unix.Rlimit
	free, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Close(free), unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	}
	if err == nil {
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(free), Max: limit.Max})
	}
	if err != nil {
		t.Fatal(err)
	}
	restore = sync.OnceFunc(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) })
	t.Cleanup(restore)
	return restore
}

// The container's server is away, or its client lies or does not answer: the host's
// connection is refused or reset, and the agent has no descriptor left of it.
func TestClientsThatDoNotConnect(t *testing.T) {
	ours, _ := guestServer(t)
	conn, err := net.Dial("tcp4", ours.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	f, err := conn.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, c := range []struct {
		role string
		want peer.Reason // for which the lease ends
	}{
		{"tohost 1 4000", ""},
		{"liar 4000", peer.ReasonNamespace},
		{"delegates 4000", peer.ReasonContainer},
		{"mute 4000", ""},
	} {
		t.Run(c.role, func(t *testing.T) {
			r := newRig(t, everything(), testLimits)
			p := r.start(r.container, "web", c.role, f)
			p.granted()
			b, _ := r.published()
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if c.want != "" || c.role[0] == 't' {
				ctx = t.Context()
			}
			got, err := r.server.Dial(ctx, "tcp", b.Dial[0])
			if err == nil {
				t.Fatalf("connected to %v", got.RemoteAddr())
			}
			if c.role[0] == 't' && !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("error %v, want a refusal", err)
			}
			if c.want != "" {
				if got := p.refusal(); got.Reason != c.want {
					t.Errorf("the lease ended for %v, want %s", got, c.want)
				}
			}
		})
	}
}

// What the host asks for is dialled at no other container, and not after the lease.
func TestDialAfterTheLease(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	_, n := r.serverIn()
	p := r.start(r.container, "web", fmt.Sprintf("tohost %d %d", n, leasePort))
	p.granted()
	b, _ := r.published()
	if b.Owner.Name != "web" || !Targets.Contains(b.Address) || b.Port != leasePort {
		t.Errorf("published %+v", b)
	}
	for _, target := range []netip.AddrPort{
		netip.AddrPortFrom(b.Dial[0].Addr().Next(), leasePort), netip.AddrPortFrom(b.Dial[0].Addr(), leasePort+1),
	} {
		if _, err := r.server.Dial(t.Context(), "tcp", target); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("dial %v: %v", target, err)
		}
	}
	if _, err := r.server.Dial(t.Context(), "udp", b.Dial[0]); err == nil {
		t.Error("UDP was dialled")
	}
	p.kill()
	wait.Until(t, "withdrawn", func() error {
		if _, ok := r.published(); ok {
			return errors.New("still published")
		}
		return nil
	})
	if _, err := r.server.Dial(t.Context(), "tcp", b.Dial[0]); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after the lease: %v", err)
	}
}

// One container cannot have more than its limits, and what it has does not count for others.
func TestLimits(t *testing.T) {
	p := everything()
	p = append(p, policy.Entry{Match: rules.Match{Name: "other"}, GuestPorts: p[0].GuestPorts})
	r := newRig(t, p, peer.Limits{Uses: 2, Connections: 3, Requests: 1000})
	l, n := guestServer(t)
	r.start(r.container, "web", fmt.Sprintf("hold %d %d", n, leasePort)).granted()
	r.start(r.container, "web", fmt.Sprintf("hold %d %d", n, leasePort+1)).granted()
	if got := r.start(r.container, "web", fmt.Sprintf("hold %d %d", n, leasePort+2)).refusal(); got.Reason != peer.ReasonLimit {
		t.Errorf("a third port: %v", got)
	}
	r.start(r.container, "other", fmt.Sprintf("hold %d %d", n, leasePort+3)).granted()

	dial := func() (net.Conn, error) { return r.container.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", leasePort)) }
	for range 3 {
		pair(t, dial, l)
	}
	if err := probe.Want(probe.Reset, dial, ""); err != nil {
		t.Error(err)
	}
}

// A client beyond the maximum of all containers together is refused, and another one gets its
// place when it goes.
func TestTooManyClients(t *testing.T) {
	r := newRigWith(t, everything(), testLimits, func(r *rig) { r.server.peers.MaxClients = 2 }, nil)
	first := r.start(r.container, "web", "silent")
	first.granted()
	r.start(r.container, "web", "silent").granted()
	if got := r.start(r.container, "web", "silent").refusal(); got.Reason != peer.ReasonLimit || !strings.Contains(got.Message, "clients") {
		t.Errorf("refused for %v", got)
	}
	first.kill()
	wait.Until(t, "its place", func() error {
		c := r.start(r.container, "web", "tohost 1 4000")
		if got := c.line(); got != "granted" {
			return errors.New(got)
		}
		return nil
	})
}

// A connection that did not come to the container's loopback is reset: a client can bind its
// listener again after it was checked.
func TestListenerOnAnotherAddress(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	const address = "192.0.2.1"
	cmd := exec.Command("ip", "address", "add", address+"/32", "dev", "lo")
	if err := errors.Join(r.container.Start(cmd), cmd.Wait()); err != nil {
		t.Fatal(err)
	}
	everywhere, err := r.container.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	server, n := guestServer(t)
	conn, _ := packets(t)
	charged, err := r.server.peers.Tenants.Enter("web")
	if err != nil {
		t.Fatal(err)
	}
	l := lease{s: r.server, Conn: &peer.Conn{UnixConn: conn, Tenant: charged}, request: request{Port: uint16(n)}}
	served, all := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(all)
		l.acceptAll(t.Context(), everywhere, served)
	}()
	defer func() {
		_ = everywhere.Close()
		wait.For(t, "the end", all)
	}()
	dialer := func(ip string) func() (net.Conn, error) {
		at := net.JoinHostPort(ip, strconv.Itoa(everywhere.Addr().(*net.TCPAddr).Port))
		return func() (net.Conn, error) { return r.container.Dial("tcp4", at) }
	}
	if err := probe.Want(probe.Reset, dialer(address), ""); err != nil {
		t.Error(err)
	}
	a, b := pair(t, dialer("127.0.0.1"), server)
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// A container that asks again and again is refused, and another one is served meanwhile.
func TestFloodOfRequests(t *testing.T) {
	p := everything()
	p = append(p, policy.Entry{Match: rules.Match{Name: "flood"}, GuestPorts: p[0].GuestPorts})
	r := newRigWith(t, p, peer.Limits{Uses: 4, Connections: 4, Requests: 10}, func(r *rig) {
		r.server.peers.Arrivals = rate.NewLimiter(rate.Inf, 1) // only the container's own limit counts
	}, nil)
	n := rounds.Of(t, "FAIRLEAD_PUBLISH_FLOOD", 2000)
	flood := r.start(r.container, "flood", "flood "+strconv.Itoa(n))
	_, number := guestServer(t)
	r.start(r.container, "web", fmt.Sprintf("hold %d %d", number, leasePort)).granted()
	if limited, err := strconv.Atoi(flood.line()); err != nil || limited < n/2 {
		t.Errorf("%d of %d were refused for the limit, %v", limited, n, err)
	}
}

// A container that no entry names, or a process in none, costs the agent no more than a
// bounded number of look-ups in a second, and another container is served meanwhile.
func TestFloodOfTheUnlisted(t *testing.T) {
	const perSecond, burst = 100, 10
	var asked atomic.Int64
	r := newRigWith(t, everything(), testLimits, func(r *rig) {
		r.server.peers.Arrivals = rate.NewLimiter(perSecond, burst)
		r.server.peers.ContainerAt = func(dir int) (port.Owner, error) {
			asked.Add(1)
			return ofEnvironment(dir)
		}
	}, nil)
	start := time.Now()
	floods := []*process{r.start(r.container, "unlisted", "flood 100"), r.start(r.container, "", "flood 100")}
	_, number := guestServer(t)
	r.start(r.container, "web", fmt.Sprintf("hold %d %d", number, leasePort)).granted()
	for _, f := range floods {
		f.line()
	}
	// Each is asked for once, but the one that was granted twice.
	if got, most := asked.Load(), burst+int64(perSecond*time.Since(start).Seconds())+2; got > most {
		t.Errorf("%d look-ups, want at most %d", got, most)
	}
}

// Clients that end at any moment, and whole leases, leave no descriptor behind.
func TestCyclesLeaveNoDescriptor(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	l, n := guestServer(t)
	_, inside := r.serverIn()
	before := 0
	cycles := rounds.Of(t, "FAIRLEAD_PUBLISH_CYCLES", 30)
	for i := range cycles {
		switch i % 3 {
		case 0:
			p := r.start(r.container, "web", fmt.Sprintf("hold %d %d", n, leasePort))
			p.granted()
			c, err := r.container.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", leasePort))
			if err != nil {
				t.Fatal(err)
			}
			s, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			p.kill()
			_, _ = c.Close(), s.Close()
		case 1:
			p := r.start(r.container, "web", fmt.Sprintf("tohost %d %d", inside, leasePort))
			p.granted()
			b, _ := r.published()
			c, err := r.server.Dial(t.Context(), "tcp", b.Dial[0])
			if err != nil {
				t.Fatal(err)
			}
			p.kill()
			_ = c.Close()
		case 2:
			_ = r.start(r.container, "web", "early").Wait()
		}
		wait.Until(t, "the lease ends", func() error { return r.idle("web") })
		if i == 5 {
			before = len(descriptors(t))
		}
	}
	wait.Until(t, "the descriptors are closed", func() error {
		if now := descriptors(t); len(now) > before {
			return fmt.Errorf("%d were open, now %q", before, now)
		}
		return nil
	})
}

func descriptors(t testing.TB) (list []string) {
	t.Helper()
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range dir {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			list = append(list, to)
		}
	}
	slices.Sort(list)
	return list
}

// An agent that stops tells its clients, which end.
func TestAgentStops(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	_, n := r.serverIn()
	clients := []*process{
		r.start(r.container, "web", fmt.Sprintf("tohost %d %d", n, leasePort)),
		r.start(r.container, "web", fmt.Sprintf("hold %d %d", n, leasePort)),
		r.start(r.container, "web", "silent"),
	}
	for _, c := range clients {
		c.granted()
	}
	r.stop()
	for _, c := range clients {
		if got := c.refusal(); got.Reason != peer.ReasonStopping {
			t.Errorf("the client printed %v", got)
		}
	}
}

// Connections that block close(2) keep no other client from a lease, and the agent from no
// stop, whoever passes them.
func TestLingeringClients(t *testing.T) {
	r := newRig(t, everything(), testLimits)
	for _, container := range []string{"web", "unlisted", ""} {
		r.start(r.container, container, "lingers").granted()
	}
	_, n := guestServer(t)
	wait.Until(t, "the clients are refused", func() error { return r.idle("web") })
	r.start(r.container, "web", fmt.Sprintf("hold %d %d", n, leasePort)).granted()
	r.stop()
}
