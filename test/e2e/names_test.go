// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// serverVariable makes the test's binary a server that listens at the address in
// it, and ends with its input.
const serverVariable = "FAIRLEAD_TEST_SERVER"

// serve is the server's main function.
func serve(addr string) int {
	network := "tcp4"
	if strings.HasPrefix(addr, "[") {
		network = "tcp"
	}
	l, err := net.Listen(network, addr)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(l.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// server runs a server under a name of its own and returns its pid.
func (s *space) server(t *testing.T, name, addr string) int {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), name)
	if err := os.Symlink(exe, link); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(link, "--password=secret")
	cmd.Env = append(os.Environ(), serverVariable+"="+addr)
	return s.serving(t, cmd)
}

// serving starts a server, waits until it listens and returns its pid.
func (s *space) serving(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("server %q: %v", cmd.Path, err)
	}
	return cmd.Process.Pid
}

// Both sides show who serves a port, with control characters escaped. Arguments are
// never shown: they hold secrets.
func TestOwnersOnBothSides(t *testing.T) {
	const hostile = "\x1b]0;x\x07\tred\x1b[31"
	r := newRig(t)
	r.hostFlags = append(r.hostFlags, "--log-level", "debug")
	r.start()
	names := map[string]int{
		"web-server": r.guest.server(t, "web-server", "127.0.0.1:7001"),
		hostile:      r.guest.server(t, hostile, "127.0.0.1:7002"),
	}
	for name, n := range map[string]uint16{"web-server": 7001, hostile: 7002} {
		k := fmt.Sprintf("tcp 127.0.0.1:%d", n)
		r.wantState(k, "active")
		for side, control := range map[string]string{"agent": r.agentCtl, "host": r.hostCtl} {
			var owner port.Owner
			r.eventually(fmt.Sprintf("the %s names the owner of %s", side, k), func() error {
				out, _, _ := fairlead(t, "ls", "-o", "json", "--control", control)
				for _, p := range decode[status.List](t, out).Publications {
					if p.Key.String() == k {
						owner = p.Owner
					}
				}
				if owner.Kind != port.OwnerProcess || owner.Name == "" {
					return errors.New("it does not")
				}
				return nil
			})
			if owner.Name != name[:min(len(name), 15)] || owner.ID != fmt.Sprint(names[name]) {
				t.Errorf("%s: the owner of %s is %+v, want %q with pid %d", side, k, owner, name, names[name])
			}
		}
	}
	for _, control := range []string{r.agentCtl, r.hostCtl} {
		for _, format := range []string{"table", "wide", "json"} {
			out, _, code := fairlead(t, "ls", "-o", format, "--control", control)
			if code != 0 || strings.Contains(out, "secret") || strings.ContainsAny(out, "\x1b\x07\t") {
				t.Errorf("ls -o %s: exit code %d, output %q", format, code, out)
			}
			if !strings.Contains(out, "web-server") {
				t.Errorf("ls -o %s does not name the server:\n%s", format, out)
			}
		}
	}
	for side, p := range map[string]*process{"agent": r.agent, "host": r.host} {
		if strings.Contains(p.Output(), "\x1b") {
			t.Errorf("the %s's log holds an escape sequence", side)
		}
	}
	r.host.Prints("owner=web-server", "state=active") // whose port it opened
	exe, _ := os.Executable()
	want := fmt.Sprintf("pid %d (web-server), %s", names["web-server"], exe)
	r.eventually("the detail names the program", func() error {
		if _, p := r.state("tcp 127.0.0.1:7001"); len(p.Origins) == 0 || p.Origins[0].Detail != want {
			return fmt.Errorf("origins are %+v, want the detail %q", p.Origins, want)
		}
		return nil
	})
}
