// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
)

// machine is a /proc of files.
type machine struct {
	t    *testing.T
	root string
}

func newMachine(t *testing.T, ownCgroup string) machine {
	m := machine{t, t.TempDir()}
	m.write("self/cgroup", ownCgroup)
	m.write("self/mountinfo", "")
	return m
}

func (m machine) write(name, text string) {
	m.t.Helper()
	path := filepath.Join(m.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// run adds a process that started so long after boot.
func (m machine) run(pid int, comm, exe string, started time.Duration, cgroups string) {
	m.t.Helper()
	dir := filepath.Join(m.root, fmt.Sprint(pid))
	_ = os.RemoveAll(dir)
	stat := fmt.Sprintf("%d (%s) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 %d 9 10", pid, comm, started/(time.Second/100))
	m.write(fmt.Sprintf("%d/stat", pid), stat)
	m.write(fmt.Sprintf("%d/cgroup", pid), cgroups)
	if err := os.Symlink(exe, filepath.Join(dir, "exe")); err != nil {
		m.t.Fatal(err)
	}
}

// zombie adds a process that has ended, whose cgroups seem to be the roots.
func (m machine) zombie(pid int, state string) {
	m.t.Helper()
	m.write(fmt.Sprintf("%d/stat", pid), fmt.Sprintf("%d (web) %s 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 9 9 10", pid, state))
	m.write(fmt.Sprintf("%d/cgroup", pid), "5:cpu:/\n0::/\n")
}

func (m machine) remove(name string) {
	m.t.Helper()
	if err := os.Remove(filepath.Join(m.root, name)); err != nil {
		m.t.Fatal(err)
	}
}

func (m machine) handler(ownCookie uint64) (*handler, *registry.Registry) {
	m.t.Helper()
	tree, err := cgroup.Open(m.root)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { _ = tree.Close() })
	r := registry.New(registry.Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler)})
	p := procfs{m.root, func() time.Duration { return time.Hour }, func() int64 { return seen(now) }}
	return &handler{
		feed: r.Feed(Name), own: func(c uint64) bool { return c == ownCookie },
		network: fakeNetwork(), follow: func() {}, processes: newProcesses(p, tree), search: func(uint64) {},
	}, r
}

type allowAll struct{}

func (allowAll) Decide(port.Publication) port.Ruling {
	return port.Ruling{Decision: port.Decision{Allow: true}}
}

// now is so long after boot.
const now = 24 * time.Hour

// seen is when a process that started so long after boot, an hour of which was
// spent suspended, was seen.
func seen(afterBoot time.Duration) int64 { return int64(afterBoot - time.Hour) }

func listener(cookie uint64, n uint16, pid uint32, comm string, at int64) observer.Socket {
	return observer.Socket{
		Cookie: cookie, Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n, Listening: true,
		PID: pid, Comm: comm, PIDSeen: at, Observed: at,
	}
}

func only(t *testing.T, r *registry.Registry) port.Publication {
	t.Helper()
	if n := r.Publications().View().Len(); n != 1 {
		t.Fatalf("%d publications, want 1", n)
	}
	for _, p := range r.Publications().View().All() {
		return p
	}
	panic("unreachable")
}

// The name comes with the event; the executable is read when somebody asks.
func TestProcessIsNamedByItsEventAndExecutable(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, r := m.handler(0)
	h.Apply([]observer.Event{{Socket: listener(1, 80, 811, "java", seen(2*time.Hour+time.Second))}})
	p := only(t, r)
	if p.Owner.Name != "java" || p.Owner.ID != "811" || p.Owner.Kind != port.OwnerProcess {
		t.Errorf("owner = %+v", p.Owner)
	}
	m.run(811, "java", "/usr/bin/java", 2*time.Hour, "0::/\n")
	want := "pid 811 (java), /usr/bin/java"
	if d := p.Origins[0].Detail.String(); d != want {
		t.Errorf("detail = %q", d)
	}
	// What was read once stays, as the pid may be another process's later.
	m.run(811, "java", "/usr/bin/other", 2*time.Hour, "0::/\n")
	if d := p.Origins[0].Detail.String(); d != want {
		t.Errorf("later, the detail is %q", d)
	}
}

func TestRecycledPIDIsNotAttributed(t *testing.T) {
	m := newMachine(t, "5:cpu:/\n0::/\n")
	m.run(811, "other", "/usr/bin/other", 3*time.Hour, "5:cpu:/docker/other\n0::/\n")
	h, r := m.handler(0)
	h.Apply([]observer.Event{{Socket: listener(1, 80, 811, "nginx", seen(2*time.Hour))}})
	p := only(t, r)
	if p.Owner.Name != "nginx" || strings.Contains(p.Origins[0].Detail.String(), "other") {
		t.Errorf("owner %+v, detail %q", p.Owner, p.Origins[0].Detail)
	}
	s := listener(1, 80, 811, "nginx", seen(2*time.Hour))
	if hints := h.processes.attribute(&s).hints; len(hints.Paths) != 0 {
		t.Errorf("paths %q are another process's", hints.Paths)
	}
	// Without a time at which the process had the pid nothing is attributed.
	s.PIDSeen, s.Cookie = 0, 2
	if a := h.processes.attribute(&s); len(a.hints.Paths) != 0 || h.processes.knows(s.Cookie) {
		t.Errorf("attribution %+v by a pid that was never seen", a)
	}
}

