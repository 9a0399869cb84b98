// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package observer

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// sock is a socket under test.
type sock struct {
	t  testing.TB
	fd int
}

func (w *world) socket(family, kind, protocol int) sock {
	w.t.Helper()
	var fd int
	var err error
	w.do(func() { fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol) })
	if err != nil {
		w.t.Fatalf("socket(%d, %d, %d): %v", family, kind, protocol, err)
	}
	s := sock{w.t, fd}
	return s
}

func (w *world) tcp4() sock { return w.socket(unix.AF_INET, unix.SOCK_STREAM, 0) }
func (w *world) udp4() sock { return w.socket(unix.AF_INET, unix.SOCK_DGRAM, 0) }
func (w *world) udp6() sock { return w.socket(unix.AF_INET6, unix.SOCK_DGRAM, 0) }

func (s sock) must(what string, err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
}

func (s sock) option(level, name, value int) sock {
	s.t.Helper()
	s.must("setsockopt", unix.SetsockoptInt(s.fd, level, name, value))
	return s
}

func (s sock) bind(to unix.Sockaddr) sock {
	s.t.Helper()
	err := unix.Bind(s.fd, to)
	// A dump can keep a closed socket for a moment.
	for end := time.Now().Add(wait.Limit()); errors.Is(err, unix.EADDRINUSE) && time.Now().Before(end); err = unix.Bind(s.fd, to) {
		time.Sleep(time.Millisecond)
	}
	s.must("bind", err)
	return s
}

func (s sock) connect(to unix.Sockaddr) sock {
	s.t.Helper()
	s.must("connect", unix.Connect(s.fd, to))
	return s
}

func (s sock) listen() sock {
	s.t.Helper()
	s.must("listen", unix.Listen(s.fd, 16))
	return s
}

func (s sock) shutdown() sock {
	s.t.Helper()
	s.must("shutdown", unix.Shutdown(s.fd, unix.SHUT_RDWR))
	return s
}

func (s sock) close() {
	s.t.Helper()
	s.must("close", unix.Close(s.fd))
}

// reset closes a connection so that nothing of it lingers.
func (s sock) reset() {
	s.t.Helper()
	s.must("linger", unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	s.close()
}

// port returns the local port.
func (s sock) port() int {
	s.t.Helper()
	a, err := unix.Getsockname(s.fd)
	s.must("getsockname", err)
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return a.Port
	case *unix.SockaddrInet6:
		return a.Port
	}
	s.t.Fatalf("getsockname: %T", a)
	return 0
}

func v4(a, b, c, d byte, port int) unix.Sockaddr {
	return &unix.SockaddrInet4{Addr: [4]byte{a, b, c, d}, Port: port}
}

func any4(port int) unix.Sockaddr      { return v4(0, 0, 0, 0, port) }
func loopback4(port int) unix.Sockaddr { return v4(127, 0, 0, 1, port) }
func any6(port int) unix.Sockaddr      { return &unix.SockaddrInet6{Port: port} }

type testCase struct {
	name string
	run  func(w *world)
}

// opened is a way to open a socket, and where it is then seen. At port 0 the kernel chooses one.
type opened struct {
	open func(*world) sock
	at   unix.Sockaddr // nil: it is not bound
	want string
}

func (o opened) in(w *world) (s sock, want string) {
	if s = o.open(w); o.at != nil {
		s.bind(o.at)
	}
	if strings.HasPrefix(o.want, "tcp") {
		s.listen()
	}
	if at, found := strings.CutSuffix(o.want, ":0"); found {
		return s, fmt.Sprintf("%s:%d", at, s.port())
	}
	return s, o.want
}

