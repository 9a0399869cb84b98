// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/containerd"
	"github.com/fairlead/fairlead/internal/source/engine"
	"github.com/fairlead/fairlead/test/enclave"
)

// Not the default path, where the incumbent looks whether the engine is ready,
// whatever is configured.
const containerdSocket = "/run/elsewhere/containerd.sock"

// startContainerd starts Debian's containerd with empty data and waits until it answers.
func startContainerd(t testing.TB) *daemon {
	t.Helper()
	root, err := os.MkdirTemp("/var/lib/containerd", "")
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "config.toml")
	// The CRI lowers the oom score of what it starts, which not every root may.
	text := fmt.Sprintf("version = 2\nroot = %q\nstate = \"/run/containerd\"\n[grpc]\n  address = %q\n"+
		"[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"docker.io/library/bb:latest\"\n  restrict_oom_score_adj = true\n", root, containerdSocket)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	d := start(t, "containerd", "--config", config)
	containerdReady(t)
	t.Cleanup(func() {
		for _, ns := range []string{"default", "other"} {
			if ids, err := try(enclave.Tool("nerdctl"), "-a", containerdSocket, "-n", ns, "ps", "-aq"); err == nil && ids != "" {
				_, _ = nerdctl(ns, append([]string{"rm", "-f"}, strings.Fields(ids)...)...)
			}
		}
	})
	return d
}

func containerdReady(t testing.TB) {
	t.Helper()
	eventually(t, 60*time.Second, func() error { _, err := try("ctr", "-a", containerdSocket, "version"); return err })
}

// nerdctl runs one command in a namespace.
func nerdctl(namespace string, args ...string) (string, error) {
	if args[0] == "run" || args[0] == "create" {
		args = slices.Insert(slices.Clone(args), 1, "--cgroup-parent", "/"+cgroupParent(), "--stop-timeout", "0")
	}
	if args[0] == "stop" || args[0] == "restart" {
		args = slices.Insert(slices.Clone(args), 1, "-t", "0")
	}
	return try(enclave.Tool("nerdctl"), append([]string{"-a", containerdSocket, "-n", namespace}, args...)...)
}

