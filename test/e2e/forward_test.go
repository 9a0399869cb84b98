// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// Forwards that are added on the host or in the guest lead clients to the server, survive
// restarts of both, and are undone. What is denied is closed to clients.
func TestForwardsAtRunTime(t *testing.T) {
	r := newRig(t)
	r.start()
	go echo.Serve(r.guest.listen(t, "tcp4", "0.0.0.0:8080"))
	r.wantState("tcp 0.0.0.0:8080", "active")
	run := func(control string, args ...string) string {
		t.Helper()
		out, stderr, code := fairlead(t, append(args, "--control", control)...)
		if code != 0 {
			t.Fatalf("%q: exit %d, %s", args, code, stderr)
		}
		return out
	}
	open := func(ports ...int) {
		t.Helper()
		r.eventually(fmt.Sprintf("clients reach %v only", ports), func() error {
			for _, n := range []int{8080, 18080, 28080} {
				want := false
				for _, p := range ports {
					want = want || p == n
				}
				dial := r.outside.dialer(fmt.Sprintf("127.0.0.1:%d", n))
				err := probe.WantClosed(dial)
				if want {
					err = probe.Want(probe.Data, dial, "hello")
				}
				if err != nil {
					return fmt.Errorf("port %d: %w", n, err)
				}
			}
			return nil
		})
	}
	restart := func() {
		t.Helper()
		r.agent.Stop(syscall.SIGTERM)
		r.startAgent()
		r.host.Stop(syscall.SIGTERM)
		r.startHost()
		r.eventually("agent and host take commands", func() error {
			_, agent := r.list()
			_, host := listAt(r.hostCtl)
			return errors.Join(agent, host)
		})
	}
	open(8080)
	run(r.agentCtl, "forward", "add", "8080", "--to", "18080")
	open(18080)
	restart()
	open(18080)
	run(r.hostCtl, "forward", "add", "8080", "--to", "28080")
	open(28080)
	says := func(want, control string, args ...string) {
		t.Helper()
		if out := run(control, args...); !strings.Contains(out, want) {
			t.Errorf("%q: %s, want %q", args, out, want)
		}
	}
	says("closes nothing now", r.hostCtl, "deny", "28080")
	run(r.hostCtl, "allow", "28080")
	run(r.hostCtl, "deny", "8080")
	open()
	restart()
	open()
	r.eventually("the host knows the port", func() error {
		if out := run(r.hostCtl, "ls", "--filter", "state=denied"); !strings.Contains(out, "8080/tcp") {
			return errors.New(out)
		}
		return nil
	})
	run(r.hostCtl, "deny", "--all")
	says("Removed: deny 8080/tcp\nStill closed: ", r.hostCtl, "allow", "8080")
	if _, stderr, code := fairlead(t, "allow", "8080", "--control", r.hostCtl); code != 1 || !strings.Contains(stderr, `in effect: "deny all"`) {
		t.Errorf("exit %d: %s", code, stderr)
	}
	run(r.hostCtl, "deny", "8080")
	run(r.hostCtl, "allow", "--all")
	run(r.hostCtl, "allow", "8080")
	open(28080)
	run(r.hostCtl, "deny", "8080", "--guest", "vm") // which the configuration gives no name
	open()
	run(r.hostCtl, "allow", "8080", "--guest", "vm")
	open(28080)
	if _, stderr, code := fairlead(t, "deny", "8080", "--guest", "wm", "--control", r.hostCtl); code != 1 || !strings.Contains(stderr, `no guest is called "wm" (did you mean "vm"?)`) {
		t.Errorf("exit %d: %s", code, stderr)
	}
	run(r.agentCtl, "deny", "--all")
	open()
	run(r.agentCtl, "allow", "--all")
	open(28080)
	run(r.hostCtl, "forward", "rm", "8080")
	open(18080)
	if out := run(r.agentCtl, "forward", "ls", "-o", "json"); !strings.Contains(out, filepath.Join(r.dir, "forwards.json")) {
		t.Errorf("%s", out)
	}
	run(r.agentCtl, "forward", "rm", "8080")
	open(8080)
}

