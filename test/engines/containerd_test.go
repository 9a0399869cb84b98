// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/containerd"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// Not the default path, at which the incumbent checks the engine whatever is
// configured.
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
	containerdReady(t, d)
	t.Cleanup(func() {
		// The next test starts with an empty engine.
		if d.Ended() {
			d.run(t)
			containerdReady(t, d)
		}
		for _, ns := range []string{"default", "other"} {
			containerdClear(t, ns)
		}
	})
	return d
}

func containerdReady(t testing.TB, d *daemon) {
	t.Helper()
	d.ready(t, func() error { _, err := try("ctr", "-a", containerdSocket, "version"); return err })
}

// containerdClear removes all containers of a namespace but those of these ids, and
// waits until they are gone. It does not go by names: two containers may share one, as
// a name is free as soon as its container has ended.
func containerdClear(t testing.TB, namespace string, keep ...string) {
	t.Helper()
	eventually(t, func() error {
		out, err := nerdctl(namespace, "ps", "-aq", "--no-trunc")
		if err != nil {
			return err
		}
		left := without(strings.Fields(out), keep)
		if len(left) == 0 {
			return nil
		}
		_, err = nerdctl(namespace, append([]string{"rm", "-f"}, left...)...)
		return fmt.Errorf("containers %q were left (%v)", left, err)
	})
}

// containerdPID returns the pid of a container's first process, 0 if it does not run.
func containerdPID(name string) func() (int, error) {
	return func() (int, error) {
		out, err := nerdctl("default", "inspect", "-f", "{{.State.Pid}}", name)
		if err != nil {
			return 0, err
		}
		return strconv.Atoi(out)
	}
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
	// The agent starts before the engine, which is no error. It is notified of the
	// engine: its own retry comes minutes later.
	src := containerdSource(t, time.Hour)
	r, _ := follow(t, src)
	eventually(t, r.live)
	startContainerd(t)
	containerdImage(t)
	id := must(t, "run", "-d", "--name", "stays", "-p", "127.0.0.1:7999:80", "bb")
	const stays = "tcp 127.0.0.1:7999 stays"
	want(t, r, stays)
	began := r.mark()
	// A scenario leaves nothing to the next, however it ends.
	scenario := func(name string, do func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() { containerdClear(t, "default", id); want(t, r, stays) })
			do(t)
		})
	}

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
		{"restart policy", []step{func(t *testing.T) {
			// Every ten seconds, containerd looks for containers that should run, by
			// their label, and do not. A new one may be among these: containerd then
			// starts it, so that nerdctl fails, or starts it a second time.
			args := []string{"run", "-d", "--name", "one", "--restart", "always", "-p", "8000:80", "bb"}
			if _, err := nerdctl("default", args...); err != nil {
				t.Logf("containerd came first: %v", err)
			}
			// Or else it starts again what is removed.
			t.Cleanup(func() { _, _ = nerdctl("default", "update", "--restart", "no", "one") })
			pid := containerdPID("one")
			now := replaced(t, killed(t, pid), pid)
			eventually(t, func() error {
				err := attributed(src.Facts(), now, "one")
				if err != nil {
					now, _ = pid() // started a second time
				}
				return err
			})
		}}, []string{"tcp 0.0.0.0:8000 one"}},
		{"rm -f of several ports", []step{start("-p", "8000:80", "-p", "8001:81/udp"), cmd("rm", "-f", "one")}, nil},
		{"rename", []step{start("-p", "8000:80"), cmd("rename", "one", "two")}, []string{"tcp 0.0.0.0:8000 two"}},
		// The incumbent loses the container's ports.
		{"the end of an exec changes nothing", []step{start("-p", "8000:80"), cmd("exec", "one", "true")}, []string{"tcp 0.0.0.0:8000 one"}},
		// For the incumbent it does.
		{"an update of a stopped container publishes nothing",
			[]step{start("-p", "8000:80"), cmd("stop", "one"), cmd("rename", "one", "two")}, nil},
		// The incumbent takes a missing label for an error.
		{"no ports, no error", []step{start()}, nil},
		{"host network declares nothing", []step{start("--network", "host")}, nil},
		{"killed from outside", []step{start("-p", "8000:80"), func(t *testing.T) {
			killed(t, containerdPID("one"))
		}}, nil},
		{"created, not started", []step{cmd("create", "--name", "one", "-p", "8000:80", "bb")}, nil},
		{"foreground with --rm", []step{func(t *testing.T) {
			var wg sync.WaitGroup
			wg.Go(func() {
				_, err := nerdctl("default", "run", "--rm", "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
				if err == nil {
					t.Error("a container that was killed ended well")
				}
			})
			// Before the scenario's own cleanup, or the command would create the
			// container again.
			t.Cleanup(func() { containerdClear(t, "default", id); wg.Wait() })
			want(t, r, stays, "tcp 127.0.0.1:8000 one")
			must(t, "kill", "one")
			wg.Wait()
		}}, nil},
	} {
		scenario(c.name, func(t *testing.T) {
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
			r.warned(t, "")
		})
	}

	// The incumbent watches the default namespace.
	scenario("every namespace", func(t *testing.T) {
		t.Cleanup(func() { containerdClear(t, "other") })
		if _, err := nerdctl("other", "run", "-d", "--name", "there", "-p", "127.0.0.1:8000:80", "bb"); err != nil {
			t.Fatal(err)
		}
		want(t, r, stays, "tcp 127.0.0.1:8000 there")
		if o := find(r, "tcp 127.0.0.1:8000").Owner; o.Namespace != "other" {
			t.Errorf("owner is %+v, want namespace other", o)
		}
	})

	// The engine chooses the number.
	scenario("random port", func(t *testing.T) {
		must(t, "run", "-d", "--name", "one", "-p", "80", "bb")
		agree(t, r, func() ([]string, error) {
			keys, err := nerdctlPorts()
			if err == nil && len(keys) != 2 {
				err = fmt.Errorf("the engine publishes %q", keys)
			}
			return keys, err
		})
	})

	scenario("pause and unpause keep the port", func(t *testing.T) {
		must(t, "run", "-d", "--name", "one", "-p", "127.0.0.1:8000:80", "bb")
		pauses(t, r, func(verb string) { must(t, verb, "one") }, "tcp 127.0.0.1:8000 one", stays)
	})

	// There is no listening socket behind a port of CNI portmap, and 127.0.0.1
	// answers only by a NAT rule.
	scenario("the declared port answers, and facts name it", func(t *testing.T) {
		must(t, "run", "-d", "--name", "one", "-p", "8000:80", "bb", "httpd", "-f", "-p", "80", "-h", "/etc")
		want(t, r, "tcp 0.0.0.0:8000 one", stays)
		var b port.Binding
		eventually(t, func() error {
			if b = find(r, "tcp 0.0.0.0:8000"); len(b.Dial) != 2 {
				return fmt.Errorf("dialled at %v, want the guest's address and the container's", b.Dial)
			}
			return nil
		})
		for _, a := range b.Dial {
			only := b
			only.Dial = []netip.AddrPort{a}
			eventually(t, func() error { _, err := reach(only); return err })
		}
		addressOf(t, src.Facts(), b.Dial[1].Addr(), "one")
		eventually(t, func() error {
			pid, err := containerdPID("one")()
			if err != nil {
				return err
			}
			return attributed(src.Facts(), pid, "one")
		})
	})

	if log := r.since(began); slices.Contains(log, "-tcp 127.0.0.1:7999") {
		t.Errorf("a port that stayed was withdrawn: %q", log)
	}
}
