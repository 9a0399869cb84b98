// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/enginetest"
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

// dockerContainer is a running container for the API of a Docker, with an address of its own.
func dockerContainer(letter, name, address, labels, ports string) string {
	return fmt.Sprintf(`{"Id":%q,"Name":"/%s","Names":["/%[2]s"],"Created":%d,"State":{"Status":"running","Running":true},"HostConfig":{},"Labels":{%[4]s},
		"Config":{"Labels":{%[4]s}},"NetworkSettings":{"Networks":{"bridge":{"IPAddress":%[5]q}},"Ports":{%[6]s}}}`,
		strings.Repeat(letter, 64), name, 1, labels, address, ports)
}

// A port that is asked for by name and is not there is shown with its reason, in the guest and
// on the host, by all commands.
func TestWhatWaitsIsShownEverywhere(t *testing.T) {
	r := newRig(t, "--source", "socket,docker", "--docker-host", enginetest.Docker(t, dockerContainer("a", "other", "172.30.0.2", "", "")), "--host-forwards")
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
	const guestWaits, hostWaits = "no running container has the name own", "no running container has the name web"
	run(r.agentCtl, 0, "forward", "add", "own:80")
	run(r.hostCtl, 0, "forward", "add", "web:80", "--to", "8080")
	rows := func(control string) (waits []string) {
		l, err := listAt(control)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range l.Publications {
			if p.Waits != "" {
				waits = append(waits, fmt.Sprintf("%s %s %s %t", p.Waits, p.State, p.Reason, p.Unpublished))
			}
		}
		return waits
	}
	wants := func(control, what string, want ...string) {
		t.Helper()
		r.eventually(what, func() error {
			if got := rows(control); !slices.Equal(got, want) {
				return fmt.Errorf("%q are listed, want %q", got, want)
			}
			return nil
		})
	}
	own, web := "own:80/tcp pending "+guestWaits, "web:80/tcp pending "+hostWaits
	wants(r.agentCtl, "the guest lists both", own+" false", web+" false")
	wants(r.hostCtl, "the host lists both", own+" true", web+" true")
	for _, control := range []string{r.agentCtl, r.hostCtl} {
		ls := run(control, 0, "ls", "-a")
		r.outside.start(t, "watch", "-a", "-o", "json", "--control", control).Prints(`"waits":"own:80/tcp"`, `"waits":"web:80/tcp"`, `"synced"`)
		for what, out := range map[string]string{"ls": ls, "explain": run(control, 1, "explain", "80")} {
			for _, want := range []string{guestWaits, hostWaits} {
				if !strings.Contains(strings.Join(strings.Fields(out), " "), want) {
					t.Errorf("%s lacks %q:\n%s", what, want, out)
				}
			}
		}
	}
	if out := run(r.hostCtl, 0, "ls"); strings.Contains(out, "web") {
		t.Errorf("without -a the host lists what waits:\n%s", out)
	}
	if out := run(r.hostCtl, 1, "explain", "8080"); !strings.Contains(out, "pending") && !strings.Contains(out, "waits") {
		t.Errorf("the host port is not explained:\n%s", out)
	}
	// What waits outlives a restart of the agent, and says that the guest is away.
	r.agent.Stop(syscall.SIGTERM)
	r.eventually("the guest is away", func() error {
		for _, row := range rows(r.hostCtl) {
			if strings.Contains(row, "web:80/tcp") && strings.Contains(row, "is not connected") {
				return nil
			}
		}
		return errors.New("the host does not say so")
	})
	r.startAgent()
	wants(r.hostCtl, "the guest is back", own+" true", web+" true")
	run(r.hostCtl, 0, "forward", "rm", "web:80")
	run(r.agentCtl, 0, "forward", "rm", "own:80")
	wants(r.agentCtl, "nothing waits in the guest")
	wants(r.hostCtl, "nothing waits on the host")
}

// What a host asks for by name and a rule of the guest denies is denied on the host, with that
// rule, and does not wait.
func TestForwardByNameThatTheGuestDenies(t *testing.T) {
	config := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(config, []byte("rules:\n  - {name: secrets, match: {name: secret}, action: deny}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, "--source", "socket,docker", "--docker-host", enginetest.Docker(t, dockerContainer("a", "secret", "172.30.0.2", "", "")),
		"--host-forwards", "--config", config)
	r.start()
	r.eventually("the host is connected", func() error {
		l, err := listAt(r.hostCtl)
		if err == nil && (len(l.Peers) != 1 || l.Peers[0].State != status.PeerConnected) {
			err = fmt.Errorf("%+v", l.Peers)
		}
		return err
	})
	const why = "denied by rule 1 (secrets)"
	_, _, _ = fairlead(t, "forward", "add", "secret:80", "--to", "8080", "--control", r.hostCtl)
	r.eventually("the rule says so", func() error {
		if out, _, _ := fairlead(t, "forward", "ls", "--control", r.hostCtl); !strings.Contains(strings.Join(strings.Fields(out), " "), "denied - "+why) {
			return errors.New(out)
		}
		return nil
	})
	if out, _, _ := fairlead(t, "explain", "80", "--control", r.hostCtl); !strings.Contains(out, "secrets") || strings.Contains(out, "waits") {
		t.Errorf("explain says\n%s", out)
	}
	l, err := listAt(r.hostCtl)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Publications {
		if p.Port == 80 && (p.Waits != "" || !p.Unpublished || !slices.Equal(p.Demands, []string{"secret:80/tcp"})) {
			t.Errorf("%+v", p)
		}
	}
}
