// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package nat

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/netns"
	"github.com/fairlead/fairlead/test/program"
	"github.com/fairlead/fairlead/test/relay"
)

// wish is a line of a corpus file that a relay can show: where, and what may
// answer there.
type wish map[netip.AddrPort]map[netip.AddrPort]bool

// wishes reads what a corpus file states, but for UDP and what is withheld.
func wishes(t *testing.T, want string) wish {
	t.Helper()
	w := wish{}
	for line := range strings.Lines(want) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "tcp" || strings.Contains(line, "(") {
			continue
		}
		at := netip.MustParseAddrPort(f[1])
		host := netip.AddrPortFrom(port.Loopback(at.Addr()), at.Port())
		if w[host] == nil {
			w[host] = map[netip.AddrPort]bool{}
		}
		_, dial, _ := strings.Cut(line, "] ")
		for _, d := range strings.Fields(dial) {
			if a, err := netip.ParseAddrPort(d); err == nil && a.Addr() != at.Addr() && !isGuests(a.Addr()) {
				w[host][a] = true
			}
		}
	}
	return w
}

func isGuests(a netip.Addr) bool {
	return a == netip.MustParseAddr("192.0.2.2") || a == netip.MustParseAddr("2001:db8::2")
}

// pods makes a namespace behind docker0 in which every target answers with its
// own name.
func (w *world) pods(targets map[netip.AddrPort]bool) {
	w.t.Helper()
	pods, err := netns.New()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = pods.Close() })
	w.sh(fmt.Sprintf(`/usr/sbin/ip link add pod0 type veth peer name eth0 netns /proc/%d/fd/%d
/usr/sbin/ip link set pod0 master docker0 up`, os.Getpid(), pods.FD()))
	script := `/usr/sbin/ip addr add 172.17.255.254/16 dev eth0
/usr/sbin/ip addr add fd00:17::ffff/64 dev eth0 nodad
/usr/sbin/ip link set eth0 up
/usr/sbin/ip route add default via 172.17.0.1
/usr/sbin/ip -6 route add default via fd00:17::1
`
	guest := ""
	for _, a := range slices.SortedFunc(maps.Keys(addresses(targets)), netip.Addr.Compare) {
		switch {
		case a.IsLoopback():
		case a.Is4():
			script += fmt.Sprintf("/usr/sbin/ip addr add %s/32 dev lo\n", a)
			guest += fmt.Sprintf("/usr/sbin/ip route add %s/32 dev docker0\n", a)
		default:
			script += fmt.Sprintf("/usr/sbin/ip -6 addr add %s/128 dev eth0 nodad\n", a)
			guest += fmt.Sprintf("/usr/sbin/ip -6 route add %s/128 dev docker0\n", a)
		}
	}
	if err := pods.Do(func() error {
		out, err := exec.Command("sh", "-euc", script).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	w.sh(guest)
	here := w.space()
	for a := range targets {
		in := pods
		if a.Addr().IsLoopback() { // a redirect
			in = here
		}
		l, err := in.Listen("tcp", a.String())
		if err != nil {
			w.t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, a.String())
				_ = c.Close()
			}
		}()
		w.t.Cleanup(func() { _ = l.Close(); <-done })
	}
}

func addresses(targets map[netip.AddrPort]bool) map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	for a := range targets {
		out[a.Addr()] = true
	}
	return out
}

// space is the namespace of the world, for those that open sockets in it.
func (w *world) space() *netns.Space {
	w.t.Helper()
	s, err := netns.Open(w.path())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = s.Close() })
	return s
}

// agent runs the program with the listener sink in the namespace.
func (w *world) agent(binary string, args ...string) (control string) {
	w.t.Helper()
	dir := w.t.TempDir()
	control = filepath.Join(dir, "ctl", "s")
	cmd := exec.Command("ip", append([]string{
		"netns", "exec", w.name, binary, "agent", "--sink", "listener", "--source", "socket,nat",
		"--listener-settle", "50ms", "--control", control, "--link-token", "",
	}, args...)...)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if w.t.Failed() {
			w.t.Logf("the agent said:\n%s", log.String())
		}
	})
	return control
}

// ask connects outside and returns who answers.
func ask(outside *netns.Space, at netip.AddrPort) (string, error) {
	c, err := outside.Dial("tcp", at.String())
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	b, err := io.ReadAll(c)
	if err == nil && len(b) == 0 {
		err = errors.New("no answer")
	}
	return string(b), err
}

// Every port that is only a rule, of whatever tool, is reachable through WSL's
// relay, which by itself shows none of them: Docker's rule in the output hook
// leaves 127.0.0.0/8 out, and a packet from ::1 cannot be sent on.
func TestRelayShowsEveryPortThatIsOnlyARule(t *testing.T) {
	binary, err := program.Path(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range corpusFiles(t) {
		name := strings.TrimSuffix(filepath.Base(path), ".txt")
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			var want wish
			for _, s := range parseCorpus(t, path) {
				w.load(s)
				if s.name == "want" {
					want = wishes(t, s.text)
				}
			}
			targets := map[netip.AddrPort]bool{}
			for _, of := range want {
				maps.Copy(targets, of)
			}
			w.pods(targets)
			// What all these tools set for the guest's own 127.0.0.1.
			w.sh("echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet")
			if strings.HasPrefix(name, "hand-") || name == "side-by-side" {
				// Whoever writes such rules by hand masquerades for it too.
				w.run(`table ip local { chain post { type nat hook postrouting priority 100; ip saddr 127.0.0.0/8 oifname "docker0" masquerade; }; }`, "nft", "-f", "-")
			}
			control := w.agent(binary)
			outside, err := netns.New()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = outside.Close() })
			r := &relay.Relay{Guest: w.space(), Outside: outside, Interval: 200 * time.Millisecond}
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := r.Run(ctx); err != nil {
					t.Error(err)
				}
			})
			defer wg.Wait()
			defer cancel()
			for at, answers := range want {
				eventually(t, fmt.Sprintf("the relay shows %v", at), func() bool { return r.Shows(at) })
				got, err := ask(outside, at)
				if a, perr := netip.ParseAddrPort(got); err != nil || perr != nil || !answers[a] {
					t.Errorf("%v: %q, %v; want one of %v", at, got, err, slices.Collect(maps.Keys(answers)))
				}
			}
			noOwnPublications(t, control)
		})
	}
}

// noOwnPublications checks that no placeholder is taken for a server.
func noOwnPublications(t *testing.T, control string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	l, err := status.NewClient(control).List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Publications {
		for _, o := range p.Origins {
			if o.Source == "socket" && strings.Contains(o.Detail, "fairlead") {
				t.Errorf("a socket of our own is published: %+v", p)
			}
		}
	}
}
