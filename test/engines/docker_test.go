// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/docker"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

const dockerSocket = enclave.DockerSocket

// dockerdVariable names, in the environment, a directory with another dockerd and
// what it needs. Its firewall back end is nftables.
const dockerdVariable = "FAIRLEAD_DOCKERD"

// dockerd starts Debian's engine, or that of the environment, and waits until it answers.
func dockerd(t testing.TB, args ...string) *daemon {
	t.Helper()
	d := &daemon{t: t, args: enclave.Dockerd(args...)}
	if dir := os.Getenv(dockerdVariable); dir != "" {
		d.args[0] = filepath.Join(dir, "dockerd")
		d.args = append(d.args, "--firewall-backend=nftables", "--seccomp-profile=unconfined")
		// Debian's command line is older than what this engine takes by default.
		d.env = []string{"PATH=" + dir + ":" + os.Getenv("PATH"), "DOCKER_MIN_API_VERSION=1.41"}
	}
	d.start()
	dockerReady(t, d)
	t.Cleanup(func() { _, _ = try("docker", "network", "prune", "-f") })
	t.Cleanup(func() {
		// The next test starts with an empty engine.
		if d.Ended() {
			d.run(t)
			dockerReady(t, d)
		}
		dockerClear(t)
	})
	return d
}

func dockerReady(t testing.TB, d *daemon) {
	t.Helper()
	d.ready(t, func() error { _, err := try("docker", "version"); return err })
}

// dockerClear removes all containers but those of these ids, and waits until they are
// gone: one that ended with --rm keeps its name until it is removed.
func dockerClear(t testing.TB, keep ...string) {
	t.Helper()
	eventually(t, func() error {
		out, err := try("docker", "ps", "-aq", "--no-trunc")
		if err != nil {
			return err
		}
		left := without(strings.Fields(out), keep)
		if _, left, err = dockerInspect("{{.Id}}", left); err != nil || len(left) == 0 {
			return err
		}
		_, err = try("docker", append([]string{"rm", "-f"}, left...)...)
		return fmt.Errorf("containers %q were left (%v)", left, err)
	})
}

// dockerInspect inspects those containers that exist, and returns their ids too. The
// engine keeps listing a container that was renamed while it was removed.
func dockerInspect(format string, ids []string) (out string, there []string, err error) {
	there = ids
	for len(there) > 0 {
		if out, err = try("docker", append([]string{"inspect", "-f", format}, there...)...); err == nil {
			return out, there, nil
		}
		n := len(there)
		says := strings.ToLower(err.Error())
		there = slices.DeleteFunc(slices.Clone(there), func(id string) bool { return strings.Contains(says, "no such object: "+id) })
		if len(there) == n {
			return "", nil, err
		}
	}
	return "", nil, nil
}

func without(all, some []string) []string {
	return slices.DeleteFunc(all, func(s string) bool { return slices.Contains(some, s) })
}