// must is nerdctl in the default namespace, for what has to work.
func must(t testing.TB, args ...string) string {
	t.Helper()
	out, err := nerdctl("default", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func containerdImage(t testing.TB) {
	t.Helper()
	archive := imageArchive(t)
	for _, ns := range []string{"default", "other"} {
		if _, err := nerdctl(ns, "load", "-i", archive); err != nil {
			t.Fatal(err)
		}
	}
}

func containerdSource(t testing.TB, grace time.Duration) *containerd.Source {
	t.Helper()
	s, err := containerd.New(containerd.Options{
		Sockets: []string{containerdSocket}, Logger: logger(t), Retry: engine.Retry{Grace: grace},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestContainerdScenarios(t *testing.T) {
	// The agent is there before the engine, which is no failure. It hears of the
	// engine: by itself it would not look for minutes.
	src := containerdSource(t, time.Hour)
	r, _ := follow(t, src)
	eventually(t, 10*time.Second, r.live)
	startContainerd(t)
	containerdImage(t)
	must(t, "run", "-d", "--name", "stays", "-p", "127.0.0.1:7999:80", "bb")
	const stays = "tcp 127.0.0.1:7999 stays"
	want(t, r, stays)
	began := r.mark()

	type step = func(t *testing.T)
	cmd := func(args ...string) step { return func(t *testing.T) { must(t, args...) } }
	start := func(flags ...string) step {
		return func(t *testing.T) {
			must(t, append(append([]string{"run", "-d", "--name", "one"}, flags...), "bb")...)
		}
	}
	for _, c := range []struct {
		name string
		do   []step
		want []string
	}{
		{"address 127.0.0.1", []step{start("-p", "127.0.0.1:8000:80")}, []string{"tcp 127.0.0.1:8000 one"}},
		{"specific address", []step{start("-p", nodeAddr+":8000:80")}, []string{"tcp " + nodeAddr + ":8000 one"}},
		{"no address", []step{start("-p", "8000:80")}, []string{"tcp 0.0.0.0:8000 one"}},
		{"range", []step{start("-p", "127.0.0.1:8000-8002:80-82")},
			[]string{"tcp 127.0.0.1:8000 one", "tcp 127.0.0.1:8001 one", "tcp 127.0.0.1:8002 one"}},
		{"tcp and udp on one number", []step{start("-p", "127.0.0.1:53:53/tcp", "-p", "127.0.0.1:53:53/udp")},
			[]string{"tcp 127.0.0.1:53 one", "udp 127.0.0.1:53 one"}},
		{"stop", []step{start("-p", "8000:80"), cmd("stop", "one")}, nil},
		{"kill", []step{start("-p", "8000:80"), cmd("kill", "one")}, nil},
		{"stop and start", []step{start("-p", "8000:80"), cmd("stop", "one"), cmd("start", "one")}, []string{"tcp 0.0.0.0:8000 one"}},
		{"restart", []step{start("-p", "8000:80"), cmd("restart", "one")}, []string{"tcp 0.0.0.0:8000 one"}},
		{"restart policy", []step{start("--restart", "always", "-p", "8000:80"), func(t *testing.T) {
			pid := must(t, "inspect", "-f", "{{.State.Pid}}", "one")
			run(t, "kill", "-9", pid)
			// containerd looks every ten seconds.
			eventually(t, time.Minute, func() error {
				if now := must(t, "inspect", "-f", "{{.State.Pid}}", "one"); now == pid || now == "0" {
					return fmt.Errorf("pid is %s, was %s", now, pid)
				}
				return nil
			})
		}}, []string{"tcp 0.0.0.0:8000 one"}},
		{"rm -f of several ports", []step{start("-p", "8000:80", "-p", "8001:81/udp"), cmd("rm", "-f", "one")}, nil},
		{"rename", []step{start("-p", "8000:80"), cmd("rename", "one", "two")}, []string{"tcp 0.0.0.0:8000 two"}},
		// It costs the incumbent's container its ports.
		{"the end of an exec changes nothing", []step{start("-p", "8000:80"), cmd("exec", "one", "true")}, []string{"tcp 0.0.0.0:8000 one"}},
		// In the incumbent it does.
		{"an update of a stopped container publishes nothing",
			[]step{start("-p", "8000:80"), cmd("stop", "one"), cmd("rename", "one", "two")}, nil},
		// The incumbent takes a missing label for an error.
		{"no ports, no error", []step{start()}, nil},
		{"host network declares nothing", []step{start("--network", "host")}, nil},
		{"killed from outside", []step{start("-p", "8000:80"), func(t *testing.T) {
			run(t, "kill", "-9", must(t, "inspect", "-f", "{{.State.Pid}}", "one"))
		}}, nil},
		{"created, not started", []step{cmd("create", "--name", "one", "-p", "8000:80", "bb")}, nil},
		{"foreground with --rm", []step{func(t *testing.T) {
			done := make(chan error, 1)
			go func() {
				_, err := nerdctl("default", "run", "--rm", "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
				done <- err
			}()
			want(t, r, stays, "tcp 127.0.0.1:8000 one")
			must(t, "kill", "one")
			if err := <-done; err == nil {
				t.Error("a container that was killed ended well")
			}
		}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			mark := r.mark()
			for _, do := range c.do {
				do(t)
			}
			want(t, r, append(slices.Clone(c.want), stays)...)
			if c.name == "the end of an exec changes nothing" {
				time.Sleep(200 * time.Millisecond)
				if log := r.since(mark); len(log) != 1 {
					t.Errorf("moved %q, want one appearance", log)
				}
			}
			for _, name := range []string{"one", "two"} {
				_, _ = nerdctl("default", "rm", "-f", name)
			}
			want(t, r, stays)
			if w := r.warned(); len(w) > 0 {
				t.Errorf("warnings: %q", w)
			}
		})
	}

	// The incumbent watches the default namespace.
	t.Run("every namespace", func(t *testing.T) {
		if _, err := nerdctl("other", "run", "-d", "--name", "there", "-p", "127.0.0.1:8000:80", "bb"); err != nil {
			t.Fatal(err)
		}
		want(t, r, stays, "tcp 127.0.0.1:8000 there")
		if o := find(r, "tcp 127.0.0.1:8000").Owner; o.Namespace != "other" {
			t.Errorf("owner is %+v, want namespace other", o)
		}
		_, _ = nerdctl("other", "rm", "-f", "there")
		want(t, r, stays)
	})

	// The engine chooses the number.
	t.Run("random port", func(t *testing.T) {
		must(t, "run", "-d", "--name", "one", "-p", "80", "bb")
		keys := nerdctlPorts(t)
		if len(keys) != 2 {
			t.Fatalf("the engine publishes %q", keys)
		}
		want(t, r, keys...)
		must(t, "rm", "-f", "one")
		want(t, r, stays)
	})

	t.Run("pause and unpause keep the port", func(t *testing.T) {
		must(t, "run", "-d", "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
		want(t, r, "tcp 127.0.0.1:8000 one", stays)
		mark := r.mark()
		for _, c := range []struct {
			verb   string
			paused bool
		}{{"pause", true}, {"unpause", false}} {
			must(t, c.verb, "one")
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
		must(t, "rm", "-f", "one")
		want(t, r, stays)
	})

	// There is no listening socket behind a port of CNI portmap, and 127.0.0.1
	// answers only by a NAT rule.
	t.Run("the declared port answers, and facts name it", func(t *testing.T) {
		must(t, "run", "-d", "--name", "one", "-p", "8000:80", "bb", "httpd", "-f", "-p", "80", "-h", "/etc")
		want(t, r, "tcp 0.0.0.0:8000 one", stays)
		b := find(r, "tcp 0.0.0.0:8000")
		if len(b.Dial) != 2 {
			t.Fatalf("dialled at %v, want the guest's address and the container's", b.Dial)
		}
		for _, a := range b.Dial {
			only := b
			only.Dial = []netip.AddrPort{a}
			eventually(t, 10*time.Second, func() error { _, err := reach(only); return err })
		}
		if o, ok := src.Facts().ByAddress(b.Dial[1].Addr()); !ok || o.Name != "one" {
			t.Errorf("%s is owned by %+v, %v", b.Dial[1].Addr(), o, ok)
		}
		pid := must(t, "inspect", "-f", "{{.State.Pid}}", "one")
		if err := attributed(src.Facts(), pid, "one"); err != nil {
			t.Error(err)
		}
		must(t, "rm", "-f", "one")
		want(t, r, stays)
	})

	if log := r.since(began); slices.Contains(log, "-tcp 127.0.0.1:7999") {
		t.Errorf("a port that stayed was withdrawn: %q", log)
	}
}