// The cgroups of a process that ended before they were read are those of the process
// that holds the socket now, so that one is searched and rules wait for it.
func TestHolderIsSearchedIfCgroupsWereMissed(t *testing.T) {
	const cgroups = "5:cpu:/docker/web\n0::/\n"
	for name, makerOf := range map[string]func(m machine){
		"it is gone":             func(machine) {},
		"its pid was recycled":   func(m machine) { m.run(811, "other", "/other", 3*time.Hour, cgroups) },
		"it is not reaped":       func(m machine) { m.zombie(811, "Z") },
		"it is dead":             func(m machine) { m.zombie(811, "X") },
		"its cgroups are hidden": func(m machine) { m.run(811, "web", "/web", time.Hour, ""); m.remove("811/cgroup") },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "5:cpu:/\n0::/\n")
			makerOf(m)
			h, _ := m.handler(0)
			var searched []uint64
			h.search = func(cookie uint64) { searched = append(searched, cookie) }
			s := listener(1, 80, 811, "web", seen(2*time.Hour))
			s.CgroupID = 1
			if b := h.binding(&s); !b.Searching || len(b.Hints.Paths) != 0 || !slices.Equal(searched, []uint64{1}) {
				t.Errorf("searching %v, paths %q, searched %v", b.Searching, b.Hints.Paths, searched)
			}
			if h.processes.knows(1) {
				t.Error("the process is cached without cgroups")
			}
			nobody := s
			nobody.Sought = true
			if b := h.binding(&nobody); b.Searching || len(searched) != 1 {
				t.Errorf("searching %v, searched %v after a search in vain", b.Searching, searched)
			}
			m.run(812, "web", "/web", 2*time.Hour, cgroups)
			s.PID, s.PIDSeen = 812, seen(4*time.Hour)
			if b := h.binding(&s); b.Searching || !slices.Equal(b.Hints.Paths, []string{"/docker/web"}) || len(searched) != 1 {
				t.Errorf("searching %v, paths %q, searched %v of its holder", b.Searching, b.Hints.Paths, searched)
			}
		})
	}
}

func TestRenamedProcessIsReread(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, _ := m.handler(0)
	s := listener(1, 80, 811, "sh", seen(2*time.Hour))
	s.CgroupID = 1 // its process is not asked for its own
	h.Apply([]observer.Event{{Socket: s}})
	s.Comm = "nginx"
	h.processes.beginBatch()
	if a := h.processes.attribute(&s); a.owner.Name != "nginx" || a.detail.String() != "pid 811 (nginx)" {
		t.Errorf("owner %+v, detail %q", a.owner, a.detail)
	}
}

func TestAttributionOutlivesItsProcess(t *testing.T) {
	m := newMachine(t, "5:cpu:/\n0::/\n")
	m.run(811, "nginx", "/usr/sbin/nginx", time.Hour, "5:cpu:/docker/web\n0::/\n")
	h, r := m.handler(0)
	s := listener(1, 80, 811, "nginx", seen(2*time.Hour))
	h.Apply([]observer.Event{{Socket: s}})
	before := only(t, r)
	if err := os.RemoveAll(filepath.Join(m.root, "811")); err != nil { // a child has the socket now
		t.Fatal(err)
	}
	h.Replace([]observer.Socket{s})
	if p := only(t, r); !p.Equal(before) {
		t.Errorf("a dump made %+v of %+v", p, before)
	}
	if hints := h.processes.attribute(&s).hints; !slices.Equal(hints.Paths, []string{"/docker/web"}) {
		t.Errorf("paths = %q", hints.Paths)
	}
	h.Apply([]observer.Event{{Gone: true, Socket: s}})
	h.Replace([]observer.Socket{listener(2, 80, 811, "nginx", seen(2*time.Hour))})
	if n := len(h.processes.makers); n != 0 {
		t.Errorf("%d processes are kept of sockets that are gone", n)
	}
}

