// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/program"
)

// unitSet is what the unit of systemd gives the agent; test/deploy compares them.
func unitSet() (s privilege.Set) {
	for _, n := range append(privilege.Agent(), privilege.UserSockets()) {
		if n.Unit() {
			s |= 1 << n.Bit
		}
	}
	return s
}

// remaining is what an agent keeps after all hooks are attached, if it follows the engines
// of users.
func remaining() privilege.Set {
	s := privilege.SetOf(append(privilege.Agent(), privilege.UserSockets()), true)
	if privilege.MapsNeedCapability() {
		s |= privilege.Maps()
	}
	return s
}

// wantCapabilities waits until all threads of a process have these capabilities and no
// others, and cannot get more.
func wantCapabilities(t *testing.T, p *process, want privilege.Set) {
	t.Helper()
	r := &rig{t: t}
	r.eventually(fmt.Sprintf("all threads have the capabilities %x", uint64(want)), func() error {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.PID()))
		if err != nil || len(tasks) == 0 {
			return errors.Join(err, errors.New("no threads"))
		}
		for _, task := range tasks {
			b, err := os.ReadFile(task)
			if err != nil {
				continue // it has ended
			}
			for key, value := range map[string]string{
				"CapPrm": fmt.Sprintf("%016x", uint64(want)), "CapEff": fmt.Sprintf("%016x", uint64(want)),
				"CapInh": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1",
			} {
				if line := key + ":\t" + value + "\n"; !strings.Contains(string(b), line) {
					return fmt.Errorf("%s has no %q:\n%s", task, line, b)
				}
			}
		}
		return nil
	})
}

// stranger runs a server as another user and returns its pid.
func (s *space) stranger(t *testing.T, addr string) int {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{serverVariable + "=" + addr}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	return s.serving(t, cmd)
}

// bounded starts programs in a namespace with no other capabilities than those of a set.
type bounded struct {
	*space
	set privilege.Set
}

func (b bounded) Start(cmd *exec.Cmd) error {
	return b.Do(func() error { // on a thread that ends
		for bit := uintptr(0); bit < 64; bit++ {
			if b.set.Has(uint(bit)) {
				continue
			}
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, bit, 0, 0, 0); errors.Is(err, unix.EINVAL) {
				break
			} else if err != nil {
				return err
			}
		}
		return cmd.Start()
	})
}

// startBounded starts the agent with no other capabilities than those of a set, and as
// much locked memory as its unit allows.
func (r *rig) startBounded(set privilege.Set) {
	r.t.Helper()
	all := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &all, nil); err != nil && kernels.Before(5, 11) {
		r.t.Fatal(err)
	}
	r.startBoundedBy(set, binary)
}

// startBoundedBy starts the agent by a command that is followed by its arguments, with no
// other capabilities than those of a set.
func (r *rig) startBoundedBy(set privilege.Set, command ...string) {
	r.t.Helper()
	args := slices.Concat(command[1:], []string{"agent", "--link", r.link, "--control", r.agentCtl}, r.agentFlags)
	r.agent = program.Start(r.t, program.Command{Cmd: exec.Command(command[0], args...), In: bounded{r.guest, set}})
}