// plain returns the cases of sockets that are seen until they are closed, one after the other.
// What addresses, families, shutdown, connect and the like do, test/sockets decides at random.
func plain() (list []testCase) {
	mptcp := func(family int) func(*world) sock {
		return func(w *world) sock { return w.socket(family, unix.SOCK_STREAM, kernels.MPTCP()) }
	}
	shared := func(w *world) sock { return w.tcp4().option(unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }
	for _, c := range []struct {
		name    string
		sockets []opened
	}{
		{"tcp port chosen at listen", []opened{{(*world).tcp4, nil, "tcp 0.0.0.0:0"}}},
		{"mptcp", []opened{{mptcp(unix.AF_INET), any4(8080), "tcp 0.0.0.0:8080"}}},
		{"mptcp dual stack", []opened{{mptcp(unix.AF_INET6), any6(8080), "tcp [::]:8080"}}},
		{"udp ephemeral loopback", []opened{{(*world).udp4, loopback4(0), "udp 127.0.0.1:0"}}},
		{"tcp reuseport pair", []opened{{shared, any4(8080), "tcp 0.0.0.0:8080"}, {shared, any4(8080), "tcp 0.0.0.0:8080"}}},
	} {
		list = append(list, testCase{c.name, func(w *world) {
			var open []sock
			var want []string
			for _, o := range c.sockets {
				s, text := o.in(w)
				open, want = append(open, s), append(want, text)
			}
			w.wantSet(slices.Clone(want)...)
			for i, s := range open {
				s.close()
				w.wantSet(slices.Clone(want[i+1:])...)
			}
		}})
	}
	return list
}

// cases must pass on every method. Each runs in a network namespace of its own
// without other sockets.
func cases() []testCase {
	return append(plain(), []testCase{
		{"tcp duplicated descriptor", func(w *world) {
			a := w.tcp4().bind(any4(8080)).listen()
			fd, err := unix.FcntlInt(uintptr(a.fd), unix.F_DUPFD_CLOEXEC, 3)
			a.must("dup", err)
			w.wantSet("tcp 0.0.0.0:8080")
			a.close()
			// No event to wait for: when another socket is seen, this must still exist.
			b := w.tcp4().bind(any4(8081)).listen()
			w.wantSet("tcp 0.0.0.0:8080", "tcp 0.0.0.0:8081")
			sock{w.t, fd}.close()
			w.wantSet("tcp 0.0.0.0:8081")
			b.close()
			w.wantSet()
		}},
		{"tcp inherited by a child", func(w *world) {
			a := w.tcp4().bind(any4(8080)).listen()
			f := os.NewFile(uintptr(a.fd), "listener")
			c := w.child("sleep", f)
			a.must("close", f.Close())
			b := w.tcp4().bind(any4(8081)).listen()
			w.wantSet("tcp 0.0.0.0:8080", "tcp 0.0.0.0:8081")
			c.kill()
			w.wantSet("tcp 0.0.0.0:8081")
			b.close()
			w.wantSet()
		}},
		{"socket of another namespace than the task's", func(w *world) {
			// Made elsewhere, used here: not ours. Made here, used elsewhere: ours.
			elsewhere := newRoom(w.t)
			var fd int
			var err error
			elsewhere.do(func() { fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) })
			foreign := sock{w.t, fd}
			foreign.must("socket", err)
			ours := w.tcp4()
			w.do(func() { foreign.bind(any4(8081)).listen() })
			elsewhere.do(func() { ours.bind(any4(8080)).listen() })
			w.wantSet("tcp 0.0.0.0:8080")
			w.do(func() { foreign.close() })
			elsewhere.do(func() { ours.close() })
			w.wantSet()
		}},
		{"tcp accepted connections", func(w *world) {
			s := w.tcp4().bind(loopback4(8080)).listen()
			for range 50 {
				c := w.tcp4().connect(loopback4(8080))
				fd, _, err := unix.Accept(s.fd)
				s.must("accept", err)
				sock{w.t, fd}.reset()
				c.close()
			}
			w.wantSet("tcp 127.0.0.1:8080")
			s.close()
			w.wantSet()
		}},
		{"tcp bound and connected", func(w *world) {
			server := w.tcp4().bind(loopback4(8080)).listen()
			s := w.tcp4().bind(loopback4(8081))
			w.wantBound("tcp 127.0.0.1:8080", "tcp 127.0.0.1:8081 bound")
			s.connect(loopback4(8080))
			w.wantSet("tcp 127.0.0.1:8080")
			s.reset()
			server.close()
			w.wantSet()
		}},
		{"bound to an interface later", func(w *world) {
			a, b := w.tcp4().bind(any4(8080)).listen(), w.udp4().bind(any4(5000))
			w.wantSet("tcp 0.0.0.0:8080", "udp 0.0.0.0:5000")
			for _, device := range []string{"lo", ""} {
				for _, s := range []sock{a, b} {
					s.must("SO_BINDTODEVICE", unix.BindToDevice(s.fd, device))
				}
				if w.sees(Device) || w.polls(TCPListen) && w.polls(UDPBind) {
					w.await(w.t, func() string { return fmt.Sprintf("not at %q: %+v", device, w.set) }, func() bool {
						for _, s := range w.set {
							if (s.Device != 0) != (device != "") {
								return false
							}
						}
						return len(w.set) == 2
					})
				}
			}
			a.close()
			b.close()
			w.wantSet()
		}},
		{"owner", func(w *world) {
			// A process is named by its first thread, which is rarely the one that listens.
			runtime.LockOSThread() // and never unlocked: the thread ends with its name
			name := append([]byte("worker"), 0)
			if err := unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0); err != nil {
				w.t.Fatal(err)
			}
			first, err := os.ReadFile("/proc/self/comm")
			if err != nil {
				w.t.Fatal(err)
			}
			s := w.tcp4().bind(loopback4(8080)).listen()
			w.wantSet("tcp 127.0.0.1:8080")
			w.await(w.t, func() string { return fmt.Sprintf("no owner: %+v", w.set) }, func() bool {
				for _, s := range w.set {
					return s.PID == uint32(os.Getpid()) && s.Comm == strings.TrimSpace(string(first))
				}
				return false
			})
			got := w.only()
			var st unix.Stat_t
			s.must("fstat", unix.Fstat(s.fd, &st))
			cookie, err := unix.GetsockoptUint64(s.fd, unix.SOL_SOCKET, unix.SO_COOKIE)
			s.must("SO_COOKIE", err)
			if got.Cookie != cookie || uint64(got.Inode) != st.Ino || got.NetNS != w.ns.Inode() || got.UID != 0 {
				w.t.Errorf("have %+v, want cookie %d, inode %d, namespace %d", got, cookie, st.Ino, w.ns.Inode())
			}
			s.close()
			w.wantSet()
		}},
		{"10,000 listeners in a burst", func(w *world) {
			const n = 10_000
			raiseLimit(w.t, n+1000)
			socks := make([]sock, n)
			var want []string
			w.do(func() {
				for i := range socks {
					fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
					s := sock{w.t, fd}
					s.must("socket", err)
					socks[i] = s.bind(loopback4(10_000 + i)).listen()
				}
			})
			for i := range socks {
				want = append(want, fmt.Sprintf("tcp 127.0.0.1:%d", 10_000+i))
			}
			w.wantSet(want...)
			w.do(func() {
				for _, s := range socks {
					s.close()
				}
			})
			w.wantSet()
		}},
		{"6,000 short lives", func(w *world) {
			const n = 6_000 // whose 18,000 events fit the ring, also if none is read on a busy machine
			w.do(func() {
				for range n {
					fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
					s := sock{w.t, fd}
					s.must("socket", err)
					s.bind(loopback4(8080)).listen().close()
				}
			})
			last := w.tcp4().bind(loopback4(8081)).listen()
			w.wantSet("tcp 127.0.0.1:8081")
			if w.events(TCPListen) {
				w.await(w.t, func() string {
					return fmt.Sprintf("%d starts and %d stops; %+v", w.starts, w.stops, w.observer.Stats())
				}, func() bool { return w.starts == n+1 && w.stops == n })
			}
			if d := w.observer.Stats().Drops; d != 0 {
				w.t.Errorf("%d events lost", d)
			}
			last.close()
			w.wantSet()
		}},
	}...)
}

