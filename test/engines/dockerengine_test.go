// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
)

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
		eventually(t, func() error {
			pid, err := dockerPID(name)()
			if err != nil {
				return err
			}
			return attributed(src.Facts(), pid, name)
		})
	}
	ip := netip.MustParseAddr(run(t, "docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", "own"))
	addressOf(t, src.Facts(), ip, "own")
	run(t, "docker", "rm", "-f", "own", "host")
	want(t, r)
	addressOf(t, src.Facts(), ip, "")
}

// addressOf waits until the owner of an address has that name, or there is none.
func addressOf(t testing.TB, f registry.Facts, a netip.Addr, name string) {
	t.Helper()
	eventually(t, func() error {
		if o, ok := f.ByAddress(a); ok != (name != "") || o.Name != name {
			return fmt.Errorf("%s is owned by %+v, %v; want %q", a, o, ok, name)
		}
		return nil
	})
}

// attributed checks that the cgroups of a process name the container, as must the id of
// its cgroup2 if the engine gives it one.
func attributed(f registry.Facts, pid int, name string) error {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
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

// The engine is killed with running containers that survive it, comes back, stays
// away longer than the grace period, and comes back again.
func TestDockerKilled(t *testing.T) {
	d := dockerd(t, "--live-restore")
	dockerImage(t)
	drun(t, "--name", "web", "-p", "8000:80", "bb")
	engineKilled(t, d, dockerReady, func(t testing.TB, grace time.Duration) source { return dockerSource(t, grace) }, both("tcp", 8000, "web")...)
}

// engineKilled checks that ports stay when the engine comes back within the grace period, and are
// withdrawn after it.
func engineKilled(t *testing.T, d *daemon, ready func(testing.TB, *daemon), from func(t testing.TB, grace time.Duration) source, web ...string) {
	t.Run("back within the grace period", func(t *testing.T) {
		r, _ := follow(t, from(t, time.Hour))
		want(t, r, web...)
		mark, goroutines := r.mark(), runtime.NumGoroutine()
		// The same source throughout: it must keep no state of an engine that is gone.
		for range 5 {
			before, _ := r.losses()
			d.Stop(syscall.SIGKILL)
			d.run(t)
			ready(t, d)
			r.back(t, before)
			want(t, r, web...)
		}
		if log := r.since(mark); len(log) > 0 {
			t.Errorf("restarts of the engine moved %q", log)
		}
		flat(t, goroutines)
	})

	t.Run("away for longer", func(t *testing.T) {
		r, _ := follow(t, from(t, 3*time.Second))
		want(t, r, web...)
		d.Stop(syscall.SIGKILL)
		withdrawn(t, r, len(web))
		d.run(t)
		ready(t, d)
		want(t, r, web...)
	})
}

// withdrawn waits until the ports of an engine that is gone are withdrawn, and checks
// that this was not before the grace period.
func withdrawn(t testing.TB, r *recorder, stood int) {
	t.Helper()
	want(t, r)
	eventually(t, func() error {
		if err := r.live(); err == nil || !strings.Contains(err.Error(), "withdrawn after") {
			return fmt.Errorf("stale: %v, want the withdrawal named", err)
		}
		return nil
	})
	if _, n := r.losses(); n != stood {
		t.Errorf("%d ports stood when the engine was lost, want %d", n, stood)
	}
}

// An engine whose containers end with it, killed or stopped: only those that run again
// by their restart policy remain.
func TestDockerExitStopsContainers(t *testing.T) {
	d := dockerd(t)
	dockerImage(t)
	r, _ := follow(t, dockerSource(t, time.Hour))
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Cleanup(func() {
				if d.Ended() {
					d.run(t)
				}
				dockerReady(t, d)
				dockerClear(t)
				want(t, r)
			})
			drun(t, "--name", "again", "--restart", "always", "-p", "127.0.0.1:8000:80", "bb")
			drun(t, "--name", "gone", "-p", "8001:80", "bb")
			want(t, r, append(both("tcp", 8001, "gone"), "tcp 127.0.0.1:8000 again")...)
			d.Stop(sig)
			eventually(t, r.dead)
			d.run(t)
			dockerReady(t, d)
			want(t, r, "tcp 127.0.0.1:8000 again")
			agree(t, r, dockerPorts)
		})
	}
}