// The agent and the host do their work with the few capabilities that they keep.
func TestWorkWithFewCapabilities(t *testing.T) {
	for _, v := range []struct {
		name  string
		start privilege.Set
	}{{"all at the start", ^privilege.Set(0)}, {"those of the unit at the start", unitSet()}} {
		t.Run(v.name, func(t *testing.T) {
			r := newRig(t)
			pod := container(t, r.guest)
			pod.listen(t, "tcp4", "0.0.0.0:80")
			pid := r.guest.stranger(t, "127.0.0.1:7001")
			r.startBounded(v.start)
			r.startHost()
			r.wantState("tcp 127.0.0.1:7001", "active")
			wantCapabilities(t, r.agent, remaining())
			wantCapabilities(t, r.host, privilege.SetOf(privilege.Host(), true))

			r.wantOwner("tcp 127.0.0.1:7001", pid)
			r.guest.listen(t, "tcp4", "127.0.0.1:7002")
			r.guest.listen(t, "tcp6", "[::1]:7003")
			r.guest.listenPacket(t, "udp4", "127.0.0.1:7004")
			later := r.guest.stranger(t, "127.0.0.1:7005")
			for _, k := range []string{"tcp 127.0.0.1:7002", "tcp [::1]:7003", "udp 127.0.0.1:7004", "tcp 127.0.0.1:7005"} {
				r.wantState(k, "active")
			}
			r.wantOwner("tcp 127.0.0.1:7005", later)
			r.wantRules("nft -f - <<'END'\ntable ip fl { chain pre { type nat hook prerouting priority -100; tcp dport 7006 dnat to 10.88.0.2:80; }; }\nEND",
				"nft delete table ip fl", "tcp 0.0.0.0:7006")
			r.wantRules("iptables-legacy -w -t nat -A PREROUTING -p tcp --dport 7007 -j DNAT --to-destination 10.88.0.2:80",
				"iptables-legacy -w -t nat -F PREROUTING", "tcp 0.0.0.0:7007")
			r.wantLegacyHook()
			r.wantState("tcp 127.0.0.1:7002", "active")

			// What a restarted agent finds was there before it.
			if code := r.agent.Stop(syscall.SIGTERM); code != 0 {
				t.Errorf("exit status %d", code)
			}
			r.startBounded(v.start)
			r.wantOwner("tcp 127.0.0.1:7005", later)
			r.wantState("tcp [::1]:7003", "active")
			wantCapabilities(t, r.agent, remaining())
		})
	}
}

// wantOwner waits until a publication is owned by the process.
func (r *rig) wantOwner(k string, pid int) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("%s is owned by pid %d", k, pid), func() error {
		if _, p := r.state(k); p.Owner.Kind != port.OwnerProcess || p.Owner.ID != fmt.Sprint(pid) {
			return fmt.Errorf("its owner is %+v", p.Owner)
		}
		return nil
	})
}

// wantRules waits for a port to come with a rule, and to go with it.
func (r *rig) wantRules(add, remove, k string) {
	r.t.Helper()
	r.guest.sh(r.t, add)
	r.wantState(k, "active")
	r.guest.sh(r.t, remove)
	r.wantState(k, "")
}

// wantLegacyHook checks that legacy tables are not polled where the kernel has the hook,
// as those of test/vm have: there the program under test is named.
func (r *rig) wantLegacyHook() {
	r.t.Helper()
	paranoid, _ := os.ReadFile("/proc/sys/kernel/perf_event_paranoid")
	l, err := r.list()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, s := range l.Sources {
		if s.Name != "nat" {
			continue
		}
		r.t.Logf("%s; kernel.perf_event_paranoid=%s", s.Method, strings.TrimSpace(string(paranoid)))
		// Functions of modules have types, which fentry needs, since Linux 5.11.
		if os.Getenv(program.Variable) != "" && kernels.Fentry() && !kernels.Before(5, 11) && !strings.Contains(s.Method, "legacy fentry") {
			r.t.Errorf("method %q, want a hook on legacy tables", s.Method)
		}
	}
}

// Where BPF maps count against a limit of locked memory that the agent may not raise, it
// polls, and doctor names the limit. Elsewhere nothing is lost by it.
func TestLimitOfLockedMemory(t *testing.T) {
	r := newRig(t)
	r.startBoundedBy(unitSet(), "/bin/sh", "-c", `ulimit -l 64 && exec "$0" "$@"`, binary)
	r.eventually("the agent answers", func() error { _, err := r.list(); return err }) // else doctor looks by itself
	r.guest.listen(t, "tcp4", "127.0.0.1:7001")
	var all []doctor.Check
	r.eventually("doctor knows the method", func() error {
		out, errs, _ := fairlead(t, "doctor", "-o", "json", "--control", r.agentCtl)
		all = decode[doctor.Report](t, out).Checks
		if !slices.ContainsFunc(all, func(c doctor.Check) bool { return c.Area == "observer" && c.Name == observer.TCPListen }) {
			return errors.New("no check of the method" + errs)
		}
		return nil
	})
	for _, c := range all {
		if c.Area != "observer" || c.Name != observer.TCPListen {
			continue
		}
		named := strings.Contains(c.Detail, "limit of locked memory") && strings.Contains(c.Remedy, "LimitMEMLOCK=infinity")
		if named != kernels.Before(5, 11) {
			t.Errorf("the limit is named: %v: %+v", named, c)
		}
	}
	r.eventually("the port is listed", func() error {
		l, err := r.list()
		if err == nil && len(l.Publications) != 1 {
			err = fmt.Errorf("ports %v", l.Publications)
		}
		return err
	})
}

