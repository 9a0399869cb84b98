// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// cgroupOf makes a cgroup that is named as Docker names that of a container.
func cgroupOf(t *testing.T, id string) *os.File {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	whole, _, err := cgroup.Mounts(bytes.NewReader(mounts))
	if err != nil || len(whole) == 0 {
		t.Fatalf("cgroup2 is not mounted (%v)", err)
	}
	dir := filepath.Join(whole[0], "docker-"+id+".scope")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		wait.Until(t, "the cgroup is empty", func() error {
			if err := os.Remove(dir); !errors.Is(err, os.ErrNotExist) {
				return err
			}
			return nil
		})
	})
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// The agent with its few capabilities serves containers what its configuration allows, in both
// directions, and nothing else.
func TestPublishOnRequest(t *testing.T) {
	const id = "4f1e3c0a9b7d2c6e8f5a1b3d7c9e0f2a4b6c8d0e1f3a5b7c9d1e3f5a7b9c0d2f"
	docker := enginetest.Docker(t, fmt.Sprintf(`{"Id":%q,"Name":"/web","Names":["/web"],"State":{"Status":"running","Running":true},`+
		`"Config":{},"HostConfig":{},"NetworkSettings":{"Networks":{},"Ports":{}}}`, id))
	dir := t.TempDir()
	socket := filepath.Join(dir, "run", "publish.sock")
	config := filepath.Join(dir, "agent.yaml")
	configure := func(container, more string) {
		t.Helper()
		if err := os.WriteFile(config, fmt.Appendf(nil, `
docker: {hosts: %s}
publish:
  socket: %s
  allow:
  - match: {name: %s}
    guestPorts: 5432
    hostPorts: 3000
%s`, docker, socket, container, more), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	configure("web", "")
	r := newRig(t, "--config", config, "--source", "socket,docker")
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:5432"))
	container := newSpace(t)
	go echo.Serve(container.listen(t, "tcp4", "127.0.0.1:8000"))
	r.start()
	r.wantState("tcp 127.0.0.1:5432", "active")
	group := cgroupOf(t, id)
	publish := func(inside bool, args ...string) *process {
		t.Helper()
		cmd := exec.Command(binary, append([]string{"publish", "--socket", socket}, args...)...)
		if inside {
			// By a shell that enters the cgroup, as this works where clone3(2) does not.
			cmd = exec.Command("/bin/sh", append([]string{"-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, group.Name(), binary}, cmd.Args[1:]...)...)
		}
		return container.startCmd(t, "publish", cmd)
	}
	fails := func(p *process, text string) {
		t.Helper()
		p.Prints(text)
		wait.For(t, "its end", p.Done())
		if code := p.ExitCode(); code != 1 {
			t.Errorf("exit status %d, want 1", code)
		}
	}
	fails(publish(false, "5432"), "container: no engine knows its container")
	fails(publish(true, "5433"), `policy: no entry of publish.allow lets container "web" reach port 5433 of the guest`)
	fails(publish(true, "8000", "--to-host"), `policy: no entry of publish.allow gives container "web" port 8000 of the host`)

	held := publish(true, "5432", "--as", "15432")
	held.Prints("127.0.0.1:15432 leads to port 5432 of the guest.")
	if err := probe.Want(probe.Data, container.dialer("127.0.0.1:15432"), "x"); err != nil {
		t.Error(err)
	}
	p := publish(true, "8000", "--to-host", "--as", "3000")
	p.Prints("Port 8000 of this container is published for port 3000 of the host.")
	key := "tcp 127.102.0.1:3000"
	r.wantState(key, "active")
	if _, row := r.state(key); row.Owner.Name != "web" {
		t.Errorf("its owner is %+v", row.Owner)
	}
	if err := probe.Want(probe.Data, r.outside.dialer("127.0.0.1:3000"), "x"); err != nil {
		t.Error(err)
	}
	out, err := exec.Command(binary, "explain", "3000", "--control", r.agentCtl).CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("127.102.0.1:3000 answers")) {
		t.Errorf("explain: %v\n%s", err, out)
	}
	p.Kill()
	wait.Until(t, "the port of the host is closed", func() error { return probe.WantClosed(r.outside.dialer("127.0.0.1:3000")) })

	// A right that is taken away ends what it gave. What needs a restart is named.
	p = publish(true, "8000", "--to-host", "--as", "3000")
	p.Prints("is published for port 3000 of the host.")
	configure("nobody-else", "logLevel: debug\n")
	p.Prints(`policy: no entry of publish.allow gives container "web" port 3000 of the host`)
	held.Prints(`policy: no entry of publish.allow lets container "web" reach port 5432 of the guest`)
	wait.Until(t, "the port of the host is closed", func() error { return probe.WantClosed(r.outside.dialer("127.0.0.1:3000")) })
	fails(publish(true, "5432"), `policy: no entry of publish.allow matches container "web"`)
	r.agent.Prints("settings changed that need a restart", "keys=logLevel")
	if out, _, _ := fairlead(t, "doctor", "--control", r.agentCtl); !strings.Contains(out, "not yet in effect: logLevel") {
		t.Errorf("doctor:\n%s", out)
	}
}
