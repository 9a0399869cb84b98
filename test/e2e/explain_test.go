// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/setup/demo"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/explain"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// why is one real situation and what explain must answer.
type why struct {
	name  string
	build func(t *testing.T, r *rig) (ask string) // returns the arguments of explain
	want  port.Verdict
	says  string // in the summary
	next  string // in the next step, empty if there is nothing to do
	step  string // in the text of a step, "" for none
}

// explained is the output of `explain -o json` in the guest.
func (r *rig) explained(ask string) (explain.Report, error) { return r.explainedAt(r.agentCtl, ask) }

func (r *rig) explainedAt(control, ask string) (explain.Report, error) {
	args := append([]string{"explain", "-o", "json", "--control", control}, strings.Fields(ask)...)
	out, stderr, code := fairlead(r.t, args...)
	var rep explain.Report
	if err := json.Unmarshal([]byte(out), &rep); err != nil {
		return rep, fmt.Errorf("exit code %d: %s: %w", code, stderr, err)
	}
	if (code == 0) != rep.Verdict.Reachable() || code > 1 {
		return rep, fmt.Errorf("exit code %d of %s", code, rep.Verdict)
	}
	return rep, nil
}

func (w why) check(t *testing.T, r *rig) {
	t.Helper()
	ask := w.build(t, r)
	wait.Until(t, "explain "+ask+" says "+string(w.want), func() error {
		rep, err := r.explained(ask)
		if err != nil {
			return err
		}
		stepped := w.step == ""
		for _, c := range rep.Chains {
			for _, s := range c.Steps {
				stepped = stepped || strings.Contains(s.Step+" "+string(s.Mark)+": "+s.Text, w.step)
			}
		}
		if rep.Verdict != w.want || !strings.Contains(rep.Summary, w.says) || !strings.Contains(rep.Next, w.next) ||
			(w.next == "") != (rep.Next == "") || !stepped {
			b, _ := json.MarshalIndent(rep, "", "  ")
			return fmt.Errorf("it says %s", b)
		}
		if len(rep.Missing) > 0 {
			return fmt.Errorf("not checked: %q", rep.Missing)
		}
		return nil
	})
}

// listens opens a TCP listener of the test's own process in the guest.
func listens(network, addr string) func(*testing.T, *rig) string {
	return func(t *testing.T, r *rig) string {
		r.guest.listen(t, network, addr)
		_, port, _ := net.SplitHostPort(addr)
		return port
	}
}

func binds(network, addr, ask string) func(*testing.T, *rig) string {
	return func(t *testing.T, r *rig) string {
		r.guest.listenPacket(t, network, addr)
		return ask
	}
}

// natRule adds a rule to a table of its own.
func natRule(ask, rule string) func(*testing.T, *rig) string {
	return func(t *testing.T, r *rig) string {
		table := "why" + strings.NewReplacer("/", "_", " ", "_", "-", "_").Replace(ask)
		r.guest.sh(t, fmt.Sprintf("nft -f - <<'END'\ntable ip %s { chain pre { type nat hook prerouting priority -100; %s; }; }\nEND", table, rule))
		t.Cleanup(func() { r.guest.sh(t, "nft delete table ip "+table) })
		return ask
	}
}

// elsewhere starts a server in a namespace that is neither guest nor host.
func elsewhere(addr, ask string, change func(*testing.T, *process)) func(*testing.T, *rig) string {
	return func(t *testing.T, _ *rig) string {
		p := newSpace(t).start(t, demo.ServerCommand, "http", addr)
		if change != nil {
			change(t, p)
		}
		return ask
	}
}

// rawSocket makes a socket in the guest, for what package net cannot.
func rawSocket(t *testing.T, r *rig, kind int, prepare func(fd int) error) int {
	t.Helper()
	fd := -1
	err := r.guest.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return prepare(fd)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// intoContainer puts a process into a cgroup that is named as an engine's.
func intoContainer(t *testing.T, p *process) {
	t.Helper()
	b := make([]byte, 32)
	_, _ = rand.Read(b)
	id := hex.EncodeToString(b)
	mounted := func(f func(root string) error) error {
		dir := t.TempDir()
		done := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // never unlocked: its mounts end with the thread
			done <- errors.Join(
				unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS),
				unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
				unix.Mount("none", dir, "cgroup2", 0, ""),
				f(dir),
			)
		}()
		return <-done
	}
	err := mounted(func(root string) error {
		dir := filepath.Join(root, id)
		return errors.Join(os.Mkdir(dir, 0o755),
			os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(p.PID())), 0o644))
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		if err := mounted(func(root string) error { return os.Remove(filepath.Join(root, id)) }); err != nil {
			t.Error(err)
		}
	})
}