// dockerPID returns the pid of a container's first process, 0 if it does not run.
func dockerPID(name string) func() (int, error) {
	return func() (int, error) {
		out, err := try("docker", "inspect", "-f", "{{.State.Pid}}", name)
		if err != nil {
			return 0, err
		}
		return strconv.Atoi(out)
	}
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
	// The agent starts before the engine, which is no error. It is notified of the
	// engine: its own retry comes minutes later.
	r, _ := follow(t, dockerSource(t, time.Hour))
	eventually(t, r.live)
	dockerd(t)
	dockerImage(t)
	// This one exists throughout and must never change.
	id := drun(t, "--name", "stays", "-p", "127.0.0.1:7999:80", "bb")
	const stays = "tcp 127.0.0.1:7999 stays"
	want(t, r, stays)
	began := r.mark()
	// A scenario leaves nothing to the next, however it ends.
	scenario := func(name string, do func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() { dockerClear(t, id); want(t, r, stays) })
			do(t)
		})
	}

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
			func(t *testing.T) []string { return published(t, "one") }},
		{"restart", func(t *testing.T) {
			drun(t, "--name", "one", "-p", "8000:80", "bb")
			run(t, "docker", "restart", "-t", "0", "one")
		}, func(*testing.T) []string { return both("tcp", 8000, "one") }},
		{"restart policy", func(t *testing.T) {
			drun(t, "--name", "one", "--restart", "always", "-p", "8000:80", "bb")
			replaced(t, killed(t, dockerPID("one")), dockerPID("one"))
		}, func(*testing.T) []string { return both("tcp", 8000, "one") }},
		{"restart policy that gives up", func(t *testing.T) {
			drun(t, "--name", "one", "--restart", "on-failure:1", "-p", "8000:80", "bb", "sh", "-c", "sleep 0.3; exit 1")
			eventually(t, func() error {
				now, err := try("docker", "inspect", "-f", "{{.State.Status}} {{.RestartCount}}", "one")
				if err == nil && now != "exited 1" {
					err = fmt.Errorf("it is %q", now)
				}
				return err
			})
		}, func(*testing.T) []string { return nil }},
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
			killed(t, dockerPID("one"))
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
		scenario(c.name, func(t *testing.T) {
			c.do(t)
			want(t, r, append(c.want(t), stays)...)
		})
	}

	scenario("pause and unpause keep the port", func(t *testing.T) {
		drun(t, "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
		pauses(t, r, func(verb string) { run(t, "docker", verb, "one") }, "tcp 127.0.0.1:8000 one", stays)
	})

	scenario("sctp is named, not dropped in silence", func(t *testing.T) {
		if _, err := try("docker", "run", "-d", "--name", "one", "-p", "8000:80", "-p", "8001:81/sctp", "bb"); err != nil {
			t.Logf("this kernel has no sctp (%v); the scripted engine covers it", err)
			return
		}
		want(t, r, append(both("tcp", 8000, "one"), stays)...)
		r.warned(t, "sctp is not supported")
		run(t, "docker", "rm", "-f", "one")
		want(t, r, stays)
		r.warned(t, "")
	})

	scenario("networks change where it is dialled", func(t *testing.T) {
		run(t, "docker", "network", "create", "--subnet", "10.99.0.0/24", "other")
		t.Cleanup(func() { dockerClear(t, id); run(t, "docker", "network", "rm", "other") })
		drun(t, "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
		want(t, r, "tcp 127.0.0.1:8000 one", stays)
		mark := r.mark()
		for _, c := range []struct {
			verb string
			has  bool
		}{{"connect", true}, {"disconnect", false}} {
			run(t, "docker", "network", c.verb, "other", "one")
			eventually(t, func() error {
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

	scenario("labels of Compose", func(t *testing.T) {
		drun(t, "--name", "shop-web-1", "--label", "com.docker.compose.project=shop",
			"--label", "com.docker.compose.service=web", "-p", "127.0.0.1:8000:80", "bb")
		want(t, r, "tcp 127.0.0.1:8000 shop-web-1", stays)
		eventually(t, func() error {
			l := find(r, "tcp 127.0.0.1:8000").Owner.Labels
			if l["com.docker.compose.project"] != "shop" || l["com.docker.compose.service"] != "web" {
				return fmt.Errorf("labels are %v", l)
			}
			return nil
		})
	})

	scenario("the declared port answers", func(t *testing.T) {
		drun(t, "--name", "one", "-p", "8000:80", "bb", "httpd", "-f", "-p", "80", "-h", "/etc")
		want(t, r, append(both("tcp", 8000, "one"), stays)...)
		for _, b := range r.bindings() {
			if b.Port != 8000 {
				continue
			}
			eventually(t, func() error { _, err := reach(b); return err })
		}
	})

	if log := r.since(began); slices.Contains(log, "-tcp 127.0.0.1:7999") {
		t.Errorf("a port that stayed was withdrawn: %q", log)
	}
}

// published returns the keys of one container.
func published(t testing.TB, name string) (keys []string) {
	t.Helper()
	eventually(t, func() error {
		all, err := dockerPorts()
		keys = slices.DeleteFunc(all, func(k string) bool { return !strings.HasSuffix(k, " "+name) })
		if err == nil && len(keys) == 0 {
			err = fmt.Errorf("the engine publishes nothing of %s", name)
		}
		return err
	})
	return keys
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

// dockerPorts asks the engine itself which ports everything that runs publishes.
func dockerPorts() ([]string, error) {
	ids, err := try("docker", "ps", "-q", "--no-trunc")
	if err != nil {
		return nil, err
	}
	const format = "{{.Name}}{{range $port, $all := .NetworkSettings.Ports}}{{range $all}} {{$port}} {{.HostIp}} {{.HostPort}}{{end}}{{end}}"
	out, _, err := dockerInspect(format, strings.Fields(ids))
	var keys []string
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		for p := range slices.Chunk(f[1:], 3) {
			_, proto, _ := strings.Cut(p[0], "/")
			keys = append(keys, fmt.Sprintf("%s %s %s", proto, net.JoinHostPort(p[1], p[2]), strings.TrimPrefix(f[0], "/")))
		}
	}
	return keys, err
}
