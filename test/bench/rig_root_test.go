// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package bench

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
	"github.com/fairlead/fairlead/test/kit/usage"
)

// roleVariable makes the test binary a program that a benchmark needs.
const roleVariable = "FAIRLEAD_BENCH_ROLE"

func TestMain(m *testing.M) {
	switch role := strings.Fields(os.Getenv(roleVariable)); {
	case len(role) == 0:
		os.Exit(m.Run())
	case role[0] == "hold": // what it was given
		time.Sleep(math.MaxInt64)
	case role[0] == "relay":
		fmt.Fprintln(os.Stderr, relay(role[1:]))
	default:
		fmt.Fprintln(os.Stderr, rawReader(role[1]))
	}
	os.Exit(1)
}

// built is the program, built once; the directory is left to the last benchmark.
var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "flb-")
	if err != nil {
		return "", err
	}
	root, err := program.Root()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "fairlead")
	build := exec.Command("go", "build", "-tags", "grpcnotrace", "-trimpath", "-ldflags", "-s -w", "-o", path, "./cmd/fairlead")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build: %w: %s", err, out)
	}
	return path, nil
})

func fairlead(b *testing.B) string {
	if path := os.Getenv(program.Variable); path != "" {
		return path
	}
	return must(built())(b)
}

// must returns a value if there was no error: must(f())(b).
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// short reports whether a benchmark only has to show that it works.
func short() bool { return os.Getenv("FAIRLEAD_BENCH") == "short" }

// of is how much is measured.
func of[T int | time.Duration](full, least T) T {
	if short() {
		return least
	}
	return full
}

// metrics gives a benchmark its values, without the time of an operation, which means nothing.
func metrics(b *testing.B, values map[string]float64) {
	b.ReportMetric(0, "ns/op")
	for unit, v := range values {
		b.ReportMetric(v, unit)
	}
}

// quantile sorts samples.
func quantile(samples []time.Duration, q float64) time.Duration {
	slices.Sort(samples)
	return samples[int(q*float64(len(samples)-1))]
}

// eventually calls f until it succeeds, far longer than anything takes on a busy machine.
func eventually(t testing.TB, pause time.Duration, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(pause) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatal(err)
}

// guest is an agent in a network namespace, and its host in another one.
type guest struct {
	b              *testing.B
	space, outside *netns.Space
	dir            string // with a path that is short enough for sockets
	agent, host    *program.Process
	peer           *peer // the other end of the link, instead of host
	fds            []int
}

func newGuest(b *testing.B) *guest {
	g := &guest{b: b, space: space(b), outside: space(b), dir: must(os.MkdirTemp("", "flb-"))(b)}
	b.Cleanup(func() {
		g.close()
		_ = os.RemoveAll(g.dir)
	})
	return g
}

func space(b *testing.B) *netns.Space {
	s := must(netns.New())(b)
	b.Cleanup(func() { _ = s.Close() })
	return s
}

func (g *guest) link() string               { return "unix://" + filepath.Join(g.dir, "link", "s") }
func (g *guest) control(side string) string { return filepath.Join(g.dir, side, "s") }

// run starts fairlead on a side.
func (g *guest) run(in *netns.Space, side string, flags ...string) *program.Process {
	cmd := exec.Command(fairlead(g.b), append([]string{side, "--link-token=", "--control", g.control(side), "--log-level", "error"}, flags...)...)
	// To the agent, cgroups above that of the benchmark do not exist: by their names its processes
	// could be taken for those of containers, whose engine is waited for.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWCGROUP}
	return program.Start(g.b, program.Command{Cmd: cmd, In: in, End: syscall.SIGTERM})
}

func (g *guest) startAgent(flags ...string) {
	g.agent = g.run(g.space, "agent", append([]string{"--link", g.link(), "--hold-down", "0s"}, flags...)...)
}

