// SPDX-License-Identifier: Apache-2.0

//go:build unix && !linux

package exec

import (
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/run/image"
)

// self is the program of this process.
func self() (string, error) { return os.Executable() }

// inherited is how many descriptors are looked at that whoever started this process left open.
const inherited = 4096

// closeOnExec keeps what this process inherited from its programs.
func closeOnExec() error {
	for fd := guardSocket; fd < inherited; fd++ {
		unix.CloseOnExec(fd)
	}
	return nil
}

// startProgram starts a copy of a program, in a process group of its own.
func startProgram(cmd *exec.Cmd, p Program, _ string) (string, error) {
	program, remove, err := image.Private(p.Path, p.SHA256)
	if err != nil {
		return "", err
	}
	defer remove()
	cmd.Path = program
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return "", cmd.Start()
}

// newGroup returns none: there are no cgroups.
func newGroup() string { return "" }

func endGroup(string) error { return nil }

// killAll kills the process group of the program. What has left the group is not found.
func killAll(program int, _ string) { _ = unix.Kill(-program, unix.SIGKILL) }
