// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

// Package engines runs the sources of declared ports against real engines:
// Debian's dockerd, containerd with nerdctl and CNI, and a Kubernetes API server
// with kube-proxy, as hack/provision-engines.sh provides them.
//
// The tests run in network, mount, pid and UTS namespaces of their own, in which
// /etc, /var/lib, /opt and /run are private, so that an engine finds the paths
// that it expects and leaves nothing behind. They need root.
package engines

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/fairlead/fairlead/test/program"
)

// innerEnv is set in the test binary that runs inside the namespaces, to the
// directory for its files.
const innerEnv = "FAIRLEAD_ENGINES_DIR"

// nodeAddr is an address of the guest that is not loopback, on a network of its own.
const nodeAddr = "192.168.77.1"

func TestMain(m *testing.M) {
	if dir := os.Getenv(innerEnv); dir != "" {
		if err := setUp(dir); err != nil {
			fmt.Fprintln(os.Stderr, "set up the namespaces:", err)
			os.Exit(1)
		}
		os.Exit(runTests(m))
	}
	code, err := runInside()
	if err != nil {
		fmt.Fprintln(os.Stderr, "run inside namespaces:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

// runTests runs the tests, and fails too if a source left a goroutine behind.
func runTests(m *testing.M) int {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// runInside runs this binary again in new namespaces. Where all tests run, those
// of Docker run in namespaces of their own, beside the others: engines spend much
// of their time waiting.
func runInside() (int, error) {
	dir, err := os.MkdirTemp("", "fl-engines-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binary, err := program.Path(dir)
	if err != nil {
		return 0, err
	}
	flag.Parse()
	if flag.Lookup("test.run").Value.String() != "" || flag.Lookup("test.skip").Value.String() != "" {
		return inside(binary, os.Stdout)
	}
	// What the second says is shown after what the first does.
	later, err := os.Create(filepath.Join(dir, "later"))
	if err != nil {
		return 0, err
	}
	defer func() { _ = later.Close() }()
	var code int
	var second error
	var wg sync.WaitGroup
	wg.Go(func() { code, second = inside(binary, later, "-test.run=Docker") })
	first, err := inside(binary, os.Stdout, "-test.skip=Docker")
	wg.Wait()
	if _, err := later.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	_, copied := io.Copy(os.Stdout, later)
	return max(first, code), errors.Join(err, second, copied)
}

// inside runs this binary in new namespaces, with flags besides its own. A shell
// is process 1 there: it reaps what the engines leave, so that a dead engine looks
// dead.
func inside(binary string, out *os.File, flags ...string) (int, error) {
	// Process 1 must die with this one, and the kernel takes the thread for it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	dir, err := os.MkdirTemp("", "fl-engines-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	args := slices.Concat([]string{"-c", `"$0" "$@" & wait $!`, self}, os.Args[1:], flags)
	cmd := exec.Command("/bin/bash", args...)
	cmd.Env = append(os.Environ(), innerEnv+"="+dir, program.Variable+"="+binary)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = nil, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL, // process 1 takes all others along
	}
	err = cmd.Run()
	removeCgroups(filepath.Base(dir))
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(1, exit.ExitCode()), nil
	}
	return 0, err
}

// removeCgroups removes what killed containers left: every engine here puts its
// containers below one cgroup of that name.
func removeCgroups(name string) {
	var dirs []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, "/"+name) {
			dirs = append(dirs, path)
		}
		return nil
	})
	for i := len(dirs) - 1; i >= 0; i-- {
		_ = syscall.Rmdir(dirs[i])
	}
}

// setUp makes the file systems and the network of the namespaces.
func setUp(dir string) error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// An overlay does not lie on every file system: a tmpfs carries its upper side.
	over := filepath.Join(dir, "over")
	if err := os.MkdirAll(over, 0o700); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", over, "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount %s: %w", over, err)
	}
	for _, p := range []string{"etc", "var/lib", "opt"} {
		up, work := filepath.Join(over, p, "up"), filepath.Join(over, p, "work")
		if err := errors.Join(os.MkdirAll(up, 0o755), os.MkdirAll(work, 0o755)); err != nil {
			return err
		}
		if err := syscall.Mount("overlay", "/"+p, "overlay", 0, "lowerdir=/"+p+",upperdir="+up+",workdir="+work); err != nil {
			return fmt.Errorf("overlay /%s: %w", p, err)
		}
	}
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
	}{
		{"proc", "/proc", "proc", 0},
		{"tmpfs", "/run", "tmpfs", 0},
		{"/sys/fs/cgroup", "/run/cgroup", "", syscall.MS_BIND | syscall.MS_REC},
		{"sysfs", "/sys", "sysfs", 0}, // of this network namespace
		{"/run/cgroup", "/sys/fs/cgroup", "", syscall.MS_BIND | syscall.MS_REC},
		// dockerd's and nerdctl's data must not lie on an overlay.
		{"tmpfs", "/var/lib/docker", "tmpfs", 0},
		{"tmpfs", "/var/lib/containerd", "tmpfs", 0},
	} {
		if err := os.MkdirAll(m.target, 0o755); err != nil && m.kind != "proc" {
			return err
		}
		if err := syscall.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if err := os.MkdirAll("/run/lock", 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll("/opt/cni", 0o755); err != nil {
		return err
	}
	_ = os.Remove("/opt/cni/bin")
	if err := os.Symlink("/usr/lib/cni", "/opt/cni/bin"); err != nil {
		return err
	}
	for _, c := range []string{
		"ip link set lo up",
		"ip link add nodebr type bridge",
		"ip addr add " + nodeAddr + "/24 dev nodebr",
		"ip addr add fd77::1/64 dev nodebr nodad",
		"ip link set nodebr up",
		"ip route add default via 192.168.77.254 dev nodebr",
		"sysctl -qw net.ipv4.ip_forward=1",
	} {
		if out, err := exec.Command("/bin/sh", "-c", c).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", c, err, out)
		}
	}
	return nil
}

// binary is the program under test, built outside.
func binary() string { return os.Getenv(program.Variable) }

// workDir is where the tests' files are; it is seen inside and outside.
func workDir() string { return os.Getenv(innerEnv) }

// cgroupParent holds every container's cgroup.
func cgroupParent() string { return filepath.Base(workDir()) }
