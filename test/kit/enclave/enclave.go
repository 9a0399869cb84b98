// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package enclave runs a program in network, mount, pid and UTS namespaces of its
// own, in which /etc, /var/lib, /opt and /run are private, so that a container
// engine finds the paths that it expects and leaves nothing behind. It needs root.
package enclave

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
)

// variable names the directory for an enclave's files in the environment of its
// programs.
const variable = "FAIRLEAD_ENCLAVE_DIR"

// NodeAddr is an address of an enclave, after SetUp, that is not loopback: it is on
// a network of its own, behind the bridge nodebr.
const NodeAddr = "192.168.77.1"

// Dir is the directory for the files of the enclave in which this program runs;
// it is seen inside and outside. It is empty outside of one.
func Dir() string { return os.Getenv(variable) }

// CgroupParent is the name of the cgroup that holds every container of the enclave.
func CgroupParent() string { return filepath.Base(Dir()) }

// process1 runs a program and ends as it does. Processes that an engine has paused cannot be
// killed, and process 1 ends after all others.
const process1 = `"$0" "$@" & wait $!; code=$?
shopt -s nullglob
cd /sys/fs/cgroup || exit
for f in {freezer/,}"${FAIRLEAD_ENCLAVE_DIR##*/}"/*/freezer.state; do echo THAWED >"$f"; done
for f in {unified/,}"${FAIRLEAD_ENCLAVE_DIR##*/}"/*/cgroup.freeze; do echo 0 >"$f"; done
exit $code`

// Run runs cmd in an enclave until it ends; the program that it starts calls SetUp
// first. A shell is process 1 there and reaps the processes that engines leave, so that
// a dead engine is seen as dead. Processes that remain are killed when cmd ends or this
// process dies. The enclave's files are removed.
func Run(cmd *exec.Cmd) error {
	// Process 1 must die with this one, which to the kernel is this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	dir, err := os.MkdirTemp("", "fl-enclave-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env, variable+"="+dir)
	cmd.Args = append([]string{"bash", "-c", process1, cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/bash"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL, // process 1 takes all others along
	}
	err = cmd.Run()
	removeCgroups(filepath.Base(dir))
	return err
}

// removeCgroups removes the cgroups that killed containers left: every engine here puts
// its containers below one cgroup of that name.
func removeCgroups(name string) {
	var dirs []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path+"/", "/"+name+"/") {
			dirs = append(dirs, path)
		}
		return nil
	})
	for i := len(dirs) - 1; i >= 0; i-- {
		_ = syscall.Rmdir(dirs[i])
	}
}

// SetUp makes the file systems and the network of the enclave in which this
// program runs.
func SetUp() error {
	dir := Dir()
	if dir == "" {
		return errors.New("this program does not run in an enclave")
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Not every file system can be the upper side of an overlay: a tmpfs is.
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
		"ip addr add " + NodeAddr + "/24 dev nodebr",
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

// DockerSocket is where Dockerd listens.
const DockerSocket = "/run/docker.sock"

// Dockerd is the command line of Debian's dockerd in this enclave.
func Dockerd(flags ...string) []string {
	return append([]string{
		"dockerd", "--host=unix://" + DockerSocket, "--cgroup-parent=/" + CgroupParent(),
		"--pidfile=/run/docker.pid", "--exec-root=/run/docker-exec",
	}, flags...)
}

// Tool is the path of what hack/provision-engines.sh builds under that name.
func Tool(name string) string {
	dir := os.Getenv("FAIRLEAD_CACHE")
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			base = "/root/.cache"
		}
		dir = filepath.Join(base, "fairlead")
	}
	return filepath.Join(dir, "bin", name)
}