func (g *guest) startHost(flags ...string) {
	g.host = g.run(g.outside, "host", append([]string{"--connect", g.link()}, flags...)...)
}

// ready waits until the agent has synced.
func (g *guest) ready() {
	eventually(g.b, 20*time.Millisecond, func() error {
		l, err := status.NewClient(g.control("agent")).List(g.b.Context())
		if err == nil && !l.Ready() {
			err = errors.New("the agent has not synced")
		}
		return err
	})
}

// linked is a guest whose link this process holds.
func linked(b *testing.B) *guest {
	g := newGuest(b)
	g.startAgent()
	g.ready()
	g.peer = must(dialPeer(b, g.link()))(b)
	time.Sleep(500 * time.Millisecond) // what the start left to do
	return g
}

func (g *guest) close() {
	for _, fd := range g.fds {
		_ = unix.Close(fd)
	}
	g.fds = nil
}

// used is what a process has used so far.
func used(t testing.TB, p *program.Process) usage.Usage { return must(usage.Of(p.PID()))(t) }

// key is that of a listener at 127.0.0.1.
func key(p int) port.Key {
	return port.Key{Protocol: port.TCP, Address: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Port: uint16(p)}
}

// listen opens a listener by bare system calls: at 127.0.0.1, or a dual-stack one. It returns
// when listen(2) was called.
func listen(p int, dual bool) (fd int, at time.Time, err error) {
	family, address := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: p, Addr: [4]byte{127, 0, 0, 1}})
	if dual {
		family, address = unix.AF_INET6, &unix.SockaddrInet6{Port: p}
	}
	if fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return fd, at, err
	}
	if err = unix.Bind(fd, address); err == nil {
		at = time.Now()
		err = unix.Listen(fd, 8)
	}
	return fd, at, err
}

// open opens one listener in the guest.
func (g *guest) open(p int) (fd int, at time.Time) {
	check(g.b, g.space.Do(func() (err error) { fd, at, err = listen(p, false); return err }))
	return fd, at
}

// firstPort is the first port of fill. Those that engines use are below.
const firstPort = 11_000

// fill opens n listeners as fast as one thread can, and returns when the last one was opened.
func (g *guest) fill(from, n int, dual bool) (at time.Time) {
	check(g.b, g.space.Do(func() error {
		for i := range n {
			fd, opened, err := listen(from+i, dual)
			if err != nil {
				return fmt.Errorf("port %d: %w", from+i, err)
			}
			at, g.fds = opened, append(g.fds, fd)
		}
		return nil
	}))
	return at
}

// become is this program in a role.
func (g *guest) become(in *netns.Space, role string, files ...*os.File) *program.Process {
	cmd := exec.Command(must(os.Executable())(g.b))
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), roleVariable+"="+role), files
	return program.Start(g.b, program.Command{Cmd: cmd, Name: role, In: in})
}

// handOver makes another process hold the listeners.
func (g *guest) handOver() {
	var files []*os.File
	for _, fd := range g.fds {
		files = append(files, os.NewFile(uintptr(fd), "listener"))
	}
	g.become(g.space, "hold", files...)
	for _, f := range files {
		_ = f.Close()
	}
	g.fds = nil
}

// opens waits until the host peer listens at n ports.
func (g *guest) opens(n int) {
	eventually(g.b, 200*time.Millisecond, func() error {
		seen := 0
		for _, file := range []string{"tcp", "tcp6"} {
			text := must(os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", g.host.PID(), file)))(g.b)
			seen += strings.Count(string(text), " 0A ") // TCP_LISTEN
		}
		if g.host.Ended() {
			g.b.Fatal("the host peer has ended")
		}
		if seen < n {
			return fmt.Errorf("the host peer listens at %d ports, want %d", seen, n)
		}
		return nil
	})
}

// pause ends at a random moment after all is quiet.
func pause() { time.Sleep(5*time.Millisecond + rand.N(10*time.Millisecond)) }
