// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package sockets

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/guest/agent"
	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/program"
)

func TestMain(m *testing.M) {
	if ids, ok := os.LookupEnv(actorVariable); ok {
		os.Exit(runActor(ids))
	}
	if text := os.Getenv(agentVariable); text != "" {
		os.Exit(runAgent(text))
	}
	leak.Main(m)
}

// agentVariable makes the test binary an agent with these settings, as JSON.
const agentVariable = "FAIRLEAD_TEST_AGENT"

// settings configure an agent. The program itself cannot limit its methods.
type settings struct {
	Link, Control string
	Observer      string
	Methods       []string
	Compare       bool // with the agent at Control, and print a doctor.Comparison
}

func runAgent(text string) int {
	var s settings
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	cfg := config.DefaultAgent()
	cfg.LinkToken, cfg.Control, cfg.Link = "", s.Control, []config.Endpoint{{Network: "unix", Path: s.Link}}
	cfg.Sources, cfg.Observer, cfg.ObserverMethods = []string{"socket"}, s.Observer, s.Methods
	cfg.PollInterval, cfg.HoldDown = 20*time.Millisecond, 0
	cfg.AuditInterval, cfg.AuditGiven = auditInterval, true
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if s.Compare {
		if err := json.NewEncoder(os.Stdout).Encode(agent.Compare(ctx, cfg, status.NewClient(s.Control))); err != nil {
			return 1
		}
		return 0
	}
	a, err := agent.New(cfg, slog.New(slog.NewJSONHandler(os.Stderr, nil)), new(loglevel.Levels))
	if err == nil {
		err = a.Run(ctx, func(ctx context.Context, _ func(config.Agent, error)) { <-ctx.Done() })
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// auditInterval is the least that the observer allows.
const auditInterval = 10 * time.Second

// place is a network namespace with a thread in it.
type place struct {
	*netns.Space
	jobs chan func()
}

func newPlace(t *testing.T) *place {
	t.Helper()
	s, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	p := &place{s, make(chan func())}
	var thread sync.WaitGroup
	thread.Go(func() {
		_ = s.Do(func() error {
			for job := range p.jobs {
				job()
			}
			return nil
		})
	})
	t.Cleanup(func() {
		close(p.jobs)
		thread.Wait()
		_ = s.Close()
	})
	return p
}

// do runs f in the namespace.
func (p *place) do(f func()) {
	done := make(chan struct{})
	p.jobs <- func() { f(); close(done) }
	<-done
}

func (p *place) sh(t *testing.T, script string) {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-euc", script)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	var err error
	p.do(func() { err = cmd.Run() })
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, out.String(), script)
	}
}

// ask connects to an address in the namespace and returns what the server answers, ""
// if there is none.
func (p *place) ask(network string, at netip.AddrPort) (text string) {
	p.do(func() {
		d := net.Dialer{Timeout: askTimeout}
		c, err := d.Dial(network, at.String())
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		if network == "tcp" {
			_ = c.SetDeadline(time.Now().Add(askTimeout))
			b, _ := io.ReadAll(io.LimitReader(c, 64))
			text = string(b)
			return
		}
		b := make([]byte, 64)
		for end := time.Now().Add(askTimeout); time.Now().Before(end); { // datagrams get lost
			if _, err := c.Write([]byte("?")); err != nil {
				return
			}
			_ = c.SetReadDeadline(time.Now().Add(askTimeout / 5))
			n, err := c.Read(b)
			if err == nil {
				text = string(b[:n])
			}
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
		}
	})
	return text
}

const askTimeout = 5 * time.Second

// Start starts a program in the namespace.
func (p *place) Start(cmd *exec.Cmd) (err error) {
	p.do(func() { err = cmd.Start() })
	return err
}

// world is a guest with an agent, a host with a host peer, and actors in the guest and
// in a third namespace that must not be seen.
type world struct {
	t                      *testing.T
	guest, host, elsewhere *place
	agent                  *program.Process
	control, link          string
	settings               settings          // of the agent
	methods                map[string]string // by capability
	actors                 []*remote
}

// The addresses of the guest's interface, the two that come and go last.
const (
	device   = "eth0"
	address4 = "10.9.9.1"
	address6 = "fd09::1"
	second4  = "10.9.9.2"
	second6  = "fd09::2"
	absent4  = "10.9.8.7" // of no interface
)

