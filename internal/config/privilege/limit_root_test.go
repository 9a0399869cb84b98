// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package privilege

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// childVariable makes the test binary a process that limits itself to this set, in
// hexadecimal, and prints the status of its threads.
const childVariable = "FAIRLEAD_CAPABILITIES"

func TestMain(m *testing.M) {
	if keep := os.Getenv(childVariable); keep != "" {
		if err := child(keep); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// printOnly has the child print its status alone.
const printOnly = "print"

// waitOnly has the child wait for the end of its input.
const waitOnly = "wait"

func child(keep string) error {
	switch keep {
	case printOnly:
		return printStatus()
	case waitOnly:
		_, err := io.Copy(io.Discard, os.Stdin)
		return err
	}
	n, err := strconv.ParseUint(keep, 16, 64)
	if err != nil {
		return err
	}
	for range 8 { // threads that are there before, and that wait in the kernel
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer w.Close()
		go func() {
			runtime.LockOSThread()
			b := make([]byte, 1)
			_, _ = r.Read(b)
		}()
	}
	if err := Limit(Set(n)); err != nil {
		return err
	}
	started := make(chan struct{})
	go func() { // one that is made after
		runtime.LockOSThread()
		started <- struct{}{}
		select {}
	}()
	<-started
	fmt.Println("maps need a capability:", MapsNeedCapability())
	// A program that it starts, as root, gets no more.
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{childVariable + "=" + printOnly}
	cmd.Stdout = os.Stdout
	if err := cmd.Run(); err != nil {
		return err
	}
	return printStatus()
}

func printStatus() error {
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		return err
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // it has ended
		}
		fmt.Printf("%s\n%s", task, b)
	}
	return nil
}

// Every thread has the capabilities that are kept, and no other in any set.
func TestLimitReachesAllThreads(t *testing.T) {
	keep := SetOf(Agent(), true)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%x", childVariable, uint64(keep)))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := map[string]string{
		"CapInh": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1",
		"CapPrm": fmt.Sprintf("%016x", uint64(keep)), "CapEff": fmt.Sprintf("%016x", uint64(keep)),
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if want[key] == "" {
			continue
		}
		seen++
		if got := strings.TrimSpace(value); got != want[key] {
			t.Errorf("%s is %s, want %s", key, got, want[key])
		}
	}
	if seen < 4*len(want) {
		t.Errorf("%d lines, too few\n%s", seen, out)
	}
}

// The reason why the unit of the host peer does not set NoNewPrivileges: a capability that
// the program's file has (setcap) is not gained then. Without, Limit keeps it, and lets
// nothing else be gained.
func TestCapabilityOfTheFile(t *testing.T) {
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.WriteFile(program, b, 0o755)); err != nil { //nolint:gosec // another user runs it
		t.Fatal(err)
	}
	const effective, revision2 = 1, 2 << 24 // struct vfs_cap_data
	attr := make([]byte, 20)
	binary.LittleEndian.PutUint32(attr, revision2|effective)
	binary.LittleEndian.PutUint32(attr[4:], 1<<netBindService)
	if err := unix.Setxattr(program, "security.capability", attr, 0); err != nil {
		t.Fatal(err)
	}
	keep := SetOf(Host(), true)
	for want, before := range map[string][]string{"CapEff:\t0000000000000400": nil, "CapEff:\t0000000000000000": {"setpriv", "--no-new-privs"}} {
		words := append(slices.Clone(before), program)
		cmd := exec.Command(words[0], words[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		cmd.Env = []string{fmt.Sprintf("%s=%x", childVariable, uint64(keep))}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%q: %v\n%s", before, err, out)
		}
		if !strings.Contains(string(out), want) || !strings.Contains(string(out), "NoNewPrivs:\t1") || strings.Contains(string(out), "NoNewPrivs:\t0") {
			t.Errorf("%q: want %s and no_new_privs\n%s", before, want, out)
		}
	}
}

// The reason why no Landlock rule is set: with any, even one that limits nothing here, the
// sockets of other processes cannot be read, whatever the capabilities.
func TestLandlockHidesOwnersOfSockets(t *testing.T) {
	other := exec.Command("/proc/self/exe")
	other.Env = []string{childVariable + "=" + waitOnly}
	in, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = other.Wait()
	})
	path := fmt.Sprintf("/proc/%d/fd/0", other.Process.Pid)
	before, after := errors.New("not read"), error(nil)
	var restricted error
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		defer close(done)
		_, before = os.Readlink(path)
		if restricted = restrict(); restricted == nil {
			_, after = os.Readlink(path)
		}
	}()
	<-done
	switch {
	case before != nil:
		t.Fatal(before)
	case errors.Is(restricted, unix.ENOSYS) || errors.Is(restricted, unix.EOPNOTSUPP):
		t.Logf("this kernel has no Landlock: %v", restricted)
	case restricted != nil:
		t.Fatal(restricted)
	case !errors.Is(after, os.ErrPermission):
		t.Errorf("readlink %s: %v, want it denied: then the agent could be restricted by Landlock", path, after)
	}
}

// restrict forbids the calling thread to make block devices.
func restrict() error {
	files := uint64(unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK) // the first version of struct landlock_ruleset_attr
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&files)), unsafe.Sizeof(files), 0)
	if errno != 0 {
		return errno
	}
	defer func() { _ = unix.Close(int(fd)) }()
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// The kernel's answer does not change what the thread may do.
func TestMapsNeedCapabilityRestores(t *testing.T) {
	read := func() string {
		b, err := os.ReadFile("/proc/thread-self/status")
		if err != nil {
			t.Fatal(err)
		}
		return string(b[strings.Index(string(b), "CapInh"):strings.Index(string(b), "Speculation")])
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := read()
	t.Log("maps need a capability:", MapsNeedCapability())
	if after := read(); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
}
