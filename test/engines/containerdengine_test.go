// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// The engine is killed with running containers, which survive it, stays away
// longer than the grace period, and comes back.
func TestContainerdKilled(t *testing.T) {
	d := startContainerd(t)
	containerdImage(t)
	must(t, "run", "-d", "--name", "web", "-p", "8000:80", "bb")
	const web = "tcp 0.0.0.0:8000 web"

	engineKilled(t, d, containerdReady, func(t testing.TB, grace time.Duration) source { return containerdSource(t, grace) }, web)

	// A container that died while the engine was away does not come back.
	t.Run("away while a container ends", func(t *testing.T) {
		r, _ := follow(t, containerdSource(t, time.Hour))
		want(t, r, web)
		p, err := os.FindProcess(replaced(t, 0, containerdPID("web")))
		if err != nil {
			t.Fatal(err)
		}
		d.Stop(syscall.SIGKILL)
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		d.run(t)
		containerdReady(t, d)
		want(t, r)
	})
}

// nerdctlPorts asks nerdctl itself which ports everything that runs publishes.
func nerdctlPorts() ([]string, error) {
	out, err := nerdctl("default", "ps", "-a", "--format", "{{.Status}}|{{.Names}} {{.Ports}}")
	var keys []string
	for line := range strings.Lines(out) {
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
	return keys, err
}

// The agent starts before, during and after the operations. Once they have ended, it
// agrees with the engine. With the incumbent, an exit during the first list leaves a
// port behind.
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
		agree(t, r, nerdctlPorts)
		stop()
	}
}

// After random operations the agent agrees with nerdctl's own list, and containers that
// were not touched never changed.
func TestContainerdRandom(t *testing.T) {
	startContainerd(t)
	containerdImage(t)
	r, _ := follow(t, containerdSource(t, time.Hour))
	must(t, "run", "-d", "--name", "stays", "-p", "7999:80", "bb")
	want(t, r, "tcp 0.0.0.0:7999 stays")
	mark := r.mark()
	ports := []string{"-p 127.0.0.1:%d:80", "-p %d:80", "-p %d:80/udp", "-p %[1]d:80 -p %[1]d:80/udp"}
	churn(t, func(rnd *rand.Rand) []string {
		k := rnd.IntN(6)
		name := churned(k)
		switch rnd.IntN(10) {
		case 0, 1, 2:
			flags := strings.Fields(fmt.Sprintf(ports[rnd.IntN(len(ports))], 8000+k))
			return append(append([]string{"run", "-d", "--name", name}, flags...), "bb")
		case 3:
			return []string{"exec", name, "true"}
		case 4:
			return []string{"restart", name}
		case 5:
			return []string{"kill", name}
		case 6:
			return []string{"start", name}
		case 7:
			return []string{[]string{"pause", "unpause"}[rnd.IntN(2)], name}
		case 8:
			return []string{"rename", name, churned(rnd.IntN(6))}
		}
		return []string{"rm", "-f", name}
	}, func(args []string) error { _, err := nerdctl("default", args...); return err },
		func() { agree(t, r, nerdctlPorts); single(t) })
	r.untouched(t, mark, ":7999")
}

// single removes all but one container of each name. A name becomes free when its
// container starts a second time, and commands refuse a name that two containers share.
func single(t testing.TB) {
	t.Helper()
	var more []string
	seen := make(map[string]bool)
	for line := range strings.Lines(must(t, "ps", "-a", "--no-trunc", "--format", "{{.ID}} {{.Names}}")) {
		id, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if seen[name] {
			more = append(more, id)
		}
		seen[name] = true
	}
	if len(more) > 0 {
		t.Logf("%d containers share their names with others", len(more))
		_, _ = nerdctl("default", append([]string{"rm", "-f"}, more...)...)
	}
}

// A port of CNI is only a NAT rule: no socket listens. It is reachable from the host
// and owned by its container.
func TestReachContainerdPorts(t *testing.T) {
	startContainerd(t)
	containerdImage(t)
	p := startPeers(t, "--source", "socket,nat,containerd", "--containerd-socket", containerdSocket)
	serve := []string{"bb", "httpd", "-f", "-p", "80", "-h", "/etc"}
	must(t, append([]string{"run", "-d", "--name", "web", "-p", "8000:80"}, serve...)...)
	must(t, append([]string{"run", "-d", "--name", "inner", "-p", "127.0.0.1:8001:80"}, serve...)...)
	for key, name := range map[string]string{"tcp 0.0.0.0:8000": "web", "tcp 127.0.0.1:8001": "inner"} {
		p.reach(key, "HTTP/1.")
		p.owned(key, port.OwnerContainer, name)
		eventually(t, func() error {
			var sources []string
			for _, o := range p.active(key).Origins {
				sources = append(sources, o.Source)
			}
			slices.Sort(sources)
			if sources = slices.Compact(sources); !slices.Equal(sources, []string{"containerd", "nat"}) {
				return fmt.Errorf("%s is seen by %q, want containerd and nat", key, sources)
			}
			return nil
		})
	}
	p.ruled("8000/tcp", port.OwnerContainer, "default", "web")
	// A rule that the engine does not declare is attributed by its target.
	var ip string
	eventually(t, func() (err error) {
		if ip, err = nerdctl("default", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", "web"); err == nil && ip == "" {
			err = errors.New("it has no address")
		}
		return err
	})
	redirect(t, "8099", ip+":80")
	p.ruled("8099/tcp", port.OwnerContainer, "default", "web")
	must(t, "rm", "-f", "web", "inner")
	p.gone("tcp 0.0.0.0:8000")
	p.gone("tcp 127.0.0.1:8001")
	p.ruled("8099/tcp", port.OwnerUnknown, "", "")
}