// Without a proxy nothing listens in the guest: the agent dials the container itself.
func TestDockerWithoutProxy(t *testing.T) {
	dockerd(t, "--userland-proxy=false")
	dockerImage(t)
	r, _ := follow(t, dockerSource(t, time.Hour))
	drun(t, "--name", "web", "-p", "127.0.0.1:8000:80", "bb", "httpd", "-f", "-p", "80", "-h", "/etc")
	want(t, r, "tcp 127.0.0.1:8000 web")
	eventually(t, func() error { _, err := reach(find(r, "tcp 127.0.0.1:8000")); return err })
}

// The agent starts before, during and after the operations. Once they have ended, it
// agrees with the engine. The incumbent lists first and subscribes later, and its list
// of several ports of both families conflicts with itself.
func TestDockerStartRaces(t *testing.T) {
	dockerd(t)
	dockerImage(t)
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
		agree(t, r, dockerPorts)
		stop()
	}
}

// After random operations the agent agrees with the engine's own list, and containers
// that were not touched never changed.
func TestDockerRandom(t *testing.T) {
	dockerd(t)
	dockerImage(t)
	r, _ := follow(t, dockerSource(t, time.Hour))
	run(t, "docker", "network", "create", "other")
	drun(t, "--name", "stays", "-p", "7999:80", "bb")
	want(t, r, both("tcp", 7999, "stays")...)
	mark := r.mark()
	ports := []string{"-p 127.0.0.1:%d:80", "-p %d:80", "-p %d:80/udp", "-p [::1]:%d:80", "-p %[1]d:80 -p %[1]d:80/udp"}
	churn(t, func(rnd *rand.Rand) []string {
		k := rnd.IntN(8)
		name := churned(k)
		switch rnd.IntN(11) {
		case 0, 1, 2:
			flags := strings.Fields(fmt.Sprintf(ports[rnd.IntN(len(ports))], 8000+k))
			return append(append([]string{"run", "-d", "--name", name}, flags...), "bb")
		case 3:
			return []string{"run", "-d", "--rm", "--name", name, "-p", fmt.Sprint(8000+k, ":80"), "bb"}
		case 4:
			return []string{"restart", "-t", "0", name}
		case 5:
			return []string{"kill", name}
		case 6:
			return []string{"start", name}
		case 7:
			return []string{[]string{"pause", "unpause"}[rnd.IntN(2)], name}
		case 8:
			return []string{"rename", name, churned(rnd.IntN(8))}
		case 9:
			return []string{"network", []string{"connect", "disconnect"}[rnd.IntN(2)], "other", name}
		}
		return []string{"rm", "-f", name}
	}, func(args []string) error { _, err := try("docker", args...); return err },
		func() { agree(t, r, dockerPorts) })
	r.untouched(t, mark, ":7999")
}

// A published port is reachable from the host and owned by its container, whether it is
// a proxy's socket, a NAT rule, or a socket of a container in the guest's own network.
func TestReachDockerPorts(t *testing.T) {
	for _, proxy := range []bool{true, false} {
		t.Run(fmt.Sprintf("proxy %v", proxy), func(t *testing.T) {
			p := startPeers(t, "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
			dockerd(t, fmt.Sprintf("--userland-proxy=%v", proxy))
			dockerImage(t)
			serve := []string{"bb", "httpd", "-f", "-p", "80", "-h", "/etc"}
			drun(t, append([]string{"--name", "web", "-p", "8000:80"}, serve...)...)
			drun(t, append([]string{"--name", "inner", "-p", "127.0.0.1:8001:80"}, serve...)...)
			for key, name := range map[string]string{"tcp 0.0.0.0:8000": "web", "tcp 127.0.0.1:8001": "inner"} {
				p.reach(key, "HTTP/1.")
				p.owned(key, port.OwnerContainer, name)
			}
			run(t, "docker", "rm", "-f", "web", "inner")
			p.gone("tcp 0.0.0.0:8000")
			p.gone("tcp 127.0.0.1:8001")
			t.Logf("the agent holds %d KiB", p.agent.usage(t).RSS>>10)
		})
	}
}
