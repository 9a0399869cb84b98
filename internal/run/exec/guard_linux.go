// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/cgroup"
	"github.com/fairlead/fairlead/internal/run/image"
)

// self is the program of this process, also after its file was replaced.
func self() (string, error) { return "/proc/self/exe", nil }

// closeOnExec keeps what this process inherited from its programs.
func closeOnExec() error {
	if err := unix.CloseRange(guardSocket, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close_range: %w: it needs Linux 5.11", err)
	}
	return nil
}

// startProgram starts a program from memory, in the group if that can be entered. It returns
// the group in which it is, empty if it is in none.
func startProgram(cmd *exec.Cmd, p Program, group string) (string, error) {
	sealed, err := image.Seal(p.Path, p.SHA256)
	if err != nil {
		return "", err
	}
	defer func() { _ = sealed.Close() }()
	// What a program leaves becomes a child of this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return "", os.NewSyscallError("prctl", err)
	}
	// This process could not kill what has become another user's. The thread that starts the
	// program passes it on.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return "", os.NewSyscallError("prctl", err)
	}
	beyond, err := image.Command(cmd, sealed)
	if err != nil {
		return "", err
	}
	defer func() { _ = beyond.Close() }()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if dir, err := os.Open(group); err == nil {
		defer func() { _ = dir.Close() }()
		again := *cmd
		attr := *cmd.SysProcAttr
		again.SysProcAttr = &attr
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
		if err := cmd.Start(); err == nil {
			return group, nil
		}
		*cmd = again
	}
	return "", cmd.Start()
}

const killFile = "cgroup.kill" // since Linux 5.14

// newGroup makes a cgroup below that of this process. It is empty where there is no cgroup v2
// or this user may not make one; then killAll has to find what a job started.
func newGroup() string {
	own, err := ownGroup()
	if err != nil {
		return ""
	}
	dir, err := os.MkdirTemp(own, "fairlead-job-")
	if err != nil {
		return ""
	}
	if _, err := os.Stat(filepath.Join(dir, killFile)); err != nil {
		_ = os.Remove(dir)
		return ""
	}
	return dir
}

// ownGroup returns the directory of the cgroup in which this process is.
func ownGroup() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	whole, _, err := cgroup.Mounts(f)
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok && len(whole) > 0 {
			return filepath.Join(whole[0], path), nil
		}
	}
	return "", errors.New("this process is in no cgroup of the unified hierarchy")
}

// endGroup kills what is in a group, and removes it when that has gone.
func endGroup(dir string) error {
	if dir == "" {
		return nil
	}
	killGroup(dir)
	pause := time.Millisecond
	for start := time.Now(); ; pause = min(2*pause, 100*time.Millisecond) {
		err := os.Remove(dir)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if time.Since(start) > goneTimeout {
			return fmt.Errorf("remove a job's cgroup: %w", err)
		}
		time.Sleep(pause)
	}
}

func killGroup(dir string) { _ = os.WriteFile(filepath.Join(dir, killFile), []byte("1"), 0) }

// killAll kills all descendants of this process: at once those in the group, and one after the
// other all that there are. What is made meanwhile is found the next time.
func killAll(_ int, group string) {
	if group != "" {
		killGroup(group)
	}
	family := map[int]bool{os.Getpid(): true}
	for again := true; again; {
		again = false
		for pid, parent := range parents() {
			if family[parent] && !family[pid] {
				family[pid], again = true, true
				killIf(pid, family)
			}
		}
	}
}

// killIf kills a process if its parent is in the family: another one may have got its number.
func killIf(pid int, family map[int]bool) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(fd) }()
	if parent, ok := parentOf(pid); ok && family[parent] {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}

// parents returns the parent of each process.
func parents() map[int]int {
	all := make(map[int]int)
	proc, err := os.Open("/proc")
	if err != nil {
		return all
	}
	defer func() { _ = proc.Close() }()
	names, _ := proc.Readdirnames(-1) // what was read counts
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if parent, ok := parentOf(pid); ok {
			all[pid] = parent
		}
	}
	return all
}

// parentOf reads the parent of a process; see proc_pid_stat(5).
func parentOf(pid int) (int, bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false
	}
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]) // the name before may have anything
	if len(fields) < 2 {
		return 0, false
	}
	parent, err := strconv.Atoi(string(fields[1]))
	return parent, err == nil
}