// sees reports whether a method sees all that it should of a capability.
func (w *world) sees(capability string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.methods[capability].Lost == "" && w.methods[capability].Name != MethodAudit
}

// polls reports whether a capability is polled.
func (w *world) polls(capability string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.methods[capability].Name == MethodPoll
}

// wantBound is wantSet where bound sockets can be seen; elsewhere they need not be.
func (w *world) wantBound(want ...string) {
	w.t.Helper()
	if w.events(TCPBind) || w.boundDump {
		w.wantSet(want...)
	}
}

// boundDumped looks in a room of its own, as it makes a socket.
func boundDumped(t testing.TB) bool {
	t.Helper()
	r := newRoom(t)
	var d *dumper
	var err error
	r.do(func() { d, err = openDumper(r.ns) })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.close() }()
	return d.boundDump
}

func TestCases(t *testing.T) {
	for _, set := range methodSets(t) {
		t.Run(set, func(t *testing.T) {
			// One observer sees all cases; after a failure the next has a new one.
			var shared *world
			for _, c := range cases() {
				if shared == nil {
					shared = observe(t, newRoom(t), options(set))
					shared.boundDump = boundDumped(t)
					requireMethod(t, shared, set)
				}
				ok := t.Run(c.name, func(t *testing.T) {
					w := *shared
					w.t = t
					w.update(func() { w.starts, w.stops = 0, 0 })
					c.run(&w)
					if s := w.observer.Stats(); s.Malformed != 0 || s.DumpFailures != 0 || s.Drift != 0 {
						t.Errorf("stats: %+v", s)
					}
				})
				if !ok {
					shared = nil
				}
			}
		})
	}
}

// child is a process in the room.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	out *bufio.Reader // what it writes after its first line
}

func (w *world) child(part string, files ...*os.File) *child {
	w.t.Helper()
	c := &child{t: w.t, cmd: exec.Command("/proc/self/exe")}
	c.cmd.Env = append(os.Environ(), childVar+"="+part)
	c.cmd.ExtraFiles = files
	c.cmd.Stderr = os.Stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	w.do(func() { err = c.cmd.Start() })
	if err != nil {
		w.t.Fatal(err)
	}
	c.out = bufio.NewReader(out)
	if _, err := c.out.ReadString('\n'); err != nil {
		w.t.Fatalf("child %s: %v", part, err)
	}
	return c
}

