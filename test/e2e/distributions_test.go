// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/probe"
)

// distribution starts what WSL makes of one: mount, pid, UTS and IPC namespaces in the network
// namespace that all share, with a first process that is no init system. The script runs in it,
// with the arguments $0, $1 and so on.
func (s *space) distribution(t *testing.T, name, script string, args ...string) *process {
	t.Helper()
	cmd := exec.Command("/bin/sh", append([]string{"-c", "mount --make-rprivate / && mount -t proc proc /proc && " + script}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}
	return s.startCmd(t, name, cmd)
}

// Several distributions of WSL share one network. An agent in one of them publishes the ports of
// all, names a server of another one without a pid, as that number is another process here, and
// withdraws what a distribution had when that ends.
func TestDistributionsShareANetwork(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, networking := range []string{"nat", "mirrored"} {
		t.Run(networking, func(t *testing.T) {
			r := newRig(t)
			if networking == "mirrored" {
				r.guest.mirror(t)
			}
			r.agent = r.guest.distribution(t, "first distribution",
				reflectVariable+`=127.0.0.1:7001 "$0" & shift; "$@" & wait`, self, "-", binary,
				"agent", "--link", r.link, "--control", r.agentCtl, "--forwards-file", filepath.Join(r.dir, "forwards.json"))
			r.startHost()
			// A server that was there before the agent would have no name.
			r.wantState("tcp 127.0.0.1:7001", "active")
			r.holdsNoTrampoline()
			other := r.guest.distribution(t, "second distribution", reflectVariable+`=0.0.0.0:7002 "$0" & wait`, self)

			for _, tt := range []struct {
				key, address string
				own          bool
			}{
				{"tcp 127.0.0.1:7001", "127.0.0.1:7001", true},
				{"tcp 0.0.0.0:7002", "127.0.0.1:7002", false},
			} {
				r.wantState(tt.key, "active")
				_ = echoThrough(t, r, tt.address)
				r.eventually("the process is named", func() error {
					_, p := r.state(tt.key)
					if o := p.Owner; o.Kind != port.OwnerProcess || o.Name != process15(self) || (o.ID != "") != tt.own {
						return fmt.Errorf("%s has owner %+v", tt.key, o)
					}
					return nil
				})
			}
			other.Kill()
			r.wantState("tcp 0.0.0.0:7002", "")
			r.eventually("the host closed it", func() error {
				open, err := probe.Listens(r.outside.dialer("127.0.0.1:7002"))
				if err == nil && open {
					err = errors.New("it is open")
				}
				return err
			})
			r.wantState("tcp 127.0.0.1:7001", "active")
		})
	}
}

// holdsNoTrampoline checks that an agent in a distribution listens by fentry only where the end
// of its PID namespace cannot hang the kernel.
func (r *rig) holdsNoTrampoline() {
	r.t.Helper()
	out, _, _ := fairlead(r.t, "doctor", "-o", "json", "--control", r.agentCtl)
	for _, c := range decode[doctor.Report](r.t, out).Checks {
		if c.Area != "observer" || c.Name != "tcp-listen" {
			continue
		}
		direct := strings.HasPrefix(c.Detail, "fentry")
		inMachine := os.Getenv(kernels.Variable) != ""
		if old := kernels.Before(6, 9); direct && old || !direct && !old && inMachine && kernels.Fentry() {
			r.t.Errorf("tcp-listen by %s", c.Detail)
		}
		return
	}
	r.t.Errorf("doctor names no method of tcp-listen: %s", out)
}

// process15 is the name that the kernel gives a process of a program: 15 bytes of the file's.
func process15(path string) string {
	name := filepath.Base(path)
	return name[:min(len(name), 15)]
}
