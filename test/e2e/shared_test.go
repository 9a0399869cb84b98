// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// shareVariable makes the test binary a server at these ports, of TCP with SO_REUSEPORT and of UDP
// with SO_REUSEADDR, until its input ends.
const shareVariable = "FAIRLEAD_SHARE"

func share(ports string) error {
	option := unix.SO_REUSEPORT
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		failed := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, option, 1) })
		return errors.Join(failed, err)
	}}
	for n := range strings.SplitSeq(ports, ",") {
		option = unix.SO_REUSEPORT
		l, err := c.Listen(context.Background(), "tcp4", "0.0.0.0:"+n)
		if err != nil {
			return err
		}
		defer l.Close()
		option = unix.SO_REUSEADDR
		u, err := c.ListenPacket(context.Background(), "udp4", "0.0.0.0:"+n)
		if err != nil {
			return err
		}
		defer u.Close()
	}
	fmt.Println("shared")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// shareAs runs a program of that name at ports, and returns what ends it.
func (r *rig) shareAs(name, ports string) (end func()) {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	path := filepath.Join(r.t.TempDir(), name)
	if err := os.Symlink(self, path); err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), shareVariable+"="+ports)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := r.guest.Start(cmd); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "shared\n" {
		r.t.Fatalf("%s: %q, %v", name, line, err)
	}
	return func() { _ = in.Close() }
}

// TestPortsThatProcessesShare: rules count for each process that has a socket at a port, whichever
// came first, also in an agent that finds the sockets; and people are told who they are.
func TestPortsThatProcessesShare(t *testing.T) {
	r := newRig(t)
	file := func(name, text string) string {
		path := filepath.Join(r.dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	r.agentFlags = append(r.agentFlags, "--config", file("agent.yaml", `rules:
- {match: {ports: 4000-4009, owner: process, name: own-b}, action: deny}
- {match: {ports: 4010-4019, owner: process, name: own-a}, action: allow}
- {match: {ports: 4010-4019}, action: deny}
`))
	r.hostFlags = append(r.hostFlags, "--config", file("host.yaml", "rules:\n- {match: {ports: 4020-4029, name: own-b}, action: deny}\n"))
	r.start()
	denied, open, alike := "4000,4010,4020,4001,4011,4021", "4030,4031", "4002,4012,4022,4032"
	r.shareAs("own-a", "4000,4010,4020,4030")
	end := r.shareAs("own-b", denied+","+open)
	r.shareAs("own-a", "4001,4011,4021,4031")
	for range 3 { // workers of one program
		r.shareAs("own-a", alike)
	}
	all := func() (owners []string) {
		t.Helper()
		for _, c := range []struct {
			ports, state string
			others       int
		}{{denied, "denied", 1}, {open, "active", 1}, {alike, "active", 0}} {
			for n := range strings.SplitSeq(c.ports, ",") {
				for _, protocol := range []string{"tcp", "udp"} {
					owners = append(owners, r.wantShared(protocol+" 0.0.0.0:"+n, c.state, c.others))
				}
			}
		}
		return owners
	}
	byEvents := all()
	for _, args := range [][]string{{"explain", "4030/tcp"}, {"explain", "4031/udp"}} {
		out, _, _ := fairlead(t, append(args, "--control", r.agentCtl)...)
		if !strings.Contains(out, "process own-a") || !strings.Contains(out, " and process own-") {
			t.Errorf("%q does not name both:\n%s", args, out)
		}
	}
	r.agent.Kill()
	r.startAgent()
	if found := all(); !slices.Equal(byEvents, found) {
		t.Errorf("a new agent shows\n%q, not\n%q", found, byEvents)
	}
	end()
	for n := range strings.SplitSeq(denied+","+open, ",") {
		r.wantShared("tcp 0.0.0.0:"+n, "active", 0)
		r.wantShared("udp 0.0.0.0:"+n, "active", 0)
	}
}

// wantShared waits until a port has a state and as many owners beside its own, and returns who
// they are.
func (r *rig) wantShared(k, state string, others int) (owners string) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("%s is %s, with %d other owners", k, state, others), func() error {
		got, p := r.state(k)
		if owners = fmt.Sprint(k, p.Owner.Name, p.Others); got != state || len(p.Others) != others || p.Owner.Name == "" {
			return fmt.Errorf("it is %q (%s), owned by %+v and %+v", got, p.Reason, p.Owner, p.Others)
		}
		return nil
	})
	return owners
}