func (c *child) kill() {
	c.t.Helper()
	if err := c.cmd.Process.Kill(); err != nil {
		c.t.Fatal(err)
	}
	_ = c.cmd.Wait()
}

// takeSocket gets a copy of a socket of the child, as SCM_RIGHTS would.
func (c *child) takeSocket(inode uint32) (sock, error) {
	pid := c.cmd.Process.Pid
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return sock{}, err
	}
	defer func() { _ = unix.Close(pidfd) }()
	path := fmt.Sprintf("/proc/%d/fd", pid)
	names, err := os.ReadDir(path)
	if err != nil {
		return sock{}, err
	}
	for _, n := range names {
		link, _ := os.Readlink(filepath.Join(path, n.Name()))
		if link != fmt.Sprintf("socket:[%d]", inode) {
			continue
		}
		fd, err := strconv.Atoi(n.Name())
		if err != nil {
			return sock{}, err
		}
		fd, err = unix.PidfdGetfd(pidfd, fd, 0)
		return sock{c.t, fd}, err
	}
	return sock{}, fmt.Errorf("process %d has no socket %d", pid, inode)
}

// TestOwnerHasTheSocket: an observer that saw how a process got a socket, and its name, says what
// one says that starts now. Without audits it does so where the kernel tells.
func TestOwnerHasTheSocket(t *testing.T) {
	for _, set := range methodSets(t) {
		t.Run(set, func(t *testing.T) {
			room := newRoom(t)
			told, audited := observeAudited(t, room, set, -1), observeAudited(t, room, set, time.Second)
			ways := []string{wayExec, wayRename, waySpawn, wayServed, wayEnd, wayThreads, wayLeave, wayShared, wayKept, wayGiven}
			hooked := told.events(TCPListen) && told.events(UDPBind) && told.events(OwnerName)
			start, bound := make([]*os.File, len(ways)), []string(nil)
			children := make([]*child, len(ways))
			for i, way := range ways {
				r, w, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				children[i], start[i] = told.child(fmt.Sprint(way, " ", 8080+i), r), w
				_ = r.Close()
				defer children[i].kill()
				defer func() { _ = w.Close() }()
				if way != wayShared {
					bound = append(bound, fmt.Sprintf("udp 127.0.0.1:%d", 8080+i))
				}
			}
			told.await(t, func() string { return fmt.Sprintf("have %q, want %q", told.describe(), bound) }, func() bool {
				return len(without(bound, told.describe())) == 0
			})
			time.Sleep(ownerSettle + 3*ownerPause/2) // no process is new
			owners := make(map[uint16]owner)
			for i, way := range ways {
				if way == wayLeave && hooked {
					want := maps.Clone(owners)
					if !told.events(TCPBind) { // nor is it told who bound what another process listens on
						delete(want, uint16(8080+slices.Index(ways, wayServed)))
					}
					told.wantOwners(want)
				}
				if way == wayKept || way == wayGiven {
					for _, s := range told.take(children[i], uint16(8080+i)) {
						defer s.close()
					}
				}
				_ = start[i].Close()
				var o owner
				if _, err := fmt.Fscanln(children[i].out, &o.pid, &o.comm); err != nil {
					t.Fatalf("%s: %v", way, err)
				}
				if pid := int(o.pid); pid != children[i].cmd.Process.Pid && pid != os.Getpid() {
					defer func() { _ = unix.Kill(pid, unix.SIGKILL) }()
				}
				owners[uint16(8080+i)] = o
			}
			audited.wantOwners(owners)
			observe(t, room, options(set)).wantOwners(owners)
		})
	}
}

// take takes copies of all sockets of a child at a port.
func (w *world) take(c *child, port uint16) (taken []sock) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.set {
		if s.Port != port {
			continue
		}
		s, err := c.takeSocket(s.Inode)
		if err != nil {
			w.t.Fatal(err)
		}
		taken = append(taken, s)
	}
	return taken
}

// wantOwners waits until the sockets of both protocols at ports have these owners.
func (w *world) wantOwners(want map[uint16]owner) {
	w.t.Helper()
	var wrong []string
	w.await(w.t, func() string { return fmt.Sprint(wrong) }, func() bool {
		wrong = nil
		right := make(map[uint16]int)
		for _, s := range w.set {
			if o, ok := want[s.Port]; !ok || s.PID == o.pid && s.Comm == o.comm {
				right[s.Port]++
			} else {
				wrong = append(wrong, fmt.Sprintf("%s of %d %q, want %d %q", describe(s), s.PID, s.Comm, o.pid, o.comm))
			}
		}
		for n := range want {
			if right[n] != 2 {
				wrong = append(wrong, fmt.Sprintf("%d right at %d", right[n], n))
			}
		}
		return len(wrong) == 0
	})
}