// lanOf gives a namespace an address that is not the loopback's.
const lanOf = `
/usr/sbin/ip link add lan0 type veth peer name far0
/usr/sbin/ip addr add 192.0.2.10/24 dev lan0
/usr/sbin/ip link set lan0 up
/usr/sbin/ip link set far0 up`

// What is exposed is open at the host's other addresses too, until its end, over a restart
// of the host, and also if the end comes while the host is not running.
func TestExpose(t *testing.T) {
	const lan, loopback = "192.0.2.10:8080", "127.0.0.1:8080"
	r := newRig(t)
	r.hostFlags = []string{"--bind", "asked"}
	r.outside.sh(t, lanOf)
	r.start()
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:8080"))
	r.wantState("tcp 127.0.0.1:8080", "active")
	expose := func(args ...string) string {
		t.Helper()
		var out, stderr string
		var code int
		if err := r.outside.Do(func() error {
			out, stderr, code = fairlead(t, append([]string{"expose", "8080", "--control", r.hostCtl}, args...)...)
			return nil
		}); err != nil || code != 0 {
			t.Fatalf("%q: exit %d, %s, %v", args, code, stderr, err)
		}
		return out
	}
	open := func(wide bool) {
		t.Helper()
		r.eventually(fmt.Sprintf("%s is open: %v", lan, wide), func() error {
			if err := probe.Want(probe.Data, r.outside.dialer(loopback), "hello"); err != nil {
				return err
			}
			if wide {
				return probe.Want(probe.Data, r.outside.dialer(lan), "hello")
			}
			return probe.WantClosed(r.outside.dialer(lan))
		})
	}
	shows := func(control string, want bool) {
		t.Helper()
		const note = "open to other machines until "
		r.eventually("all outputs agree", func() error {
			for _, command := range []string{"ls", "ls -o json", "explain 8080"} {
				out, stderr, _ := fairlead(t, append(strings.Fields(command), "--control", control)...)
				if strings.Contains(out, note) != want {
					return fmt.Errorf("%s: %s%s", command, out, stderr)
				}
			}
			return nil
		})
	}
	open(false)
	if out := expose("--for", "1h"); !strings.Contains(out, "  "+lan+"\n") || !strings.Contains(out, "\nA firewall of this system may still refuse others: `sudo nft list ruleset` shows its rules.\n") {
		t.Errorf("%s", out)
	}
	open(true)
	shows(r.hostCtl, true)
	shows(r.agentCtl, true)
	r.host.Stop(syscall.SIGTERM)
	r.startHost()
	open(true)
	held, err := r.outside.Dial("tcp", lan)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Close() }()
	expose("--end")
	open(false)
	shows(r.hostCtl, false)
	expose("--guest", "vm") // which the configuration gives no name
	open(true)
	expose("--end", "--guest", "vm")
	open(false)
	if out, stderr, _ := fairlead(t, "forward", "add", "8080", "--bind", "all", "--control", r.hostCtl); !strings.Contains(out, "(narrower than --bind all, ") {
		t.Errorf("%s%s", out, stderr)
	}
	if err := held.SetReadDeadline(time.Now().Add(wait.Limit())); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, held); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a connection outlives the address that it came to")
	}
	expose("--for", "2s")
	open(false)
	expose("--for", "2s")
	r.host.Stop(syscall.SIGTERM)
	until := time.Now().Add(2 * time.Second)
	r.eventually("the time is over", func() error {
		if time.Now().Before(until) {
			return errors.New("not yet")
		}
		return nil
	})
	r.startHost()
	open(false)
	r.eventually("the file has no rule", func() error {
		b, err := os.ReadFile(filepath.Join(r.dir, "host-forwards.json"))
		if strings.Contains(string(b), "expose") {
			err = fmt.Errorf("%s", b)
		}
		return err
	})
}

