// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/containerd"
	"github.com/fairlead/fairlead/internal/source/engine"
)

// Not the default path: defect 25 is a check that looks there whatever is configured.
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
			if ids, err := try(cacheBin("nerdctl"), "-a", containerdSocket, "-n", ns, "ps", "-aq"); err == nil && ids != "" {
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
	return try(cacheBin("nerdctl"), append([]string{"-a", containerdSocket, "-n", namespace}, args...)...)
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
	startContainerd(t)
	containerdImage(t)
	src := containerdSource(t, time.Hour)
	r, _ := follow(t, src)
	want(t, r)
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
		{"rm -f of several ports", []step{start("-p", "8000:80", "-p", "8001:81/udp"), cmd("rm", "-f", "one")}, nil},
		{"rename", []step{start("-p", "8000:80"), cmd("rename", "one", "two")}, []string{"tcp 0.0.0.0:8000 two"}},
		// Defect 22.
		{"the end of an exec changes nothing", []step{start("-p", "8000:80"), cmd("exec", "one", "true")}, []string{"tcp 0.0.0.0:8000 one"}},
		// Defect 23.
		{"an update of a stopped container publishes nothing",
			[]step{start("-p", "8000:80"), cmd("stop", "one"), cmd("rename", "one", "two")}, nil},
		// Defect 24.
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

	// Defect 20.
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

// The engine is killed with running containers, which survive it, stays away
// longer than the grace period, and comes back.
func TestContainerdKilled(t *testing.T) {
	d := startContainerd(t)
	containerdImage(t)
	r, _ := follow(t, containerdSource(t, 3*time.Second))
	must(t, "run", "-d", "--name", "web", "-p", "8000:80", "bb")
	const web = "tcp 0.0.0.0:8000 web"
	want(t, r, web)
	mark := r.mark()

	d.stop(syscall.SIGKILL)
	d.run()
	containerdReady(t)
	eventually(t, 30*time.Second, func() error { return r.staleness() })
	want(t, r, web)
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
	if got := r.keys(); !slices.Equal(got, []string{web}) {
		t.Errorf("within the grace period the set is %q", got)
	}
	want(t, r)
	d.run()
	want(t, r, web)

	// A container that died while nobody looked is not resurrected.
	pid := must(t, "inspect", "-f", "{{.State.Pid}}", "web")
	d.stop(syscall.SIGKILL)
	run(t, "kill", "-9", pid)
	d.run()
	want(t, r)
}

// nerdctlPorts asks nerdctl itself which ports everything that runs publishes.
func nerdctlPorts(t testing.TB) []string {
	t.Helper()
	var keys []string
	for line := range strings.Lines(must(t, "ps", "-a", "--format", "{{.Status}}|{{.Names}} {{.Ports}}")) {
		state, rest, _ := strings.Cut(strings.TrimSpace(line), "|")
		// Without -a it leaves out what is paused, whose ports stay in place.
		if !strings.HasPrefix(state, "Up") && state != "Paused" {
			continue
		}
		name, ports, _ := strings.Cut(rest, " ")
		for p := range strings.SplitSeq(ports, ", ") {
			addr, spec, ok := strings.Cut(p, "->")
			if !ok {
				continue
			}
			_, proto, _ := strings.Cut(spec, "/")
			keys = append(keys, proto+" "+addr+" "+name)
		}
	}
	return keys
}

// Defect 21, and the agent started before, during and after.
func TestContainerdStartRaces(t *testing.T) {
	startContainerd(t)
	containerdImage(t)
	must(t, "run", "-d", "--name", "before", "-p", "8000:80", "-p", "8001:81/udp", "bb")
	for i := range 6 {
		name := fmt.Sprintf("n%d", i)
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _ = nerdctl("default", "run", "-d", "--name", name, "-p", fmt.Sprintf("127.0.0.1:%d:80", 9000+i), "bb")
			_, _ = nerdctl("default", "kill", name)
			_, _ = nerdctl("default", "rm", "-f", name)
			_, _ = nerdctl("default", "run", "-d", "--name", name, "-p", fmt.Sprintf("127.0.0.1:%d:80", 9000+i), "bb")
		})
		time.Sleep(time.Duration(rand.IntN(600)) * time.Millisecond)
		r, stop := follow(t, containerdSource(t, time.Hour))
		wg.Wait()
		want(t, r, nerdctlPorts(t)...)
		stop()
	}
}

// Random operations: at quiet there is no difference from nerdctl's own listing,
// and what nobody touched never moved.
func TestContainerdRandom(t *testing.T) {
	startContainerd(t)
	containerdImage(t)
	r, _ := follow(t, containerdSource(t, time.Hour))
	must(t, "run", "-d", "--name", "stays", "-p", "7999:80", "bb")
	want(t, r, "tcp 0.0.0.0:7999 stays")
	mark := r.mark()
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	ports := []string{"-p 127.0.0.1:%d:80", "-p %d:80", "-p %d:80/udp", "-p %[1]d:80 -p %[1]d:80/udp"}
	for i := range operations(t) {
		k := rnd.IntN(6)
		name := fmt.Sprintf("c%d", k)
		var args []string
		switch rnd.IntN(10) {
		case 0, 1, 2:
			flags := strings.Fields(fmt.Sprintf(ports[rnd.IntN(len(ports))], 8000+k))
			args = append(append([]string{"run", "-d", "--name", name}, flags...), "bb")
		case 3:
			args = []string{"exec", name, "true"}
		case 4:
			args = []string{"restart", name}
		case 5:
			args = []string{"kill", name}
		case 6:
			args = []string{"start", name}
		case 7:
			args = []string{[]string{"pause", "unpause"}[rnd.IntN(2)], name}
		case 8:
			args = []string{"rename", name, fmt.Sprintf("c%d", rnd.IntN(6))}
		case 9:
			args = []string{"rm", "-f", name}
		}
		_, _ = nerdctl("default", args...) // many cannot be done; that is fine
		if i%50 == 49 {
			want(t, r, nerdctlPorts(t)...)
		}
	}
	want(t, r, nerdctlPorts(t)...)
	for _, l := range r.since(mark) {
		if strings.HasSuffix(l, ":7999") {
			t.Errorf("what nobody touched moved: %s", l)
		}
	}
}
