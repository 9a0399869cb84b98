// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package run

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/run/policy"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// freshGroup makes a cgroup as the service has one, with what controllers there are, and
// returns these.
func freshGroup(t *testing.T) (dir string, controllers []string) {
	t.Helper()
	own, err := ownGroup()
	if err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile(filepath.Join(own, "cgroup.controllers"))
	if err != nil {
		t.Fatal(err)
	}
	for c := range strings.FieldsSeq(string(have)) {
		_ = enable(own, c) // not everywhere
	}
	if dir, err = os.MkdirTemp(own, "fairlead-test-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		wait.Until(t, "the cgroups are empty", func() error {
			_ = filepath.WalkDir(dir, func(path string, e os.DirEntry, _ error) error {
				if e != nil && e.IsDir() && path != dir {
					_ = group(path).kill()
					_ = os.Remove(path)
				}
				return nil
			})
			if err := os.Remove(dir); !errors.Is(err, os.ErrNotExist) {
				return err
			}
			return nil
		})
	})
	if have, err = os.ReadFile(filepath.Join(dir, "cgroup.controllers")); err != nil {
		t.Fatal(err)
	}
	return dir, strings.Fields(string(have))
}

// in has a program start in a cgroup.
func in(t *testing.T, dir string, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	cmd.Stderr = os.Stderr
	return cmd
}

// as returns the test binary in a role.
func as(role string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	return cmd
}

// A program whose client has gone before it begins does not begin: nobody would kill it.
func TestNothingBeginsWithoutAClient(t *testing.T) {
	own, _ := freshGroup(t)
	g, err := (&groups{dir: own}).add()
	if err != nil {
		t.Fatal(err)
	}
	path, sum := program(t)
	e := entry(path, sum, "args")
	p := prepared{Request: role("args"), entry: &e, user: &user.User{}, identity: identity{UID: 65534, GID: 65534}, streams: files{os.Stdin, os.Stdout, os.Stderr}}
	conn, theirs, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = theirs.Close()
	(&attendant{conn: conn, group: g}).attend()
	if _, err := p.start(g); err == nil || !strings.Contains(err.Error(), "enter the job's cgroup") {
		t.Error(err)
	}
}

// playDelegate gives jobs a controller.
func playDelegate(controller string) error {
	own, err := ownGroup()
	if err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(own, slice), 0o700); err != nil {
		return err
	}
	return delegate(own, controller)
}

// Jobs have a controller if the service's cgroup has it, and no other process.
func TestDelegate(t *testing.T) {
	for _, c := range []struct {
		name  string
		other bool // another process is there
		bogus bool // another controller
		want  string
	}{
		{"alone", false, false, "<nil>"},
		{"beside another process", true, false, "has other processes"},
		{"without the controller", false, true, `has no controller "bogus": its unit needs Delegate=bogus`},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, controllers := freshGroup(t)
			controller := "bogus"
			if !c.bogus {
				if len(controllers) == 0 {
					t.Log("this machine's cgroups give no controller on")
					return
				}
				controller = controllers[0]
			}
			if c.other {
				other := in(t, dir, exec.Command("sleep", "1000"))
				if err := other.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _, _ = other.Process.Kill(), other.Wait() })
			}
			out, err := in(t, dir, as("delegate "+controller)).Output()
			if err != nil || !strings.Contains(string(out), c.want) {
				t.Errorf("%s, %v; want %s", out, err, c.want)
			}
		})
	}
}

// playLimited serves programs with limits, and prints how each ended.
func playLimited(args string) error {
	path, sum, _ := strings.Cut(args, " ")
	hog, many, sleep, args7 := entry(path, sum, "hog"), entry(path, sum, "many"), entry(path, sum, "sleep"), entry(path, sum, "args")
	hog.Memory, many.Processes, sleep.Time = 64<<20, 50, 100*time.Millisecond
	args7.Memory, args7.Processes, args7.Time = 64<<20, 50, time.Hour
	// A launcher has more threads than this program may have.
	b, err := os.ReadFile("/bin/true")
	if err != nil {
		return err
	}
	one := policy.Entry{Name: "true", Path: "/bin/true", SHA256: fmt.Sprintf("%x", sha256.Sum256(b)), User: "nobody", Processes: 1}
	all := policy.Policy{hog, many, sleep, args7, one}
	var log lines
	s := New(Options{Policy: all, Jobs: 8, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err := s.Start(); err != nil {
		return err
	}
	for _, e := range all {
		if s.allow.Find(e.Name) == nil {
			fmt.Println(e.Name, "refused")
			continue
		}
		q := role(e.Name)
		q.Args = q.Args[:len(e.Args)]
		j, err := s.starter.start(q)
		if err != nil {
			return err
		}
		exit, err := j.wait()
		j.close()
		if err != nil {
			return err
		}
		fmt.Println(e.Name, exit)
	}
	if n := strings.Count(log.String(), "its program cannot be limited"); n != len(all)-len(s.allow) {
		return fmt.Errorf("%d refused entries, log:\n%s", len(all)-len(s.allow), &log)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return s.starter.wait(ctx)
}

// A program keeps within the limits of its entry, and is killed beyond. An entry whose limits
// cannot be had is refused, and no other.
func TestLimits(t *testing.T) {
	path, sum := program(t)
	dir, controllers := freshGroup(t)
	out, err := in(t, dir, as("limited "+path+" "+sum)).Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := []string{"hog SIGKILL for its limit of memory", "many exit 6", "sleep SIGKILL for its limit of time", "args exit 7", "true exit 0"}
	memory, pids := slices.Contains(controllers, "memory"), slices.Contains(controllers, "pids")
	if !memory {
		want[0] = "hog refused"
	}
	if !pids {
		want[1], want[4] = "many refused", "true refused"
	}
	if !memory || !pids {
		want[3] = "args refused"
	}
	if got := strings.Split(strings.TrimSpace(string(out)), "\n"); !slices.Equal(got, want) {
		t.Errorf("with the controllers %q: %q, want %q", controllers, got, want)
	}
}