// On a conflict a forward that says so opens another port of the host, which ls, explain
// and watch show with the reason, and which remains over a restart of the host.
func TestForwardOnConflict(t *testing.T) {
	r := newRig(t)
	r.start()
	holder := r.outside.listen(t, "tcp4", "127.0.0.1:8080") // before fairlead opens it
	go echo.Serve(r.guest.listen(t, "tcp4", "0.0.0.0:8080"))
	r.wantState("tcp 0.0.0.0:8080", "conflict")
	if _, stderr, code := fairlead(t, "forward", "add", "8080", "--on-conflict", "next", "--control", r.hostCtl); code != 0 {
		t.Fatal(stderr)
	}
	check := func() {
		t.Helper()
		r.wantState("tcp 0.0.0.0:8080", "active")
		r.eventually("the port is at 8081", func() error { return probe.Want(probe.Data, r.outside.dialer("127.0.0.1:8081"), "hello") })
		for _, control := range []string{r.hostCtl, r.agentCtl} {
			for _, command := range []string{"ls -o wide", "ls -o json", "explain 8080"} {
				out, stderr, _ := fairlead(t, append(strings.Fields(command), "--control", control)...)
				if !strings.Contains(out, "127.0.0.1:8081") || !strings.Contains(out, "instead of host port 8080, which was in use") {
					t.Errorf("%s: %s%s", command, out, stderr)
				}
			}
		}
		if out, _, _ := fairlead(t, "forward", "ls", "--control", r.hostCtl); !strings.Contains(out, "127.0.0.1:8081") {
			t.Errorf("%s", out)
		}
	}
	check()
	_ = holder.Close()
	r.host.Stop(syscall.SIGTERM)
	r.startHost()
	check()
	if _, stderr, code := fairlead(t, "forward", "rm", "8080", "--control", r.hostCtl); code != 0 {
		t.Fatal(stderr)
	}
	r.eventually("the port is back", func() error { return probe.Want(probe.Data, r.outside.dialer("127.0.0.1:8080"), "hello") })
}

// A server that a rule names is told the address of the client on the host, and where that
// connected, before the client's first byte; other servers are not.
func TestProxyProtocol(t *testing.T) {
	r := newRig(t)
	config := filepath.Join(r.dir, "agent.yaml")
	if err := os.WriteFile(config, []byte("rules:\n- {match: {protocol: tcp, ports: 8080}, action: allow, proxyProtocol: v2}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.agentFlags = []string{"--config", config}
	r.start()
	go echo.Serve(r.guest.listen(t, "tcp", "[::]:8080"))
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:8081"))
	r.wantState("tcp [::]:8080", "active")
	r.wantState("tcp 127.0.0.1:8081", "active")
	const payload = "the first bytes"
	for _, c := range []struct {
		to     string
		family byte
		size   int // of an address; 0 for no header
	}{{"127.0.0.1:8080", 0x11, 4}, {"[::1]:8080", 0x21, 16}, {"127.0.0.1:8081", 0, 0}} {
		conn, err := r.outside.Dial("tcp", c.to)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		var want []byte
		if c.size > 0 {
			from, to := conn.LocalAddr().(*net.TCPAddr).AddrPort(), netip.MustParseAddrPort(c.to)
			want = append([]byte("\r\n\r\n\x00\r\nQUIT\n"), 0x21, c.family, 0, byte(2*c.size+4))
			want = append(append(want, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
			want = append(want, byte(from.Port()>>8), byte(from.Port()), byte(to.Port()>>8), byte(to.Port()))
		}
		want = append(want, payload...)
		got := make([]byte, len(want))
		if _, err := io.WriteString(conn, payload); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, want) { // as the server got it
			t.Errorf("%s: %q, %v; want %q", c.to, got, err, want)
		}
		_ = conn.Close()
	}
	for args, want := range map[string]string{"explain 8080": "PROXY protocol (v2)", "explain --rules 8080": "allow, PROXY protocol v2"} {
		out, stderr, code := fairlead(t, append(strings.Fields(args), "--control", r.agentCtl)...)
		if code != 0 || !strings.Contains(strings.Join(strings.Fields(out), " "), want) {
			t.Errorf("%s: exit %d, want %q:\n%s%s", args, code, want, out, stderr)
		}
	}
}
