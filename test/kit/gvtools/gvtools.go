// SPDX-License-Identifier: Apache-2.0

// Package gvtools builds and runs the commands of the module in test/gvproxy: gvproxy,
// which runs on the host, and vm, which carries the frames of the guest's tap device to
// it.
package gvtools

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/fairlead/fairlead/test/kit/program"
)

const (
	// GuestIP is the guest's address.
	GuestIP = "192.168.127.2"
	// API is where the guest reaches the forwarder.
	API = "192.168.127.1:80"
)

// Build builds the commands in dir. It is called anywhere in the repository.
func Build(dir string) error {
	root, err := program.Root()
	if err != nil {
		return err
	}
	build := exec.Command("go", "build", "-o", dir+"/", "tool")
	build.Dir = filepath.Join(root, "test", "gvproxy")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build gvproxy: %w\n%s", err, out)
	}
	return nil
}

// Proxy returns the command of the gvproxy in dir; vm connects to the socket.
func Proxy(dir, socket string) *exec.Cmd {
	return exec.Command(filepath.Join(dir, "gvproxy"), "-mtu=1500", "-listen=unix://"+socket)
}

// VM returns the command of the vm in dir. It reconnects to gvproxy by itself; its tap
// device lives as long as the connection.
func VM(dir, socket string) *exec.Cmd {
	return exec.Command(filepath.Join(dir, "vm"), "-url=unix://"+socket, "-iface=tap0", "-preexisting", "-stop-if-exist=", "-mtu=1500")
}

// Configure gives the tap device its addresses, as there is no DHCP. It is called in the
// guest's network namespace, and fails until vm has made the device.
func Configure() error {
	out, err := exec.Command("/bin/sh", "-ec", `
/usr/sbin/ip link set tap0 address 5a:94:ef:e4:0c:ee mtu 1500
/usr/sbin/ip addr replace `+GuestIP+`/24 dev tap0
/usr/sbin/ip link set tap0 up`).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}