// Each reason why a port is not reachable has a text and a next step. No incumbent can
// explain one.
func TestExplainReasons(t *testing.T) {
	situations := []why{
		{
			name: "it is reachable", build: listens("tcp4", "0.0.0.0:8001"),
			want: port.VerdictActive, says: "reachable on the host at 127.0.0.1:8001", step: "dial ok: 127.0.0.1:8001 answers",
		},
		{
			name: "a loopback listener", build: listens("tcp4", "127.0.0.1:8002"),
			want: port.VerdictActive, says: "127.0.0.1:8002", step: "seen ok: socket: pid " + strconv.Itoa(os.Getpid()),
		},
		{
			name: "IPv6 only", build: listens("tcp6", "[::1]:8003"),
			want: port.VerdictOneFamily, says: "IPv6 only", next: "connect to [::1]:8003",
		},
		{
			name: "UDP is there", build: binds("udp4", "0.0.0.0:8004", "8004"),
			want: port.VerdictUntested, says: "8004/udp is open, not tested, on the host at 127.0.0.1:8004", step: "sink hostlink ok: active at 127.0.0.1:8004",
		},
		{
			name: "another protocol", build: binds("udp4", "0.0.0.0:8005", "8005/tcp"),
			want: port.VerdictProtocol, says: "is UDP, not TCP", next: "fairlead explain 8005/udp",
		},
		{
			name: "a rule of the agent", build: listens("tcp4", "0.0.0.0:9229"),
			want: port.VerdictDenied, says: "denied by rule 1 (no-debug)", next: "change rule 1 (no-debug) in", step: "rule failing: denied by rule 1 (no-debug)",
		},
		{
			name: "a rule of the host", build: listens("tcp4", "0.0.0.0:8007"),
			want: port.VerdictHostDenied, says: "host rule 1", next: "rules of the host peer",
		},
		{
			name: "a conflict on the host", build: func(t *testing.T, r *rig) string {
				r.outside.listen(t, "tcp4", "127.0.0.1:8008")
				return listens("tcp4", "0.0.0.0:8008")(t, r)
			},
			want: port.VerdictConflict, says: "(pid " + strconv.Itoa(os.Getpid()), next: "stop the program that uses 127.0.0.1:8008",
		},
		{
			name: "a conflict in one family", build: func(t *testing.T, r *rig) string {
				r.outside.listen(t, "tcp4", "127.0.0.1:8009")
				return listens("tcp", "[::]:8009")(t, r)
			},
			want: port.VerdictPartial, says: "but not everywhere: 127.0.0.1:8009", next: "use [::1]:8009",
		},
		{
			name: "well-known UDP", build: binds("udp4", "0.0.0.0:5353", "5353"),
			want: port.VerdictWellKnown, says: "the guest's own network", next: "ports: 5353}, action: allow",
		},
		{
			name: "bound and not listening", build: func(t *testing.T, r *rig) string {
				rawSocket(t, r, unix.SOCK_STREAM, func(fd int) error { return unix.Bind(fd, &unix.SockaddrInet4{Port: 8011}) })
				return "8011"
			},
			want: port.VerdictUnlistened, says: "bound, not listening", next: "listen()",
		},
		{
			name: "a socket of one interface", build: func(t *testing.T, r *rig) string {
				r.guest.sh(t, "/usr/sbin/ip link add why0 type bridge; /usr/sbin/ip link set why0 up")
				rawSocket(t, r, unix.SOCK_STREAM, func(fd int) error {
					return errors.Join(unix.BindToDevice(fd, "why0"), unix.Bind(fd, &unix.SockaddrInet4{Port: 8012}), unix.Listen(fd, 1))
				})
				return "8012"
			},
			want: port.VerdictInterface, says: "bound to interface why0", next: "give the interface an address",
		},
		{
			name: "a NAT rule of one interface", build: natRule("8013", `iifname "eth9" tcp dport 8013 dnat to 10.9.0.2:80`),
			want: port.VerdictInterface, says: "limited to interface eth9", next: "ports: 8013}, action: allow", step: "th dport 8013",
		},
		{
			name: "a NAT rule for some clients", build: natRule("8014", `ip saddr 10.0.0.0/8 tcp dport 8014 dnat to 10.9.0.2:80`),
			want: port.VerdictSourceOnly, says: "limited to source 10.0.0.0/8", next: "ports: 8014}, action: allow",
		},
		{
			name: "a NAT rule that is not understood", build: natRule("8015", `meta mark 7 tcp dport 8000-8015 dnat to 10.9.0.2:80`),
			want: port.VerdictNAT, says: "th dport >= 8000 th dport <= 8015", next: "supported form",
		},
		{
			name: "a NAT rule that works", build: func(t *testing.T, r *rig) string {
				r.guest.listen(t, "tcp4", "0.0.0.0:18016") // which the rule leads to at 192.0.2.9
				return natRule("8016", `tcp dport 8016 redirect to :18016`)(t, r)
			},
			want: port.VerdictActive, says: "8016/tcp is reachable", step: "seen ok: nat: ip why8016 pre: ",
		},
		{
			name: "a NAT rule to nobody", build: natRule("8017", `tcp dport 8017 redirect to :18017`),
			want: port.VerdictNoAnswer, says: "does not answer: 192.0.2.9:18017 refuses", next: "a connection to 192.0.2.9:18017 must work first",
		},
		{
			name: "without a dial there is no answer to miss", build: natRule("8017 --no-dial", `tcp dport 8017 redirect to :18017`),
			want: port.VerdictUntested, says: "8017/tcp is open, not tested,", step: "dial skipped",
		},
		{
			name: "a UDP client", build: func(t *testing.T, r *rig) string {
				c, err := r.guest.Dial("udp4", "127.0.0.1:9")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = c.Close() })
				return strings.TrimPrefix(c.LocalAddr().String(), "127.0.0.1:") + "/udp"
			},
			want: port.VerdictClient, says: "chosen by the kernel", next: "bind its port explicitly",
		},
		{
			name: "a process in another network namespace", build: elsewhere("0.0.0.0:8019", "8019", nil),
			want: port.VerdictNetNS, says: "(fairlead) is listening in another network namespace (net:[", next: "start it in the agent's network namespace",
		},
		{
			name: "a loopback in another network namespace", build: elsewhere("127.0.0.1:8020", "8020", nil),
			want: port.VerdictNetNS, says: "127.0.0.1:8020 of pid", next: "nothing else can reach it",
		},
		{
			name: "a container that publishes nothing", build: elsewhere("0.0.0.0:8021", "8021", intoContainer),
			want: port.VerdictNetNS, says: " of container (", next: "-p 8021:8021",
		},
		{
			name: "fairlead's own", build: func(*testing.T, *rig) string { return "9111" },
			want: port.VerdictOwn, says: "127.0.0.1:9111", next: "--metrics-addr",
		},
		{
			name: "nothing at all", build: func(*testing.T, *rig) string { return "8999" },
			want: port.VerdictNothingHere, says: "nothing in the guest serves port 8999", next: "start the server",
		},
		{
			name: "a slip of the finger", build: func(t *testing.T, r *rig) string {
				listens("tcp4", "0.0.0.0:8724")(t, r)
				return "8742"
			},
			want: port.VerdictNothingHere, says: "nothing in the guest serves", next: "did you mean 8724/tcp?",
		},
		{
			name: "a rule that moves it", build: listens("tcp4", "0.0.0.0:8025"),
			want: port.VerdictActive, says: "127.0.0.1:18025, another port than in the guest, by rule 2", step: "rule ok: rule 2: allow, host port +10000",
		},
		{
			name: "it was closed", build: func(t *testing.T, r *rig) string {
				_ = r.guest.listen(t, "tcp4", "0.0.0.0:8026").Close()
				return "8026/tcp"
			},
			want: port.VerdictNothingHere, says: "8026/tcp", next: "start the server",
		},
	}
	r := newRig(t, "--metrics-addr", "127.0.0.1:9111")
	r.hostFlags = []string{"--keep-privileges"} // the holder of ports, this process, has all capabilities
	write := func(name, text string) string {
		path := filepath.Join(r.dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	r.agentFlags = append(r.agentFlags, "--config", write("agent.yaml",
		"rules:\n- {name: no-debug, match: {ports: 9229}, action: deny}\n- {match: {ports: 8025}, action: allow, hostPort: +10000}\n"))
	r.hostFlags = append(r.hostFlags, "--config", write("host.yaml", "rules:\n- {match: {ports: 8007}, action: deny}\n"))
	r.guest.sh(t, "ip addr add 192.0.2.9/32 dev lo") // without an own address no packet meets rules of prerouting
	r.start()
	for _, w := range situations {
		t.Run(w.name, func(t *testing.T) { w.check(t, r) })
	}
}

func TestExplainWithoutAHost(t *testing.T) {
	r := newRig(t)
	r.startAgent()
	why{build: listens("tcp4", "0.0.0.0:8001"), want: port.VerdictNoHost, says: "no host is connected", next: "start `fairlead host`"}.check(t, r)
}

func TestExplainNamesDisabledAndStaleSources(t *testing.T) {
	t.Run("disabled", func(t *testing.T) {
		r := newRig(t, "--source", "nat")
		r.startAgent()
		why{
			build: listens("tcp4", "0.0.0.0:8001"), want: port.VerdictDisabled,
			says: "the socket source is disabled", next: "add socket to the agent's sources",
		}.check(t, r)
	})
	t.Run("stale", func(t *testing.T) {
		// An engine that accepts connections and closes them.
		path := filepath.Join(t.TempDir(), "docker.sock")
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go hangUp(l, func() {})
		r := newRig(t, "--source", "socket,docker", "--docker-host", "unix://"+path)
		r.startAgent()
		why{
			build: func(*testing.T, *rig) string { return "8001" }, want: port.VerdictStale,
			says: "source docker fails", next: "fairlead doctor",
		}.check(t, r)
	})
}

// A host has the guest dial the server, and calls a port reachable if that answers.
func TestExplainOnHostAsksTheGuest(t *testing.T) {
	r := newRig(t).start()
	r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	r.guest.listenPacket(t, "udp4", "127.0.0.1:8002")
	r.guest.sh(t, "ip addr add 192.0.2.9/32 dev lo")
	natRule("8017", `tcp dport 8017 redirect to :18017`)(t, r)
	for _, c := range []struct {
		ask, k string
		want   port.Verdict
		says   string
	}{
		{"8001", "tcp 127.0.0.1:8001", port.VerdictActive, "8001/tcp is reachable on the host at 127.0.0.1:8001"},
		{"8001 --no-dial", "tcp 127.0.0.1:8001", port.VerdictUntested, "8001/tcp is open, not tested,"},
		{"8002", "udp 127.0.0.1:8002", port.VerdictUntested, "8002/udp is open, not tested,"},
		{"8017", "tcp 0.0.0.0:8017", port.VerdictNoAnswer, "but the server in the guest refuses"},
	} {
		r.wantState(c.k, "active")
		if rep, err := r.explainedAt(r.hostCtl, c.ask); err != nil || rep.Verdict != c.want || !strings.Contains(rep.Summary, c.says) {
			t.Errorf("%s: %s: %q, %v; want %s: %q", c.ask, rep.Verdict, rep.Summary, err, c.want, c.says)
		}
	}
	// A few times per second at most.
	untested := 0
	for range 20 {
		rep, err := status.NewClient(r.hostCtl).Explain(t.Context(), explain.Query{Port: 8001, Dial: true})
		if err != nil {
			t.Fatal(err)
		}
		if rep.Verdict == port.VerdictUntested {
			untested++
		}
	}
	if untested == 0 {
		t.Error("the guest was asked to dial as often as somebody asked")
	}
}

// Without a dial, explain connects to nothing, in the guest and on its host.
func TestExplainDialsOnlyWhenAsked(t *testing.T) {
	for role, control := range map[string]func(*rig) string{
		"guest": func(r *rig) string { return r.agentCtl }, "host": func(r *rig) string { return r.hostCtl },
	} {
		t.Run(role, func(t *testing.T) { explainDialsWhenAsked(t, control) })
	}
}

func explainDialsWhenAsked(t *testing.T, control func(*rig) string) {
	r := newRig(t).start()
	l := r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	accepted := make(chan struct{}, 100)
	go hangUp(l, func() { accepted <- struct{}{} })
	r.wantState("tcp 127.0.0.1:8001", "active")
	for range 5 {
		r.eventually("an answer", func() error { _, err := r.explainedAt(control(r), "8001 --no-dial"); return err })
	}
	asked := 0
	r.eventually("an answer with a dial", func() error { asked++; _, err := r.explainedAt(control(r), "8001"); return err })
	<-accepted // of the last one
	if n := len(accepted); n >= asked {
		t.Errorf("%d connections though %d were asked for", n+1, asked)
	}
}
