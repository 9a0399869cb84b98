// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/guest/source/socket"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// serverVariable makes TestServerProcess a server: it says its address and ends
// with its input.
const serverVariable = "FAIRLEAD_TEST_SERVER"

// TestServerProcess is the process that the test below starts.
func TestServerProcess(t *testing.T) {
	if os.Getenv(serverVariable) == "" {
		return
	}
	in := bufio.NewReader(os.Stdin)
	_, _ = in.ReadString('\n') // it is in its cgroup now
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println(l.Addr())
	_, _ = io.Copy(io.Discard, in)
	_ = l.Close()
}

// mountOf returns where the unified hierarchy is, or that of the process numbers in cgroup v1;
// "" if this machine has none.
func mountOf(t *testing.T, v2 bool) string {
	t.Helper()
	if !v2 {
		return mountOfController(t, "pids")
	}
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	whole, _, err := cgroup.Mounts(f)
	if err != nil || len(whole) == 0 {
		t.Fatalf("cgroup2 is not mounted (%v): mount -t cgroup2 none /sys/fs/cgroup", err)
	}
	return whole[0]
}

// mountOfController returns where the hierarchy of cgroup v1 is that has a controller, or "".
func mountOfController(t *testing.T, name string) string {
	t.Helper()
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		left, right, _ := strings.Cut(s.Text(), " - ")
		if fields := strings.Fields(left); strings.HasPrefix(right, "cgroup ") && strings.HasSuffix(right, ","+name) && fields[3] == "/" {
			return fields[4]
		}
	}
	return ""
}

// makeCgroup makes a cgroup that goes with the test, below others that may be there.
func makeCgroup(t *testing.T, mount string, names ...string) string {
	t.Helper()
	dir := mount
	for _, n := range names {
		dir = filepath.Join(dir, n)
		dir := dir // the outer one goes on
		if err := os.Mkdir(dir, 0o755); errors.Is(err, os.ErrExist) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			wait.Until(t, "a process that has just ended leaves the cgroup", func() error {
				if err := os.Remove(dir); !errors.Is(err, os.ErrNotExist) {
					return err
				}
				return nil
			})
		})
	}
	return dir
}

// server is a process that listens in cgroups.
type server struct {
	pid  int
	addr string
}

func startServer(t *testing.T, space *netns.Space, dirs ...string) server {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestServerProcess$")
	cmd.Env = append(os.Environ(), serverVariable+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := space.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	pid := strconv.Itoa(cmd.Process.Pid)
	for _, dir := range dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(pid), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := io.WriteString(in, "\n"); err != nil {
		t.Fatal(err)
	}
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return server{cmd.Process.Pid, strings.TrimSpace(addr)}
}

// waitOwner waits until the port at addr has an owner with that name.
func waitOwner(t *testing.T, r *registry.Registry, addr, name string) (found port.Publication) {
	t.Helper()
	wait.Until(t, fmt.Sprintf("%s is owned by %q", addr, name), func() error {
		for k, p := range r.Publications().View().All() {
			if k.AddrPort().String() == addr && p.Owner.Name == name {
				found = p
				return nil
			}
		}
		return fmt.Errorf("there is %+v", r.Publications().View())
	})
	return found
}

// A container in the host's network has no port of its own to declare: its
// sockets are known by their cgroup alone.
func TestProcessAttributedByCgroup(t *testing.T) {
	comm := filepath.Base(os.Args[0])
	comm = comm[:min(len(comm), 15)]
	for _, mode := range []observer.Mode{observer.Auto, observer.Poll} {
		for _, v2 := range []bool{true, false} {
			mount := mountOf(t, v2)
			if mount == "" {
				continue // a kernel without cgroup v1
			}
			t.Run(fmt.Sprintf("%v, unified %v", mode, v2), func(t *testing.T) {
				id := strings.Repeat(fmt.Sprintf("%08x", os.Getpid()), 8)
				space, err := netns.New()
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = space.Close() })
				dir := makeCgroup(t, mount, "fairlead-test-"+strconv.Itoa(os.Getpid()), "docker-"+id+".scope", "inner")

				log := slog.New(slog.DiscardHandler)
				docker := new(engine.Table)
				r := registry.New(registry.Options{Rules: rules.Empty(rules.Loopback()), Logger: log})
				r.AddFacts("docker", docker)
				o, err := observer.New(observer.Options{Mode: mode, Interval: 50 * time.Millisecond, Logger: log})
				if err != nil {
					t.Fatal(err)
				}
				source, err := socket.New(socket.Options{Observer: o, Own: func(uint64) bool { return false }, Logger: log})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan error, 1)
				feed := r.Feed(source.Name())
				go func() { done <- space.Do(func() error { return source.Run(ctx, feed) }) }()
				t.Cleanup(func() {
					cancel()
					if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
				})
				select {
				case <-r.Ready():
				case err := <-done:
					done <- nil
					t.Fatal(err)
				case <-time.After(10 * time.Minute):
					t.Fatal("no first set")
				}

				s := startServer(t, space, dir)
				p := waitOwner(t, r, s.addr, comm)
				exe, _ := os.Executable()
				if want := fmt.Sprintf("pid %d (%s), %s", s.pid, comm, exe); p.Origins[0].Detail.String() != want || p.Owner.Kind != port.OwnerProcess {
					t.Errorf("detail = %q, owner %+v, want %q", p.Origins[0].Detail, p.Owner, want)
				}
				// What the engine tells: an id, and its first process.
				fact := engine.Fact{Owner: port.Owner{Kind: port.OwnerContainer, ID: id, Name: "web"}, ID: id}
				docker.Put("web", fact)
				waitOwner(t, r, s.addr, "web")
				docker.Remove("web")
				waitOwner(t, r, s.addr, comm)

				var ok bool
				if fact.Path, fact.Cgroup, ok = (engine.Host{}).Cgroup(s.pid, 0, id); !ok || v2 && fact.Cgroup == 0 {
					t.Fatalf("the cgroup of process %d is not known: %+v", s.pid, fact)
				}
				fact.ID, fact.Owner.Name = "", "by its cgroup"
				docker.Put("web", fact)
				waitOwner(t, r, s.addr, "by its cgroup")
				// A process that comes later is in the same cgroup; one elsewhere is not.
				waitOwner(t, r, startServer(t, space, dir).addr, "by its cgroup")
				waitOwner(t, r, startServer(t, space, mount).addr, comm)
			})
		}
	}
}

