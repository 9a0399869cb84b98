// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestDemo(t *testing.T) {
	outside := newSpace(t)
	tmp, err := os.MkdirTemp("", "fl") // short: sockets are in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(tmp) })
	cmd := exec.Command(binary, "demo")
	cmd.Env = append(os.Environ(), "GOTRACEBACK=all", "TMPDIR="+tmp)
	p := outside.startCmd(t, "demo", cmd)
	var web string
	wait.Until(t, "the demo shows its ports", func() error {
		out := p.Output()
		m := regexp.MustCompile(`curl http://(127\.0\.0\.1:\d+)/`).FindStringSubmatch(out)
		if m == nil || !strings.Contains(out, "/udp") {
			return errors.New("not yet")
		}
		web = m[1]
		return nil
	})
	if !regexp.MustCompile(`sockets observed by:\s+\w+`).MatchString(p.Output()) {
		t.Error("it does not say which method runs")
	}
	get := func() (string, error) {
		c, err := outside.Dial("tcp", web)
		if err != nil {
			return "", err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, _ = io.WriteString(c, "GET / HTTP/1.0\r\n\r\n")
		b, err := io.ReadAll(c)
		return string(b), err
	}
	wait.Until(t, "the page answers outside", func() error {
		s, err := get()
		if err == nil && !strings.Contains(s, "Hello from the guest") {
			err = fmt.Errorf("page = %q", s)
		}
		return err
	})

	m := regexp.MustCompile(`namespace (fairlead-demo-\d+)`).FindStringSubmatch(p.Output())
	if m == nil {
		t.Fatalf("no namespace in %q", p.Output())
	}
	pid := webServer(t, strings.TrimPrefix(web, "127.0.0.1:"))
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the server's exit removes the row", func() error {
		if !regexp.MustCompile(`removed +` + strings.TrimPrefix(web, "127.0.0.1:") + `/tcp`).MatchString(p.Output()) {
			return errors.New("no line of it yet")
		}
		if _, err := get(); err == nil {
			return errors.New("the port still answers")
		}
		return nil
	})
	if code := p.Stop(syscall.SIGINT); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if _, err := os.Stat(filepath.Join("/run/netns", m[1])); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the namespace is left behind: %v", err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	wait.Until(t, "no process is left", func() error {
		if out := procsNaming(t, m[1]); len(out) > 0 {
			return fmt.Errorf("%q", out)
		}
		return nil
	})
}

// webServer returns the process that the demo runs as the web server of the guest.
func webServer(t *testing.T, port string) int {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range procs {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it ended meanwhile
		}
		args := strings.Split(string(b), "\x00")
		if len(args) > 3 && args[0] == binary && args[2] == "http" && strings.HasSuffix(args[3], ":"+port) {
			var pid int
			_, _ = fmt.Sscanf(path, "/proc/%d/", &pid)
			return pid
		}
	}
	t.Fatal("no server of the demo")
	return 0
}

// procsNaming returns command lines that contain word.
func procsNaming(t *testing.T, word string) (found []string) {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range procs {
		if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), word) {
			found = append(found, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return found
}
