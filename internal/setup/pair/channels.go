// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/link/hvsock"
)

// makeToken is what to do where the guest has no token.
const makeToken = "start the agent there once with `--link vsock://:1023`, which makes the file"

// machineName is the name of a virtual machine, which no program takes for an option.
var machineName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._+-]*$`)

func checkName(kind, name string) error {
	if !machineName.MatchString(name) {
		return fmt.Errorf("%s %q: want a name of letters, digits and ._+-", kind, name)
	}
	return nil
}

// WSL is a distribution of WSL; empty means the default one.
type WSL struct {
	Distribution string
	// Run returns what wsl.exe prints with these arguments (hvsock.RunWSL).
	Run func(ctx context.Context, args ...string) ([]byte, error)
}

// Check implements Channel. A distribution may have any name: it is the value of an option.
func (w WSL) Check() error { return nil }

// Read implements Channel.
func (w WSL) Read(ctx context.Context, file string) ([]byte, error) {
	args := []string{"--user", "root", "--exec", "cat", file}
	if w.Distribution != "" {
		args = append([]string{"--distribution", w.Distribution}, args...)
	}
	ctx, cancel := context.WithTimeout(ctx, commandTimeout) // WSL may have to start first
	defer cancel()
	out, err := w.Run(ctx, args...)
	if err == nil {
		return bytes.TrimSpace(out), nil
	}
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("WSL is not installed here: %w: pass the token in with --from FILE", err)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("read %s as root in WSL: wsl.exe did not end within %s: try again, or after `wsl --shutdown`", file, commandTimeout)
	}
	where, remedy := "WSL's "+w.Distribution, makeToken
	if w.Distribution == "" {
		where, remedy = "WSL's default distribution", makeToken+"; if the agent is in another one, name it with --distribution NAME (`wsl --list`)"
	}
	var output string
	if lines := hvsock.Lines(out); len(lines) > 0 { // of wsl.exe: cat's would have been the token
		output = ": " + strconv.Quote(strings.Join(lines, " "))
	}
	return nil, fmt.Errorf("read %s as root in %s: %w%s: %s", file, where, err, output, remedy)
}

// Lima is an instance of Lima.
type Lima struct{ Instance string }

// Check implements Channel.
func (l Lima) Check() error { return checkName("instance", l.Instance) }

// Read implements Channel.
func (l Lima) Read(ctx context.Context, file string) ([]byte, error) {
	limactl, err := find("limactl")
	if err != nil {
		return nil, err
	}
	return limactl.output(ctx, "is the instance running (`limactl list`)? If it has no such file, "+makeToken,
		"shell", "--workdir", "/", l.Instance, "sudo", "-n", "cat", file)
}

// Podman is a Podman machine.
type Podman struct{ Machine string }

// Check implements Channel.
func (p Podman) Check() error { return checkName("machine", p.Machine) }

// Read implements Channel.
func (p Podman) Read(ctx context.Context, file string) ([]byte, error) {
	podman, err := find("podman")
	if err != nil {
		return nil, err
	}
	return podman.output(ctx, "is the machine running (`podman machine list`)? If it has no such file, "+makeToken,
		"machine", "ssh", "--username", "root", p.Machine, "cat", file)
}

// SSH is a guest that this user reaches with ssh.
type SSH struct{ Destination string } // [USER@]HOST

// destination is what ssh takes for a host, and for no option.
var destination = regexp.MustCompile(`^([A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_:][A-Za-z0-9._:%-]*$`)

// Check implements Channel.
func (s SSH) Check() error {
	if !destination.MatchString(s.Destination) {
		return fmt.Errorf("ssh %q: want USER@HOST", s.Destination)
	}
	return nil
}

// Read implements Channel. Users other than root need sudo without a password.
func (s SSH) Read(ctx context.Context, file string) ([]byte, error) {
	ssh, err := find("ssh")
	if err != nil {
		return nil, err
	}
	args := []string{"-T", "--", s.Destination}
	remedy := "if the guest has no such file, " + makeToken
	if !strings.HasPrefix(s.Destination, "root@") {
		args = append(args, "sudo", "-n")
		remedy = "the user needs sudo without a password, or take root@; " + remedy
	}
	return ssh.output(ctx, remedy, append(args, "cat", file)...)
}
