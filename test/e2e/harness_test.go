// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

// Package e2e tests the real binary end to end: agents run in network namespaces that
// stand for the guest, host peers in others, and the tests check what a user would see.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/program"
)

// binary is the program under test, and scratch a directory that ends with the tests.
var binary, scratch string

func TestMain(m *testing.M) { os.Exit(run(m)) }

// reflectVariable makes the test binary a server at this address that echoes.
const reflectVariable = "FAIRLEAD_REFLECT"

func run(m *testing.M) int {
	if addr := os.Getenv(reflectVariable); addr != "" {
		l, err := net.Listen("tcp4", addr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		echo.Serve(l)
		return 0
	}
	if ports := os.Getenv(shareVariable); ports != "" {
		if err := share(ports); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	if addr := os.Getenv(serverVariable); addr != "" {
		return serve(addr)
	}
	dir, err := os.MkdirTemp("", "fairlead-e2e-")
	if err == nil {
		defer os.RemoveAll(dir)
		_ = os.Chmod(dir, 0o755) // tests run it as others too
		scratch = dir
		binary, err = program.Path(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// space is a network namespace that ends with its test.
type space struct{ *netns.Space }

func newSpace(t testing.TB) *space {
	t.Helper()
	s, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return &space{s}
}

func (s *space) listen(t testing.TB, network, addr string) net.Listener {
	t.Helper()
	l, err := s.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func (s *space) listenPacket(t testing.TB, network, addr string) net.PacketConn {
	t.Helper()
	c, err := s.ListenPacket(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// dialer connects to a TCP address from the namespace, for package probe.
func (s *space) dialer(addr string) func() (net.Conn, error) {
	return func() (net.Conn, error) { return s.Dial("tcp", addr) }
}

type process = program.Process

// start runs fairlead in the namespace. It is killed when the test ends.
func (s *space) start(t testing.TB, args ...string) *process {
	t.Helper()
	return s.startAs(t, 0, args...)
}

func (s *space) startAs(t testing.TB, uid uint32, args ...string) *process {
	t.Helper()
	cmd := exec.Command(binary, args...)
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	return s.startCmd(t, args[0], cmd)
}

// startCmd runs any program in the namespace, as start does. It inherits the
// environment of the test if it has none.
func (s *space) startCmd(t testing.TB, name string, cmd *exec.Cmd) *process {
	t.Helper()
	if cmd.Env == nil {
		cmd.Env = append(os.Environ(), "GOTRACEBACK=all")
	}
	return program.Start(t, program.Command{Cmd: cmd, Name: name, In: s, Trace: true})
}

// rig is a guest with an agent and a host with a host peer.
type rig struct {
	t                     testing.TB
	guest, outside        *space
	dir                   string
	link, connect         string // the agent's and the host's end of the link
	agentCtl, hostCtl     string
	token                 string // file, or empty for the default
	agent, host           *process
	agentFlags, hostFlags []string
}

func newRig(t testing.TB, agentFlags ...string) *rig {
	t.Helper()
	dir := t.TempDir()
	r := &rig{
		t: t, guest: newSpace(t), outside: newSpace(t), dir: dir, agentFlags: agentFlags,
		link:     "unix://" + filepath.Join(dir, "link", "s"),
		agentCtl: filepath.Join(dir, "actl", "s"), hostCtl: filepath.Join(dir, "hctl", "s"),
	}
	r.connect = r.link
	return r
}

func (r *rig) startAgent() {
	r.t.Helper()
	args := append([]string{"agent", "--link", r.link, "--control", r.agentCtl, "--forwards-file", filepath.Join(r.dir, "forwards.json")}, r.tokenFlag()...)
	r.agent = r.guest.start(r.t, append(args, r.agentFlags...)...)
}

func (r *rig) startHost() {
	r.t.Helper()
	args := append([]string{"host", "--connect", r.connect, "--control", r.hostCtl, "--forwards-file", filepath.Join(r.dir, "host-forwards.json")}, r.tokenFlag()...)
	r.host = r.outside.start(r.t, append(args, r.hostFlags...)...)
}

func (r *rig) tokenFlag() []string {
	if r.token == "" {
		return nil
	}
	return []string{"--link-token", r.token}
}

func (r *rig) start() *rig {
	r.t.Helper()
	r.startAgent()
	r.startHost()
	r.eventually("the agent is ready and has a host", func() error {
		l, err := r.list()
		if err == nil && !l.Ready() {
			err = errors.New("not ready")
		}
		return err
	})
	return r
}

func (r *rig) list() (status.List, error) {
	return listAt(r.agentCtl)
}

// listAt asks the server of a control socket for its list. The limit is long, as some
// callers do not retry.
func listAt(control string) (status.List, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return status.NewClient(control).List(ctx)
}

// eventually waits for f to succeed.
func (r *rig) eventually(what string, f func() error) {
	r.t.Helper()
	wait.Until(r.t, what, f)
}

// state returns the state of a publication, or "" if it is not there.
func (r *rig) state(k string) (string, status.Publication) {
	l, err := r.list()
	if err != nil {
		return "", status.Publication{}
	}
	for _, p := range l.Publications {
		if p.Key.String() == k {
			return p.State.String(), p
		}
	}
	return "", status.Publication{}
}

func (r *rig) wantState(k, state string) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("%s is %q", k, state), func() error {
		if got, p := r.state(k); got != state {
			return fmt.Errorf("it is %q (%s)", got, p.Reason)
		}
		return nil
	})
}

// truth is the set of sockets that ss lists in the namespace, without the documented
// exclusions.
func (s *space) truth() ([]string, error) {
	var out []byte
	err := s.Do(func() (err error) {
		// sk_state 10 is LISTEN, 7 is a bound UDP socket without a peer.
		out, err = exec.Command("ss", "-ltnuH").Output()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("ss: %w", err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			return nil, fmt.Errorf("ss said %q", line)
		}
		local := f[4]
		i := strings.LastIndexByte(local, ':')
		host := strings.Trim(local[:i], "[]")
		if h, _, ok := strings.Cut(host, "%"); ok && !strings.HasPrefix(h, "fe80") {
			host = h
		}
		hosts := []string{host}
		if host == "*" { // a socket of both families
			hosts = []string{"0.0.0.0", "::"}
		}
		p, err := port.ParseProtocol(f[0])
		if err != nil {
			return nil, err
		}
		for _, host := range hosts {
			seen[p.String()+" "+net.JoinHostPort(host, local[i+1:])] = true
		}
	}
	var keys []string
	for k := range seen {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys, nil
}

// shown is the list of `ls -o json` in the form of truth.
func shown(l status.List) []string {
	keys := []string{}
	for _, p := range l.Publications {
		for _, o := range p.Origins {
			// A withheld socket is bound, not listening: ss -l does not show it.
			if o.Source == "socket" && !strings.Contains(p.Reason, "not listening") {
				keys = append(keys, p.Key.String())
				break
			}
		}
	}
	slices.Sort(keys)
	return keys
}

// fairlead runs a command to its end.
func fairlead(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit())
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("fairlead %q: %v", args, err)
	}
	if ctx.Err() != nil {
		t.Fatalf("fairlead %q did not end", args)
	}
	return o.String(), e.String(), cmd.ProcessState.ExitCode()
}

func decode[T any](t testing.TB, s string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v in %q", err, s)
	}
	return v
}
