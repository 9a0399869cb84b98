// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// A port that the guest denies is known on the host, with its reason, and is not open
// there; when a rule allows it, it is published.
func TestUnpublishedPortsAreKnownToTheHost(t *testing.T) {
	r := newRig(t)
	config := filepath.Join(r.dir, "agent.yaml")
	rules := func(text string) {
		t.Helper()
		if err := os.WriteFile(config+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(config+".new", config); err != nil {
			t.Fatal(err)
		}
		if r.agent != nil { // file notifications may have run out on a busy machine
			r.agent.Signal(syscall.SIGHUP)
		}
	}
	rules("holdDown: 0s\nrules:\n- {name: no-debug, match: {ports: 9229}, action: deny}\n")
	r.agentFlags = []string{"--config", config}
	r.start()
	r.guest.listen(t, "tcp4", "0.0.0.0:8080")
	r.guest.listen(t, "tcp4", "127.0.0.1:9229")
	r.wantState("tcp 0.0.0.0:8080", "active")

	row := func() (p status.Publication, ok bool) {
		l, err := listAt(r.hostCtl)
		if err != nil {
			return p, false
		}
		for _, p := range l.Publications {
			if p.Key().String() == "tcp 127.0.0.1:9229" {
				return p, true
			}
		}
		return p, false
	}
	r.eventually("the host knows the denied port", func() error {
		p, ok := row()
		if !ok || !p.Unpublished || p.State != port.Denied || !strings.Contains(p.Reason, "no-debug") || p.Owner.Name == "" || len(p.HostAddresses) > 0 {
			return fmt.Errorf("%v, %+v", ok, p)
		}
		return nil
	})
	if c, err := r.outside.Dial("tcp", "127.0.0.1:9229"); err == nil {
		_ = c.Close()
		t.Error("a denied port is open on the host")
	}
	for _, c := range []struct {
		args string
		code int
		want string
		miss string
	}{
		{"ls", 0, "8080/tcp", "9229"},
		{"ls -a", 0, "9229/tcp", "there is no such text"},
		{"ls --filter 9229", 0, "`fairlead ls -a` lists 1", "127.0.0.1"},
		{"ls -o json", 0, "8080", "9229"},
		{"ls -a -o json", 0, `"unpublished":true`, "dialTarget\":\"1"},
		{"explain 9229", 1, "in the guest", "reachable on the host at"},
	} {
		out, stderr, code := fairlead(t, append(strings.Fields(c.args), "--control", r.hostCtl)...)
		if code != c.code || !strings.Contains(out, c.want) || strings.Contains(out, c.miss) {
			t.Errorf("%s: exit %d, want %d with %q and without %q:\n%s%s", c.args, code, c.code, c.want, c.miss, out, stderr)
		}
	}

	rules("holdDown: 0s\n")
	r.wantState("tcp 127.0.0.1:9229", "active")
	r.eventually("the host has the published port instead", func() error {
		if p, ok := row(); !ok || p.Unpublished || p.State != port.Active {
			return fmt.Errorf("%v, %+v", ok, p)
		}
		return nil
	})
}
