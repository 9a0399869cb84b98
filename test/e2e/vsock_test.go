// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/kit/echo"
)

// vsockRig is a rig whose link runs over the loopback transport (CID 1).
func vsockRig(t *testing.T, agentFlags ...string) *rig {
	r := newRig(t, agentFlags...)
	r.link, r.connect = "vsock://:1023", "vsock://1:1023"
	r.token = filepath.Join(r.dir, "token")
	return r
}

func TestVsock(t *testing.T) {
	r := vsockRig(t, "--allow-cids", "1")
	r.startAgent() // makes the token
	r.eventually("the token is made", func() error { _, err := os.Stat(r.token); return err })
	r.startHost()
	go echo.Serve(r.guest.listen(t, "tcp4", "0.0.0.0:7000"))
	r.wantState("tcp 0.0.0.0:7000", "active")
	c := echoThrough(t, r, "127.0.0.1:7000")
	for i := range 100 {
		if err := roundTrip(c, fmt.Sprintf("%0*d", 1000*(i%60)+1, i)); err != nil {
			t.Fatal(err)
		}
	}
	r.agent.Kill()
	r.startAgent()
	_ = echoThrough(t, r, "127.0.0.1:7000")
}

func TestVsockRefusesOtherContexts(t *testing.T) {
	r := vsockRig(t) // takes the host, CID 2, alone
	r.startAgent()
	r.eventually("the token is made", func() error { _, err := os.Stat(r.token); return err })
	r.startHost()
	r.eventually("the agent says whom it refused", func() error {
		if out := r.agent.Output(); !strings.Contains(out, "cid") {
			return errors.New("nothing in its log yet")
		}
		return nil
	})
	r.guest.listen(t, "tcp4", "0.0.0.0:7000")
	r.wantState("tcp 0.0.0.0:7000", "pending")
}

func TestVsockRefusesAnotherToken(t *testing.T) {
	r := vsockRig(t, "--allow-cids", "1")
	r.startAgent()
	r.eventually("the token is made", func() error { _, err := os.Stat(r.token); return err })
	other := filepath.Join(r.dir, "other")
	if err := os.WriteFile(other, []byte(strings.Repeat("0123456789abcdef", 4)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.token = other
	r.startHost()
	r.guest.listen(t, "tcp4", "0.0.0.0:7000")
	r.eventually("the host is told", func() error {
		if !strings.Contains(r.host.Output(), "proof") && !strings.Contains(r.host.Output(), "token") {
			return errors.New("nothing in its log yet")
		}
		return nil
	})
	r.wantState("tcp 0.0.0.0:7000", "pending")
}
