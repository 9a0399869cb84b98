// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/test/kit/enginetest"
	"github.com/fairlead/fairlead/test/kit/wait"
)

// command writes a script that others run, and returns its path.
func command(t *testing.T, name, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// A port is opened where it is reachable, as the one argument of the browser.
func TestOpen(t *testing.T) {
	r := newRig(t)
	r.start()
	r.guest.listen(t, "tcp4", "0.0.0.0:8080")
	r.wantState("tcp 0.0.0.0:8080", "active")
	asked := filepath.Join(r.dir, "asked")
	browser := command(t, "xdg-open", `echo "$#: $*" > `+asked+"\n")
	t.Setenv("PATH", filepath.Dir(browser)+":/usr/bin:/bin")
	out, stderr, code := fairlead(t, "open", "8080", "--control", r.hostCtl)
	b, err := os.ReadFile(asked)
	if url := "http://127.0.0.1:8080/\n"; code != 0 || err != nil || string(b) != "1: "+url || out != url {
		t.Errorf("exit %d, %q, %v; printed %s%s", code, b, err, out, stderr)
	}
	if _, stderr, code := fairlead(t, "open", "8081", "--control", r.hostCtl); code != 1 || !strings.Contains(stderr, "8081/tcp is not reachable: nothing serves it") {
		t.Errorf("exit %d, %s", code, stderr)
	}
	t.Setenv("PATH", r.dir)
	out, stderr, code = fairlead(t, "open", "8080", "--control", r.hostCtl)
	if code != 1 || !strings.HasPrefix(out, "http://127.0.0.1:8080/") || !strings.Contains(stderr, "there is no xdg-open here: open the URL yourself") {
		t.Errorf("exit %d, %s%s", code, out, stderr)
	}
}

// Each change is given to a run of the command.
func TestWatchRunsACommand(t *testing.T) {
	r := newRig(t)
	r.start()
	r.guest.listen(t, "tcp4", "127.0.0.1:8079") // there already: no change
	r.wantState("tcp 127.0.0.1:8079", "active")
	log := filepath.Join(r.dir, "changes")
	path := command(t, "on-change", `cat >> "$1"`+"\n")
	watch := r.outside.startCmd(t, "watch", exec.Command(binary, "watch", "--control", r.hostCtl, "--exec", path, "--", log))
	r.eventually("the watch shows what is there", func() error {
		if !strings.Contains(watch.Output(), "present") {
			return fmt.Errorf("%s", watch.Output())
		}
		return nil
	})
	l := r.guest.listen(t, "tcp4", "127.0.0.1:8080")
	ran := func(text string) {
		t.Helper()
		r.eventually("a run for "+text, func() error {
			b, _ := os.ReadFile(log)
			for line := range strings.Lines(string(b)) {
				if !strings.Contains(line, `"port":8080,`) {
					t.Fatalf("%s", line)
				}
				if strings.HasPrefix(line, `{"schemaVersion":1,`) && strings.Contains(line, text) {
					return nil
				}
			}
			return fmt.Errorf("%s", b)
		})
	}
	r.wantState("tcp 127.0.0.1:8080", "active")
	ran(`"state":"active"`)
	_ = l.Close()
	ran(`"type":"removed"`)
	if code := watch.Stop(syscall.SIGINT); code != 0 && code != 130 {
		t.Errorf("exit %d: %s", code, watch.Output())
	}
}

// With --notify the desktop shows what opens and what another program has, and nothing that a
// guest has when it connects. The name of a guest's container is text there, whatever it is;
// many changes give one notification.
func TestNotifications(t *testing.T) {
	r := newRig(t)
	shown := filepath.Join(r.dir, "shown")
	send := command(t, "notify-send", `printf '%s|' "$@" >> `+shown+"\necho >> "+shown+"\n")
	t.Setenv("PATH", filepath.Dir(send)+":"+os.Getenv("PATH"))
	r.hostFlags = []string{"--notify"}
	const id = "4f1e3c0a9b7d2c6e8f5a1b3d7c9e0f2a4b6c8d0e1f3a5b7c9d1e3f5a7b9c0d2e"
	hostile := "<b>$(touch x)`touch y`\\\\n"
	r.agentFlags = []string{"--source", "socket,docker", "--docker-host", enginetest.Docker(t, fmt.Sprintf(`{"Id":%q,"Name":"/%s","Names":["/%[2]s"],
		"State":{"Status":"running","Running":true},"Config":{},"HostConfig":{},
		"NetworkSettings":{"Networks":{},"Ports":{"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"}]}}}`, id, hostile))}
	taken := r.outside.listen(t, "tcp4", "127.0.0.1:8080")
	r.outside.listen(t, "tcp4", "127.0.0.1:8081")
	for _, at := range []string{"0.0.0.0:8080", "127.0.0.1:8082", "127.0.0.1:8083"} {
		r.guest.listen(t, "tcp4", at)
	}
	r.start()
	for at, state := range map[string]string{"0.0.0.0:8080": "conflict", "127.0.0.1:8082": "active", "127.0.0.1:8083": "active"} {
		r.wantState("tcp "+at, state)
	}
	_ = taken.Close()
	r.guest.listen(t, "tcp4", "127.0.0.1:8081")
	r.wantState("tcp 127.0.0.1:8081", "conflict")
	wants := func(what string, texts ...string) {
		t.Helper()
		wait.Within(t, time.Minute, what, func() error { // there are 10 s between two
			b, err := os.ReadFile(shown)
			for _, text := range texts {
				if err == nil && !strings.Contains(string(b), text) {
					err = fmt.Errorf("%s", b)
				}
			}
			return err
		})
	}
	wants("both are shown", "--app-name=fairlead|--|fairlead: ", "8080/tcp of ‹b›$(touch x)`touch y`＼n", "8081/tcp of ", "127.0.0.1:8081 is in use")
	for n := range 20 {
		r.guest.listen(t, "tcp4", fmt.Sprintf("127.0.0.1:%d", 9000+n))
	}
	wants("the burst is shown as one", "20 ports opened", "and 16 more: fairlead ls")
	if b, _ := os.ReadFile(shown); strings.Contains(string(b), "8082") || strings.Contains(string(b), "8083") {
		t.Errorf("what the guest had at first is shown: %s", b)
	}
	for _, name := range []string{"x", "y"} {
		if _, err := os.Stat(name); err == nil {
			t.Errorf("a shell made %s", name)
		}
	}
}