// listening is a handler that waits for the socket of a process.
type listening struct {
	method string // of TCP listeners
	ready  chan struct{}
	found  chan observer.Socket
}

func (l *listening) Methods(all []kernel.Method) {
	for _, m := range all {
		if m.Capability == observer.TCPListen {
			l.method = m.Name
		}
	}
}

func (l *listening) Replace([]observer.Socket) {
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

func (l *listening) Stale(error) {}
func (l *listening) Apply(all []observer.Event) {
	for _, e := range all {
		if !e.Gone && e.Socket.Listening {
			l.found <- e.Socket
		}
	}
}

// receive returns what arrives.
func receive[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(wait.Limit()):
		t.Fatal("nothing arrived")
	}
	return v
}

// The cgroup of a process in cgroup v1 comes with the event, unless it is in different ones.
func TestProcessCgroupComesWithEvent(t *testing.T) {
	var mounts []string
	for _, controller := range []string{"memory", "pids"} {
		if m := mountOfController(t, controller); m != "" { // Debian's 6.12 has no cgroup v1 of memory
			mounts = append(mounts, m)
		}
	}
	if len(mounts) == 0 {
		return // a machine without cgroup v1
	}
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = space.Close() })
	tree, err := cgroup.Open("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tree.Close() })
	o, err := observer.New(observer.Options{Mode: observer.Auto, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	h := &listening{ready: make(chan struct{}, 1), found: make(chan observer.Socket, 64)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- space.Do(func() error { return o.Run(ctx, h) }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	if receive(t, h.ready); h.method == observer.MethodPoll {
		return // a kernel without events
	}

	top := "fairlead-test-" + strconv.Itoa(os.Getpid())
	type situation struct {
		name     string
		dirs     []string
		want     []string
		complete bool
	}
	inner := []string{"/" + top + "/a/x"}
	first := makeCgroup(t, mounts[0], top, "a", "x")
	situations := []situation{{"the roots", nil, nil, true}, {"one hierarchy", []string{first}, inner, true}}
	if len(mounts) > 1 {
		second := makeCgroup(t, mounts[1], top, "a", "x")
		situations = append(situations, []situation{
			{"another", []string{second}, inner, true},
			{"the same in two", []string{first, second}, inner, true},
			{"others by name", []string{first, makeCgroup(t, mounts[1], top, "a", "y")}, nil, false},
			{"others by depth", []string{first, makeCgroup(t, mounts[1], top, "x")}, nil, false},
		}...)
	}
	for _, c := range situations {
		t.Run(c.name, func(t *testing.T) {
			server := startServer(t, space, append(slices.Clone(mounts), c.dirs...)...)
			s := receive(t, h.found)
			for s.PID != uint32(server.pid) {
				s = receive(t, h.found)
			}
			if got, complete := tree.Paths(1, s.ProcessCgroup); !slices.Equal(got, c.want) || complete != c.complete {
				t.Errorf("%+v is of %q, complete %t, want %q, %t", s.ProcessCgroup, got, complete, c.want, c.complete)
			}
		})
	}
}
