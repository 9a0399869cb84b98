// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/kit/echo"
)

// A host or an agent without descriptors left refuses flows, answers on its control
// socket, and recovers when clients leave.
func TestDescriptorLimit(t *testing.T) {
	for name, limit := range map[string]uint64{"host": 128, "agent": 192} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t).start()
			go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:7000"))
			r.wantState("tcp 127.0.0.1:7000", "active")
			limited := r.host
			if name == "agent" {
				limited = r.agent
			}
			if err := unix.Prlimit(limited.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: limit, Max: limit}, nil); err != nil {
				t.Fatal(err)
			}
			held := fillDescriptors(t, r)
			r.answers(t)
			limited.Prints("too few file descriptors left")
			if n := strings.Count(limited.Output(), "too few file descriptors left"); n != 1 {
				t.Errorf("%d warnings, want one", n)
			}
			for _, c := range held {
				_ = c.Close()
			}
			r.eventually("flows are served again", func() error {
				c, err := r.outside.Dial("tcp4", "127.0.0.1:7000")
				if err != nil {
					return err
				}
				defer c.Close()
				return roundTrip(c, "again")
			})
		})
	}
}

// fillDescriptors connects until many clients were refused. It returns the
// connections that were served.
func fillDescriptors(t *testing.T, r *rig) (held []net.Conn) {
	t.Helper()
	refused := 0
	for i := range 300 {
		c, err := r.outside.Dial("tcp4", "127.0.0.1:7000")
		if err == nil {
			err = roundTrip(c, fmt.Sprint("client ", i))
		}
		switch {
		case err == nil:
			t.Cleanup(func() { _ = c.Close() })
			held = append(held, c)
			continue
		case errors.Is(err, os.ErrDeadlineExceeded):
			t.Fatalf("client %d hangs: %v", i, err)
		}
		if c != nil {
			_ = c.Close()
		}
		if refused++; refused == 20 {
			break
		}
	}
	if len(held) < 10 || refused < 20 {
		t.Fatalf("%d clients served and %d refused, want at least 10 and 20", len(held), refused)
	}
	return held
}

// answers checks that agent and host answer what a user asks.
func (r *rig) answers(t *testing.T) {
	t.Helper()
	for _, args := range [][]string{
		{"ls", "--control", r.hostCtl}, {"explain", "7000", "--control", r.hostCtl},
		{"ls", "--control", r.agentCtl}, {"explain", "7000", "--control", r.agentCtl}, {"doctor", "--control", r.agentCtl},
	} {
		out, stderr, _ := fairlead(t, args...)
		if strings.Contains(stderr, "control socket") || strings.Contains(out, "control socket") {
			t.Errorf("fairlead %q: %s%s", args, out, stderr)
		}
	}
}