func newWorld(t *testing.T, binary, set string) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{
		t: t, guest: newPlace(t), host: newPlace(t), elsewhere: newPlace(t),
		control: filepath.Join(dir, "agent", "s"), link: filepath.Join(dir, "link", "s"),
	}
	// Ports that the kernel chooses on one side are free on the other.
	w.guest.sh(t, `echo 32768 45000 >/proc/sys/net/ipv4/ip_local_port_range
/usr/sbin/ip link add `+device+` type veth peer name peer0
/usr/sbin/ip link set peer0 up
/usr/sbin/ip link set `+device+` up
/usr/sbin/ip addr add `+address4+`/24 broadcast + dev `+device+`
/usr/sbin/ip addr add `+address6+`/64 nodad dev `+device)
	w.host.sh(t, `echo 50000 60999 >/proc/sys/net/ipv4/ip_local_port_range`)
	s := settings{Link: w.link, Control: w.control, Observer: observer.Auto.String()}
	switch set {
	case "auto":
	case observer.MethodPoll:
		s.Observer = observer.Poll.String()
	case kernel.MethodCgroup: // tp_btf reports what becomes of a bound socket
		s.Methods = []string{kernel.MethodCgroup, kernel.MethodTPBTF}
	default:
		s.Methods = []string{set}
	}
	w.settings = s
	w.agent = program.Start(t, program.Command{Cmd: agentOf(s), In: w.guest})
	program.Start(t, program.Command{In: w.host, Cmd: exec.Command(binary, "host", "--connect", "unix://"+w.link, "--link-token", "",
		"--control", filepath.Join(dir, "host", "s"))})
	wait.Until(t, "the agent is ready and has a host", func() error {
		l, err := w.list()
		if err == nil && !l.Ready() {
			err = errors.New("not ready")
		}
		return err
	})
	w.methods = methodsOf(w.agent.Output())
	for i := range 3 {
		where := w.guest
		if i == 2 {
			where = w.elsewhere
		}
		w.actors = append(w.actors, w.newRemote(where))
	}
	return w
}

// agentOf is the command of an agent.
func agentOf(s settings) *exec.Cmd {
	text, _ := json.Marshal(s)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), agentVariable+"="+string(text))
	return cmd
}

// differences are those between the agent and one that starts now, beside it.
func (w *world) differences() []string {
	w.t.Helper()
	s := w.settings
	s.Compare = true
	cmd := agentOf(s)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	var c doctor.Comparison
	if err := errors.Join(w.guest.Start(cmd), cmd.Wait(), json.Unmarshal(out.Bytes(), &c)); err != nil || c.Error != "" {
		w.t.Fatalf("an agent that starts now: %v, %s", err, c.Error)
	}
	return c.Differences
}

// methodsOf reads the methods from the log of an agent.
func methodsOf(log string) map[string]string {
	methods := make(map[string]string)
	for line := range strings.Lines(log) {
		var entry struct{ Msg, Capability, Method string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Msg == "observing sockets" {
			methods[entry.Capability] = entry.Method
		}
	}
	return methods
}

// repairs returns the sockets that audits of the agent have repaired so far, as it
// describes them.
func (w *world) repairs() (all []string) {
	for line := range strings.Lines(w.agent.Output()) {
		var entry struct {
			Msg     string
			Sockets int
			Some    []string
		}
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Msg == "audit repaired sockets that events missed" {
			all = append(all, entry.Some...)
			if more := entry.Sockets - len(entry.Some); more > 0 {
				all = append(all, fmt.Sprintf("and %d more", more))
			}
		}
	}
	return all
}

func (w *world) list() (status.List, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return status.NewClient(w.control).List(ctx)
}

// remote is an actor as the test sees it.
type remote struct {
	t       *testing.T
	where   *place
	process *program.Process
	conn    int
	pid     int
}

func (w *world) newRemote(where *place) *remote {
	w.t.Helper()
	r := &remote{t: w.t, where: where, conn: -1}
	r.run()
	w.t.Cleanup(r.kill)
	return r
}

// run starts the process.
func (r *remote) run() {
	r.t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "control")
	r.conn = pair[0]
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), actorVariable+"=")
	cmd.ExtraFiles, cmd.Stderr = []*os.File{theirs}, os.Stderr
	r.process, err = program.Launch(program.Command{Cmd: cmd, In: r.where})
	_ = theirs.Close()
	if err != nil {
		r.t.Fatal(err)
	}
	r.pid = r.process.PID()
}

// kill kills the process, which may be a child of the one that was started.
func (r *remote) kill() {
	_ = unix.Kill(r.pid, unix.SIGKILL)
	r.process.Kill()
	_ = unix.Close(r.conn)
}

// send gives an order and returns the report, with a descriptor where one comes.
func (r *remote) send(o order, fd int) (report, int) {
	r.t.Helper()
	b, _ := json.Marshal(o)
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	if err := unix.Sendmsg(r.conn, b, rights, nil, 0); err != nil {
		r.t.Fatalf("actor: %v", err)
	}
	answer, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := unix.Recvmsg(r.conn, answer, oob, unix.MSG_CMSG_CLOEXEC)
	var rep report
	if err == nil {
		err = json.Unmarshal(answer[:n], &rep)
	}
	if err != nil {
		r.t.Fatalf("actor: %s: %v", o.Do, err)
	}
	r.pid = rep.PID
	if got, ok := received(oob[:oobn]); ok {
		return rep, got
	}
	return rep, -1
}
