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
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/docker"
	"github.com/fairlead/fairlead/internal/source/engine"
	"github.com/fairlead/fairlead/test/enclave"
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
	// The agent is there before the engine, which is no failure. It hears of the
	// engine: by itself it would not look for minutes.
	r, _ := follow(t, dockerSource(t, time.Hour))
	eventually(t, 10*time.Second, func() error { return r.live() })
	dockerd(t)
	dockerImage(t)
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
			func(t *testing.T) []string { return published(dockerPorts(t), "one") }},
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
		{"restart policy that gives up", func(t *testing.T) {
			drun(t, "--name", "one", "--restart", "on-failure:1", "-p", "8000:80", "bb", "sh", "-c", "sleep 0.3; exit 1")
			eventually(t, time.Minute, func() error {
				if now := run(t, "docker", "inspect", "-f", "{{.State.Status}} {{.RestartCount}}", "one"); now != "exited 1" {
					return fmt.Errorf("it is %q", now)
				}
				return nil
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

// published returns the keys of one container.
func published(keys []string, name string) []string {
	return slices.DeleteFunc(keys, func(k string) bool { return !strings.HasSuffix(k, " "+name) })
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
func dockerPorts(t testing.TB) []string {
	t.Helper()
	ids := strings.Fields(run(t, "docker", "ps", "-q", "--no-trunc"))
	if len(ids) == 0 {
		return nil
	}
	const format = "{{.Name}}{{range $port, $all := .NetworkSettings.Ports}}{{range $all}} {{$port}} {{.HostIp}} {{.HostPort}}{{end}}{{end}}"
	var keys []string
	for line := range strings.Lines(run(t, "docker", append([]string{"inspect", "-f", format}, ids...)...)) {
		f := strings.Fields(line)
		for p := range slices.Chunk(f[1:], 3) {
			_, proto, _ := strings.Cut(p[0], "/")
			keys = append(keys, fmt.Sprintf("%s %s %s", proto, net.JoinHostPort(p[1], p[2]), strings.TrimPrefix(f[0], "/")))
		}
	}
	return keys
}
