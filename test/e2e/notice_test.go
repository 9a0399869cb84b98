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