// The listener sink opens a port below 1024.
func TestListenerOpensLowPortWithFewCapabilities(t *testing.T) {
	r := newRig(t, "--sink", "listener", "--listener-settle", "100ms")
	pod := container(t, r.guest)
	go answer(pod.listen(t, "tcp4", "0.0.0.0:80"), "pod")
	r.startBounded(unitSet())
	r.eventually("the agent answers", func() error { _, err := r.list(); return err })
	wantCapabilities(t, r.agent, remaining())
	r.guest.sh(t, "nft -f - <<'END'\ntable ip fl { chain pre { type nat hook prerouting priority -100; tcp dport 81 dnat to 10.88.0.2:80; }; }\nEND")
	r.wantState("tcp 0.0.0.0:81", "active")
	r.eventually("the placeholder answers", func() error {
		c, err := r.guest.Dial("tcp", net.JoinHostPort("127.0.0.1", "81"))
		if err == nil {
			_ = c.Close()
		}
		return err
	})
}

// doctor tries by itself whether events arrive, and says of each which method brought it. The
// agent beside it goes on as before, and has what one has that starts now.
func TestDoctorTriesEvents(t *testing.T) {
	for _, beside := range []bool{false, true} {
		t.Run(fmt.Sprintf("agent %v", beside), func(t *testing.T) {
			r := newRig(t)
			onePort := func() error {
				l, err := r.list()
				if err == nil && len(l.Publications) != 1 {
					err = fmt.Errorf("ports %v", l.Publications)
				}
				return err
			}
			if beside {
				r.startAgent()
				r.guest.listen(t, "tcp4", "127.0.0.1:7001")
				r.eventually("the port is listed", onePort)
			}
			p := r.guest.start(t, "doctor", "--self-test", "-o", "json", "--control", r.agentCtl)
			<-p.Done()
			steps := map[string]bool{}
			for _, c := range decode[doctor.Report](t, p.Output()).Checks {
				if c.Area != "self-test" {
					continue
				}
				t.Logf("%s: %s", c.Name, c.Detail)
				steps[c.Name] = true
				if c.State != doctor.OK || !strings.HasPrefix(c.Detail, "by ") && c.Detail != "has the same 1 publication as the one that runs" {
					t.Errorf("%+v", c)
				}
			}
			want := []string{"NAT rule add", "NAT rule remove", "tcp close", "tcp open", "udp close", "udp open"}
			if beside {
				want = slices.Insert(want, 2, "fresh agent")
			}
			if got := slices.Sorted(maps.Keys(steps)); !slices.Equal(got, want) {
				t.Errorf("steps %q, want %q; exit status %d", got, want, p.ExitCode())
			}
			if beside {
				if err := onePort(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// With --keep-privileges nothing is dropped, and doctor warns.
func TestKeepPrivileges(t *testing.T) {
	r := newRig(t, "--keep-privileges").start()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.agent.PID()))
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	effective := func(b []byte) string {
		_, rest, _ := strings.Cut(string(b), "CapEff:\t")
		return rest[:16]
	}
	if effective(status) != effective(own) {
		t.Errorf("the agent has %s, want %s", effective(status), effective(own))
	}
	out, _, _ := fairlead(t, "doctor", "--control", r.agentCtl)
	if want := "keeps capabilities that it does not need: --keep-privileges is set"; !strings.Contains(out, want) {
		t.Errorf("no %q in\n%s", want, out)
	}
}

// A socket of an engine that belongs to a user is connected to, as far as the agent was
// given the capability.
func TestEngineSocketOfAnotherUser(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "docker.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	if err := errors.Join(os.Chmod(path, 0o600), os.Chown(path, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{}, 1)
	go hangUp(l, func() {
		select {
		case asked <- struct{}{}:
		default:
		}
	})
	r := newRig(t, "--source", "docker", "--docker-host", "unix://"+path)
	r.startAgent()
	wait.For(t, "the agent connects", asked)
	wantCapabilities(t, r.agent, remaining()) // without the source users, too
	// It is connected to again, with what remains.
	for range cap(asked) + 1 {
		wait.For(t, "the agent connects again", asked)
	}
}

// hangUp ends every connection at once.
func hangUp(l net.Listener, told func()) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.Close()
		told()
	}
}
