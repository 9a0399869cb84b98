// SPDX-License-Identifier: Apache-2.0

//go:build linux

package agentinstall

import (
	"bufio"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// servesVariable makes the test binary an agent as far as Uninstall sees it: a process that
// serves this control socket.
const servesVariable = "FAIRLEAD_TEST_CONTROL"

func TestMain(m *testing.M) {
	control := os.Getenv(servesVariable)
	if control == "" {
		os.Exit(m.Run())
	}
	l, err := net.Listen("unix", control)
	if err != nil {
		os.Exit(1)
	}
	_, _ = io.WriteString(os.Stdout, "serves\n")
	for {
		c, err := l.Accept()
		if err != nil {
			os.Exit(1)
		}
		_ = c.Close()
	}
}

// startAgent starts program as an agent that serves a control socket. The channel is closed
// when it has ended.
func startAgent(t *testing.T, program, control string) (pid int, ended <-chan struct{}) {
	t.Helper()
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), servesVariable+"="+control)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-done })
	return cmd.Process.Pid, done
}

// copied returns a copy of the test binary.
func copied(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "fairlead")
	if err := os.WriteFile(name, b, 0o755); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	return name
}

// What the boot command of WSL started, no init can stop.
func TestUninstallEndsTheAgentOfTheBootCommand(t *testing.T) {
	for _, tt := range []struct {
		name     string
		files    map[string]string // more of the machine
		another  bool              // the agent's program is not the one that was installed
		replaced bool              // the program was replaced since the agent started
	}{
		{name: "uninstall"},
		{name: "after an upgrade", replaced: true},
		{name: "uninstall of another program's", another: true},
		{name: "with systemd turned on", files: map[string]string{"run/systemd/system/": ""}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMachine(t, tt.files)
			o := m.options("--link=vsock://:1023")
			control := filepath.Join(t.TempDir(), "control.sock")
			var flags []string
			o.Control = func(f []string) string { flags = f; return control }
			agent := copied(t)
			text := marker + "\n[boot]\ncommand = " + agent + " agent --link=vsock://:1023 </dev/null >>/var/log/fairlead.log 2>&1 &\n"
			if tt.another {
				text = strings.ReplaceAll(text, agent, program)
			}
			if err := o.write(wslFile, text, 0o644); err != nil {
				t.Fatal(err)
			}
			pid, ended := startAgent(t, agent, control)
			if tt.replaced {
				if err := os.Remove(agent); err != nil {
					t.Fatal(err)
				}
			}
			r, err := Uninstall(t.Context(), o)
			if err != nil || !r.Found || !slices.Equal(flags, []string{"--link=vsock://:1023"}) {
				t.Fatalf("%+v, %v, flags %q", r, err, flags)
			}
			if tt.another {
				select {
				case <-ended:
					t.Error("ended")
				default:
				}
				if r.Ended != 0 || r.Runs == nil || !strings.Contains(r.Runs.Error(), agent) {
					t.Errorf("%+v", r)
				}
				return
			}
			if r.Ended != pid || r.Runs != nil {
				t.Errorf("%+v, want process %d ended", r, pid)
			}
			<-ended
		})
	}
}

// Where systemd was turned on later, its unit finds the control socket free.
func TestInstallEndsTheAgentOfTheBootCommand(t *testing.T) {
	m := newMachine(t, map[string]string{"proc/sys/kernel/osrelease": wslRelease, "run/systemd/system/": ""})
	control, agent := filepath.Join(t.TempDir(), "control.sock"), copied(t)
	o := m.options()
	o.Control = func([]string) string { return control }
	if err := o.write(wslFile, marker+"\n[boot]\ncommand = "+agent+" agent &\n", 0o644); err != nil {
		t.Fatal(err)
	}
	_, ended := startAgent(t, agent, control)
	run := o.Run
	o.Run = func(ctx context.Context, name string, args ...string) error {
		if _, serves := server(ctx, control); serves {
			t.Errorf("%s %q while the agent runs", name, args)
		}
		return run(ctx, name, args...)
	}
	if init, err := Install(t.Context(), o); err != nil || init != Systemd {
		t.Fatalf("%s, %v", init, err)
	}
	<-ended
}

// Nothing is wrong where no agent runs.
func TestUninstallWithoutAnAgent(t *testing.T) {
	m := newMachine(t, map[string]string{wslFile: marker + "\n"})
	o := m.options()
	o.Control = func([]string) string { return filepath.Join(m.root, "none.sock") }
	if r, err := Uninstall(t.Context(), o); err != nil || r != (Removed{Found: true}) {
		t.Errorf("%+v, %v", r, err)
	}
}