func TestProcessCgroupsAreReadOnlyIfNeeded(t *testing.T) {
	for _, c := range []struct {
		name, own string
		cgroup    uint64
		process   cgroup.V1
		want      []string
	}{
		{"a unified hierarchy alone, and no id", "0::/init.scope\n", 0, cgroup.V1{}, []string{"/docker/a"}},
		{"a unified hierarchy alone, and the root", "0::/init.scope\n", 1, cgroup.V1{}, nil},
		{"an id without a path", "0::/init.scope\n", 77, cgroup.V1{}, []string{"/docker/a"}},
		{"other hierarchies", "7:pids:/\n0::/\n", 1, cgroup.V1{}, []string{"/docker/a", "/docker/b"}},
		{"other hierarchies, and the roots of them", "7:pids:/\n0::/\n", 1, cgroup.V1{ID: 1}, nil},
		{"other hierarchies, and no id", "7:pids:/\n0::/\n", 0, cgroup.V1{ID: 1}, []string{"/docker/a", "/docker/b"}},
		{"a hierarchy that is not mounted", "7:pids:/\n0::/\n", 1, cgroup.V1{Hierarchy: 7, ID: 77}, []string{"/docker/a", "/docker/b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t, c.own)
			cgroups := "0::/docker/a\n"
			if strings.HasPrefix(c.own, "7:") {
				cgroups = "9:name=systemd:/\n8:cpu:/docker/b\n7:pids:/docker/a\n6:memory:/../x/docker/c\n" + cgroups
			}
			m.run(5, "web", "/web", time.Hour, cgroups)
			h, _ := m.handler(0)
			s := listener(1, 80, 5, "web", seen(2*time.Hour))
			s.CgroupID, s.ProcessCgroup = c.cgroup, c.process
			if hints := h.processes.attribute(&s).hints; !slices.Equal(hints.Paths, c.want) || hints.Cgroup != c.cgroup {
				t.Errorf("hints = %+v, want paths %q", hints, c.want)
			}
		})
	}
}

// The pids of another WSL distribution mean nothing here.
func TestProcessOfAnotherPIDNamespaceHasNoPID(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, r := m.handler(0)
	s := listener(1, 80, 0, "nginx", 0)
	h.Apply([]observer.Event{{Socket: s}})
	if o := only(t, r).Owner; o.Name != "nginx" || o.ID != "" || o.Kind != port.OwnerProcess {
		t.Errorf("owner = %+v", o)
	}
	// Two that are only known by name are not known to be one.
	six := s
	six.Cookie, six.Address, six.V6Only = 2, netip.IPv6Unspecified(), true
	h.Apply([]observer.Event{{Socket: six}})
	if n := r.Publications().View().Len(); n != 2 {
		t.Errorf("%d publications, want 2: different processes may serve them", n)
	}
}

func TestOwnSocketsAreNotPublished(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, r := m.handler(7)
	h.Replace([]observer.Socket{listener(7, 80, 0, "", 0)})
	h.Apply([]observer.Event{{Socket: listener(7, 81, 0, "", 0)}, {Gone: true, Socket: listener(7, 81, 0, "", 0)}})
	if n := r.Publications().View().Len(); n != 0 {
		t.Errorf("%d publications of our own sockets", n)
	}
}

// A process that was seen just now has the pid still, so that when it started need not be
// read. It must be if the process may be another one, or may have ended.
func TestStartIsReadOnlyIfNeeded(t *testing.T) {
	const cgroups = "5:cpu:/docker/web\n0::/\n"
	soon, late := seen(now)-tick, seen(now)-tick-1
	m := newMachine(t, "5:cpu:/\n0::/\n")
	h, _ := m.handler(0)
	paths := func(cookie uint64, at int64) []string {
		s := listener(cookie, 80, 811, "web", at)
		s.CgroupID = 1
		return h.processes.attribute(&s).hints.Paths
	}
	want := []string{"/docker/web"}
	m.run(811, "web", "/web", now-time.Hour, cgroups)
	m.remove("811/stat")
	if got := paths(1, late); got != nil {
		t.Errorf("paths %q of a process that was seen long ago, without its start", got)
	}
	if got := paths(2, soon); !slices.Equal(got, want) {
		t.Errorf("paths %q, want %q", got, want)
	}
	// Another socket of it, which it made before.
	m.run(811, "web", "/web", now-time.Hour, cgroups)
	if got := paths(3, late); !slices.Equal(got, want) {
		t.Errorf("paths %q of an older socket, want %q", got, want)
	}
	h.processes.beginBatch()
	m.zombie(811, "Z")
	m.remove("811/exe")
	if got := paths(4, soon); got != nil || h.processes.knows(4) {
		t.Errorf("paths %q of a process that has ended", got)
	}
	// A kernel without the executable, or without the right to read it.
	m.run(811, "web", "/web", now-time.Hour, cgroups)
	m.remove("811/exe")
	if got := paths(5, soon); !slices.Equal(got, want) {
		t.Errorf("paths %q without the executable, want %q", got, want)
	}
}

func TestReadOwnProcess(t *testing.T) {
	q, err := newProcfs().read(uint32(os.Getpid()), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if q.exe != exe || q.since <= 0 || !q.exact || !q.had(observer.Now()) {
		t.Errorf("process = %+v, executable %s", q, exe)
	}
	if _, err := newProcfs().read(1<<31-1, 0, nil); err == nil {
		t.Error("a process that does not exist was found")
	}
}
