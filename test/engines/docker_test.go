// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/docker"
	"github.com/fairlead/fairlead/internal/source/engine"
)

const dockerSocket = "/run/docker.sock"

// dockerd starts Debian's engine and waits until it answers.
func dockerd(t testing.TB, args ...string) *daemon {
	t.Helper()
	d := start(t, "dockerd", append([]string{
		"--host=unix://" + dockerSocket, "--cgroup-parent=/" + cgroupParent(),
		"--pidfile=/run/docker.pid", "--exec-root=/run/docker-exec",
	}, args...)...)
	dockerReady(t)
	t.Cleanup(func() {
		// The next test starts with an empty engine.
		if ids, err := try("docker", "ps", "-aq"); err == nil && ids != "" {
			_, _ = try("docker", append([]string{"rm", "-f"}, strings.Fields(ids)...)...)
		}
	})
	return d
}

func dockerReady(t testing.TB) {
	t.Helper()
	eventually(t, 60*time.Second, func() error { _, err := try("docker", "version"); return err })
}

func dockerImage(t testing.TB) {
	t.Helper()
	run(t, "docker", "load", "-i", imageArchive(t))
}

func dockerSource(t testing.TB, grace time.Duration) *docker.Source {
	t.Helper()
	s, err := docker.New(docker.Options{
		Hosts:  []string{"unix://" + dockerSocket},
		Logger: logger(t), Retry: engine.Retry{Grace: grace},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// drun runs a container in the background; without a command it sleeps.
func drun(t testing.TB, args ...string) string {
	t.Helper()
	return run(t, "docker", append([]string{"run", "-d", "--stop-timeout", "0"}, args...)...)
}

// both are the keys of a port that is published without an address.
func both(proto string, n int, name string) []string {
	return []string{fmt.Sprintf("%s 0.0.0.0:%d %s", proto, n, name), fmt.Sprintf("%s [::]:%d %s", proto, n, name)}
}

func TestDockerScenarios(t *testing.T) {
	dockerd(t)
	dockerImage(t)
	src := dockerSource(t, time.Hour)
	r, _ := follow(t, src)
	want(t, r)
	// This one stays through everything, and must never flap.
	drun(t, "--name", "stays", "-p", "127.0.0.1:7999:80", "bb")
	const stays = "tcp 127.0.0.1:7999 stays"
	want(t, r, stays)
	began := r.mark()

	for _, c := range []struct {
		name string
		do   func(t *testing.T)
		want func(t *testing.T) []string
	}{
		{"address 127.0.0.1", func(t *testing.T) { drun(t, "--name", "one", "-p", "127.0.0.1:8000:80", "bb") },
			func(*testing.T) []string { return []string{"tcp 127.0.0.1:8000 one"} }},
		{"address ::1", func(t *testing.T) { drun(t, "--name", "one", "-p", "[::1]:8000:80", "bb") },
			func(*testing.T) []string { return []string{"tcp [::1]:8000 one"} }},
		{"specific address", func(t *testing.T) { drun(t, "--name", "one", "-p", nodeAddr+":8000:80", "bb") },
			func(*testing.T) []string { return []string{"tcp " + nodeAddr + ":8000 one"} }},
		{"no address", func(t *testing.T) { drun(t, "--name", "one", "-p", "8000:80", "bb") },
			func(*testing.T) []string { return both("tcp", 8000, "one") }},
		{"range", func(t *testing.T) { drun(t, "--name", "one", "-p", "127.0.0.1:8000-8003:80-83", "bb") },
			func(*testing.T) []string {
				return []string{"tcp 127.0.0.1:8000 one", "tcp 127.0.0.1:8001 one", "tcp 127.0.0.1:8002 one", "tcp 127.0.0.1:8003 one"}
			}},
		{"tcp and udp on one number", func(t *testing.T) {
			drun(t, "--name", "one", "-p", "127.0.0.1:53:53/tcp", "-p", "127.0.0.1:53:53/udp", "bb")
		}, func(*testing.T) []string { return []string{"tcp 127.0.0.1:53 one", "udp 127.0.0.1:53 one"} }},
		{"random ports", func(t *testing.T) { drun(t, "--name", "one", "--expose", "80", "--expose", "81/udp", "-P", "bb") },
			func(t *testing.T) []string { return dockerPorts(t, "one") }},
		{"restart", func(t *testing.T) {
			drun(t, "--name", "one", "-p", "8000:80", "bb")
			run(t, "docker", "restart", "-t", "0", "one")
		}, func(*testing.T) []string { return both("tcp", 8000, "one") }},
		{"restart policy", func(t *testing.T) {
			drun(t, "--name", "one", "--restart", "always", "-p", "8000:80", "bb")
			pid := run(t, "docker", "inspect", "-f", "{{.State.Pid}}", "one")
			run(t, "sh", "-c", "kill -9 "+pid)
			eventually(t, 20*time.Second, func() error {
				if now, err := try("docker", "inspect", "-f", "{{.State.Pid}}", "one"); err != nil || now == pid || now == "0" {
					return fmt.Errorf("pid is %s, was %s (%v)", now, pid, err)
				}
				return nil
			})
		}, func(*testing.T) []string { return both("tcp", 8000, "one") }},
		{"rename", func(t *testing.T) {
			drun(t, "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
			run(t, "docker", "rename", "one", "two")
		}, func(*testing.T) []string { return []string{"tcp 127.0.0.1:8000 two"} }},
		{"stop", func(t *testing.T) { drun(t, "--name", "one", "-p", "8000:80", "bb"); run(t, "docker", "stop", "one") },
			func(*testing.T) []string { return nil }},
		{"kill", func(t *testing.T) { drun(t, "--name", "one", "-p", "8000:80", "bb"); run(t, "docker", "kill", "one") },
			func(*testing.T) []string { return nil }},
		{"killed from outside, --rm", func(t *testing.T) {
			drun(t, "--name", "one", "--rm", "-p", "8000:80", "bb")
			run(t, "sh", "-c", "kill -9 "+run(t, "docker", "inspect", "-f", "{{.State.Pid}}", "one"))
		}, func(*testing.T) []string { return nil }},
		{"rm -f of several ports", func(t *testing.T) {
			drun(t, "--name", "one", "-p", "8000:80", "-p", "8001:81/udp", "-p", "127.0.0.1:8002:82", "bb")
			run(t, "docker", "rm", "-f", "one")
		}, func(*testing.T) []string { return nil }},
		{"created, not started", func(t *testing.T) { run(t, "docker", "create", "--name", "one", "-p", "8000:80", "bb") },
			func(*testing.T) []string { return nil }},
		{"fails to start", func(t *testing.T) {
			if _, err := try("docker", "run", "-d", "--name", "one", "-p", "127.0.0.1:8000:80", "bb", "/no/such"); err == nil {
				t.Error("a container without a program started")
			}
		}, func(*testing.T) []string { return nil }},
		{"host network declares nothing", func(t *testing.T) { drun(t, "--name", "one", "--network", "host", "-p", "8000:80", "bb") },
			func(*testing.T) []string { return nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			defer func() { _, _ = try("docker", "rm", "-f", "one", "two") }()
			c.do(t)
			want(t, r, append(c.want(t), stays)...)
			run(t, "sh", "-c", "docker rm -f one two 2>/dev/null || true")
			want(t, r, stays)
		})
	}

	t.Run("pause and unpause keep the port", func(t *testing.T) {
		defer func() { _, _ = try("docker", "rm", "-f", "one") }()
		drun(t, "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
		want(t, r, "tcp 127.0.0.1:8000 one", stays)
		mark := r.mark()
		for _, c := range []struct {
			verb   string
			paused bool
		}{{"pause", true}, {"unpause", false}} {
			run(t, "docker", c.verb, "one")
			eventually(t, 10*time.Second, func() error {
				if b := find(r, "tcp 127.0.0.1:8000"); strings.Contains(b.Detail, "paused") != c.paused {
					return fmt.Errorf("after %s: detail %q", c.verb, b.Detail)
				}
				return nil
			})
		}
		if log := r.since(mark); len(log) > 0 {
			t.Errorf("pause and unpause moved %q", log)
		}
		run(t, "docker", "rm", "-f", "one")
		want(t, r, stays)
	})

	t.Run("sctp is named, not dropped in silence", func(t *testing.T) {
		defer func() { _, _ = try("docker", "rm", "-f", "one") }()
		if _, err := try("docker", "run", "-d", "--name", "one", "-p", "8000:80", "-p", "8001:81/sctp", "bb"); err != nil {
			t.Logf("this kernel has no sctp (%v); the scripted engine covers it", err)
			return
		}
		want(t, r, append(both("tcp", 8000, "one"), stays)...)
		eventually(t, 10*time.Second, func() error {
			if w := r.warned(); !slices.ContainsFunc(w, func(s string) bool { return strings.Contains(s, "sctp is not supported") }) {
				return fmt.Errorf("warnings are %q", w)
			}
			return nil
		})
		run(t, "docker", "rm", "-f", "one")
		want(t, r, stays)
		eventually(t, 10*time.Second, func() error {
			if w := r.warned(); len(w) > 0 {
				return fmt.Errorf("warnings are %q", w)
			}
			return nil
		})
	})

	t.Run("networks change where it is dialled", func(t *testing.T) {
		run(t, "docker", "network", "create", "--subnet", "10.99.0.0/24", "other")
		defer func() { _, _ = try("docker", "rm", "-f", "one"); _, _ = try("docker", "network", "rm", "other") }()
		drun(t, "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
		want(t, r, "tcp 127.0.0.1:8000 one", stays)
		mark := r.mark()
		for _, c := range []struct {
			verb string
			has  bool
		}{{"connect", true}, {"disconnect", false}} {
			run(t, "docker", "network", c.verb, "other", "one")
			eventually(t, 10*time.Second, func() error {
				b := find(r, "tcp 127.0.0.1:8000")
				if got := slices.Contains(b.Dial, netip.MustParseAddrPort("10.99.0.2:80")); got != c.has {
					return fmt.Errorf("after %s it is dialled at %v", c.verb, b.Dial)
				}
				return nil
			})
		}
		if log := r.since(mark); len(log) > 0 {
			t.Errorf("networks moved %q", log)
		}
	})

	t.Run("labels of Compose", func(t *testing.T) {
		defer func() { _, _ = try("docker", "rm", "-f", "shop-web-1") }()
		drun(t, "--name", "shop-web-1", "--label", "com.docker.compose.project=shop",
			"--label", "com.docker.compose.service=web", "-p", "127.0.0.1:8000:80", "bb")
		want(t, r, "tcp 127.0.0.1:8000 shop-web-1", stays)
		l := find(r, "tcp 127.0.0.1:8000").Owner.Labels
		if l["com.docker.compose.project"] != "shop" || l["com.docker.compose.service"] != "web" {
			t.Errorf("labels are %v", l)
		}
		run(t, "docker", "rm", "-f", "shop-web-1")
		want(t, r, stays)
	})

	t.Run("the declared port answers", func(t *testing.T) {
		defer func() { _, _ = try("docker", "rm", "-f", "one") }()
		drun(t, "--name", "one", "-p", "8000:80", "bb", "httpd", "-f", "-p", "80", "-h", "/etc")
		want(t, r, append(both("tcp", 8000, "one"), stays)...)
		for _, b := range r.bindings() {
			if b.Port != 8000 {
				continue
			}
			eventually(t, 10*time.Second, func() error { _, err := reach(b); return err })
		}
		run(t, "docker", "rm", "-f", "one")
		want(t, r, stays)
	})

	if log := r.since(began); slices.Contains(log, "-tcp 127.0.0.1:7999") {
		t.Errorf("a port that stayed was withdrawn: %q", log)
	}
}

// find returns the binding of a key, or a zero one.
func find(r *recorder, key string) port.Binding {
	for _, b := range r.bindings() {
		if b.Key.String() == key {
			return b
		}
	}
	return port.Binding{}
}

// dockerPorts asks the engine itself which ports a container publishes.
func dockerPorts(t testing.TB, name string) []string {
	t.Helper()
	var keys []string
	for line := range strings.Lines(run(t, "docker", "port", name)) {
		spec, addr, ok := strings.Cut(strings.TrimSpace(line), " -> ")
		if !ok {
			continue
		}
		_, proto, _ := strings.Cut(spec, "/")
		i := strings.LastIndexByte(addr, ':')
		n, err := strconv.Atoi(addr[i+1:])
		if err != nil {
			t.Fatalf("docker port says %q", line)
		}
		a := netip.MustParseAddr(strings.Trim(addr[:i], "[]"))
		keys = append(keys, fmt.Sprintf("%s %s %s", proto, netip.AddrPortFrom(a, uint16(n)), name))
	}
	return keys
}

// allDockerPorts asks for the ports of everything that runs.
func allDockerPorts(t testing.TB) []string {
	t.Helper()
	var keys []string
	for _, name := range strings.Fields(run(t, "docker", "ps", "--format", "{{.Names}}")) {
		keys = append(keys, dockerPorts(t, name)...)
	}
	return keys
}

// Facts: a container's cgroup and addresses are its own, with a network of its
// own or with the host's.
func TestDockerFacts(t *testing.T) {
	dockerd(t)
	dockerImage(t)
	src := dockerSource(t, time.Hour)
	r, _ := follow(t, src)
	drun(t, "--name", "own", "-p", "127.0.0.1:8000:80", "bb")
	drun(t, "--name", "host", "--network", "host", "bb")
	want(t, r, "tcp 127.0.0.1:8000 own")
	for _, name := range []string{"own", "host"} {
		pid := run(t, "docker", "inspect", "-f", "{{.State.Pid}}", name)
		eventually(t, 10*time.Second, func() error { return attributed(src.Facts(), pid, name) })
	}
	ip := run(t, "docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", "own")
	if o, ok := src.Facts().ByAddress(netip.MustParseAddr(ip)); !ok || o.Name != "own" {
		t.Errorf("%s is owned by %+v, %v; want own", ip, o, ok)
	}
	run(t, "docker", "rm", "-f", "own", "host")
	want(t, r)
	if o, ok := src.Facts().ByAddress(netip.MustParseAddr(ip)); ok {
		t.Errorf("%s is still owned by %+v", ip, o)
	}
}

// attributed checks that a process's cgroups name the container, and so does the
// id of its cgroup2 if the engine gives it one of its own.
func attributed(f engine.Facts, pid, name string) error {
	b, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		return err
	}
	var byPath []string
	for line := range strings.Lines(string(b)) {
		hierarchy, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		_, path, _ := strings.Cut(rest, ":")
		o, ok := f.ByCgroupPath(path + "/inner")
		if ok {
			byPath = append(byPath, o.Name)
		}
		if hierarchy != "0" || !ok {
			continue
		}
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
			fi, err := os.Stat(root + path)
			if err != nil {
				continue
			}
			if o, ok := f.ByCgroup(fi.Sys().(*syscall.Stat_t).Ino); !ok || o.Name != name {
				return fmt.Errorf("cgroup %s of %s is owned by %q", path, name, o.Name)
			}
			break
		}
	}
	if slices.Sort(byPath); len(byPath) == 0 || byPath[0] != name || byPath[len(byPath)-1] != name {
		return fmt.Errorf("cgroups of %s name %q:\n%s", name, byPath, b)
	}
	return nil
}

// The engine is killed with running containers that survive it, stays away
// longer than the grace period, and comes back.
func TestDockerKilled(t *testing.T) {
	d := dockerd(t, "--live-restore")
	dockerImage(t)
	const grace = 3 * time.Second
	r, _ := follow(t, dockerSource(t, grace))
	drun(t, "--name", "web", "-p", "8000:80", "bb")
	want(t, r, both("tcp", 8000, "web")...)
	mark := r.mark()

	d.stop(syscall.SIGKILL)
	d.run()
	dockerReady(t)
	eventually(t, 30*time.Second, func() error { return r.staleness() })
	want(t, r, both("tcp", 8000, "web")...)
	if log := r.since(mark); len(log) > 0 {
		t.Errorf("a restart of the engine moved %q", log)
	}

	d.stop(syscall.SIGKILL)
	eventually(t, 10*time.Second, func() error {
		if r.staleness() == nil {
			return errors.New("not stale")
		}
		return nil
	})
	if got := r.keys(); !slices.Equal(got, both("tcp", 8000, "web")) {
		t.Errorf("within the grace period the set is %q", got)
	}
	want(t, r)
	if err := r.staleness(); err == nil || !strings.Contains(err.Error(), "withdrawn after") {
		t.Errorf("stale: %v, want the withdrawal named", err)
	}
	d.run()
	want(t, r, both("tcp", 8000, "web")...)
}

// Without a proxy nothing listens in the guest: the container itself is dialled.
func TestDockerWithoutProxy(t *testing.T) {
	dockerd(t, "--userland-proxy=false")
	dockerImage(t)
	r, _ := follow(t, dockerSource(t, time.Hour))
	drun(t, "--name", "web", "-p", "127.0.0.1:8000:80", "bb", "httpd", "-f", "-p", "80", "-h", "/etc")
	want(t, r, "tcp 127.0.0.1:8000 web")
	eventually(t, 10*time.Second, func() error { _, err := reach(find(r, "tcp 127.0.0.1:8000")); return err })
}

// Defect 18, and the agent started before, during and after: whatever happens
// while it starts, at quiet it says what the engine says.
func TestDockerStartRaces(t *testing.T) {
	dockerd(t)
	dockerImage(t)
	// Defect 17: both families of several ports in the first list.
	drun(t, "--name", "before", "-p", "8000:80", "-p", "8001:81/udp", "bb")
	for i := range 8 {
		name := fmt.Sprintf("n%d", i)
		var wg sync.WaitGroup
		wg.Go(func() {
			for range 2 {
				_, _ = try("docker", "run", "-d", "--rm", "--name", name, "-p", fmt.Sprintf("127.0.0.1:%d:80", 9000+i), "bb")
				_, _ = try("docker", "kill", name)
				_, _ = try("docker", "run", "-d", "--name", name, "-p", fmt.Sprintf("127.0.0.1:%d:80", 9000+i), "bb")
			}
		})
		time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
		r, stop := follow(t, dockerSource(t, time.Hour))
		wg.Wait()
		want(t, r, allDockerPorts(t)...)
		stop()
	}
}

// operations is how many random operations a test does.
func operations(t testing.TB) int {
	t.Helper()
	n, err := strconv.Atoi(os.Getenv("FAIRLEAD_OPERATIONS"))
	if err != nil {
		return 500
	}
	return n
}

// Random operations: at quiet there is no difference from the engine's own
// listing, and what nobody touched never moved.
func TestDockerRandom(t *testing.T) {
	dockerd(t)
	dockerImage(t)
	r, _ := follow(t, dockerSource(t, time.Hour))
	run(t, "docker", "network", "create", "other")
	drun(t, "--name", "stays", "-p", "7999:80", "bb")
	want(t, r, both("tcp", 7999, "stays")...)
	mark := r.mark()
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	ports := []string{"-p 127.0.0.1:%d:80", "-p %d:80", "-p %d:80/udp", "-p [::1]:%d:80", "-p %[1]d:80 -p %[1]d:80/udp"}
	for i := range operations(t) {
		k := rnd.IntN(8)
		name := fmt.Sprintf("c%d", k)
		var args []string
		switch rnd.IntN(11) {
		case 0, 1, 2:
			flags := strings.Fields(fmt.Sprintf(ports[rnd.IntN(len(ports))], 8000+k))
			args = append(append([]string{"run", "-d", "--name", name}, flags...), "bb")
		case 3:
			args = []string{"run", "-d", "--rm", "--name", name, "-p", fmt.Sprint(8000+k, ":80"), "bb"}
		case 4:
			args = []string{"restart", "-t", "0", name}
		case 5:
			args = []string{"kill", name}
		case 6:
			args = []string{"start", name}
		case 7:
			args = []string{[]string{"pause", "unpause"}[rnd.IntN(2)], name}
		case 8:
			args = []string{"rename", name, fmt.Sprintf("c%d", rnd.IntN(8))}
		case 9:
			args = []string{"network", []string{"connect", "disconnect"}[rnd.IntN(2)], "other", name}
		case 10:
			args = []string{"rm", "-f", name}
		}
		_, _ = try("docker", args...) // many cannot be done; that is fine
		if i%50 == 49 {
			want(t, r, allDockerPorts(t)...)
		}
	}
	want(t, r, allDockerPorts(t)...)
	for _, l := range r.since(mark) {
		if strings.HasSuffix(l, ":7999") {
			t.Errorf("what nobody touched moved: %s", l)
		}
	}
}
