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
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
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
			if p.Key.String() == "tcp 127.0.0.1:9229" {
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

// dockerContainer is a running container for the API of a Docker, with an address of its own.
func dockerContainer(letter, name, address, labels, ports string) string {
	return fmt.Sprintf(`{"Id":%q,"Name":"/%s","Names":["/%[2]s"],"Created":%d,"State":{"Status":"running","Running":true},"HostConfig":{},"Labels":{%[4]s},
		"Config":{"Labels":{%[4]s}},"NetworkSettings":{"Networks":{"bridge":{"IPAddress":%[5]q}},"Ports":{%[6]s}}}`,
		strings.Repeat(letter, 64), name, 1, labels, address, ports)
}

// A port that is asked for by name and is not there is shown with its reason by all commands in
// the guest. A host asks for none, and says where that is done.
func TestWhatWaitsIsShown(t *testing.T) {
	r := newRig(t, "--source", "socket,docker", "--docker-host", enginetest.Docker(t, dockerContainer("a", "web", "172.30.0.2", "", "")))
	r.start()
	r.eventually("the host is connected", func() error {
		l, err := listAt(r.hostCtl)
		if err == nil && (len(l.Peers) != 1 || l.Peers[0].State != status.PeerConnected) {
			err = fmt.Errorf("%+v", l.Peers)
		}
		return err
	})
	run := func(control string, want int, args ...string) string {
		t.Helper()
		out, stderr, code := fairlead(t, append(args, "--control", control)...)
		if code != want {
			t.Errorf("%q: exit %d, %s%s", args, code, out, stderr)
		}
		return out
	}
	const why = "no running container has the name own"
	if out := run(r.agentCtl, 0, "forward", "add", "own:81"); !strings.Contains(out, "(pending: "+why+")") {
		t.Error(out)
	}
	if out := run(r.hostCtl, 0, "forward", "add", "web:80", "--to", "8088"); !strings.Contains(out, "pending: the guest publishes nothing as web:80/tcp: run `fairlead forward add web:80/tcp` in the guest") {
		t.Error(out)
	}
	r.outside.start(t, "watch", "-o", "json", "--control", r.agentCtl).Prints(`"waits":"own:81/tcp"`, `"synced"`)
	for what, out := range map[string]string{"ls": run(r.agentCtl, 0, "ls"), "explain": run(r.agentCtl, 1, "explain", "81")} {
		if !strings.Contains(strings.Join(strings.Fields(out), " "), why) {
			t.Errorf("%s lacks %q:\n%s", what, why, out)
		}
	}
	if out := run(r.hostCtl, 0, "ls", "-a"); strings.Contains(out, "web") {
		t.Errorf("the host lists what nobody published:\n%s", out)
	}
	if out := run(r.hostCtl, 1, "explain", "8088"); !strings.Contains(out, "waits: the guest publishes nothing as") {
		t.Errorf("the host port is not explained:\n%s", out)
	}
	// What the guest publishes by the name is at the host port of the host's rule.
	run(r.agentCtl, 0, "forward", "add", "web:80")
	r.wantState("tcp 172.30.0.2:80", "active")
	if out := run(r.hostCtl, 0, "forward", "ls"); !strings.Contains(out, "127.0.0.1:8088") {
		t.Errorf("it is not moved:\n%s", out)
	}
}
