// SPDX-License-Identifier: Apache-2.0

//go:build linux && boot

package nested

import (
	"bufio"
	_ "embed"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/program"
)

// nestedVariable is the directory with the kernel and the initramfs of guests.
const nestedVariable = "FAIRLEAD_INNER_MACHINE"

// echoVariable makes the test binary an echo server at this protocol and address of the guest.
const echoVariable = "FAIRLEAD_ECHO"

//go:embed guest.sh
var guestScript []byte

// packImage writes the initramfs of guests: that of the machine, with fairlead and this binary.
func packImage(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	fairlead, err := program.Path(dir)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	test := filepath.Join(dir, "root", "test")
	if err := os.MkdirAll(test, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(test, "run.sh"), guestScript, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, from := range map[string]string{"fairlead": fairlead, "echo": self} {
		if err := os.Symlink(from, filepath.Join(test, name)); err != nil {
			t.Fatal(err)
		}
	}
	image := filepath.Join(dir, "initrd")
	script := fmt.Sprintf("cd %s && { cat %s && find test | cpio -o -L -H newc; } >%s",
		filepath.Join(dir, "root"), filepath.Join(os.Getenv(nestedVariable), "initrd"), image)
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
	return image
}

// guest is a machine within this machine, with a shell at its serial port.
type guest struct {
	t     *testing.T
	cid   uint32
	qemu  *program.Process
	port  net.Conn
	lines *bufio.Reader
}

// boot starts a guest and waits until its shell answers.
func boot(t *testing.T, image string, cid uint32) *guest {
	t.Helper()
	start := time.Now()
	socket := filepath.Join(t.TempDir(), "shell")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cmd := exec.Command("qemu-system-x86_64", "-accel", "kvm", "-cpu", "host,xsave=off", "-smp", "1", "-m", "512", "-M", "pc,hpet=off",
		"-nodefaults", "-display", "none", "-no-reboot", "-monitor", "none",
		"-device", "vhost-vsock-pci,guest-cid="+strconv.FormatUint(uint64(cid), 10),
		"-serial", "stdio", "-chardev", "socket,id=shell,path="+socket, "-serial", "chardev:shell",
		"-kernel", filepath.Join(os.Getenv(nestedVariable), "vmlinuz"), "-initrd", image,
		"-append", "console=ttyS0 fairlead.port=ttyS1 quiet panic=-1 oops=panic rdinit=/init tsc=reliable mitigations=off"+
			" random.trust_cpu=on no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1")
	g := &guest{t: t, cid: cid, qemu: program.Start(t, program.Command{Cmd: cmd, Name: fmt.Sprintf("guest %d", cid)})}
	accepted := make(chan net.Conn, 1)
	go func() {
		if conn, err := l.Accept(); err == nil {
			accepted <- conn
		}
	}()
	g.port = wait.For(t, "the guest's serial port", accepted)
	t.Cleanup(func() { _ = g.port.Close() })
	g.lines = bufio.NewReader(g.port)
	if out, err := g.answer(); err != nil {
		t.Fatalf("guest %d has no vsock: %v: %s", cid, err, out)
	}
	t.Logf("guest %d booted in %.1f s", cid, time.Since(start).Seconds())
	return g
}

// answer reads what a command of the shell prints, up to its status. A guest that has ended
// fails the test.
func (g *guest) answer() (string, error) {
	g.t.Helper()
	var out strings.Builder
	_ = g.port.SetReadDeadline(time.Now().Add(wait.Limit()))
	for {
		line, err := g.lines.ReadString('\n')
		if err != nil {
			g.t.Fatalf("guest %d does not answer: %v: %q", g.cid, err, out.String())
		}
		text, status, ended := strings.Cut(line, "\x1e")
		out.WriteString(text)
		switch status = strings.TrimSpace(status); {
		case ended && status == "0":
			return strings.TrimSpace(out.String()), nil
		case ended:
			return strings.TrimSpace(out.String()), fmt.Errorf("status %s", status)
		}
	}
}

// try runs a line of shell in the guest. The error is that of the line.
func (g *guest) try(line string) (string, error) {
	g.t.Helper()
	if _, err := io.WriteString(g.port, line+"\n"); err != nil {
		g.t.Fatalf("guest %d has ended: %v", g.cid, err)
	}
	out, err := g.answer()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", line, err, out)
	}
	return out, err
}

// sh runs a line of shell in the guest, which must succeed.
func (g *guest) sh(line string) string {
	g.t.Helper()
	out, err := g.try(line)
	if err != nil {
		g.t.Fatalf("guest %d: %v", g.cid, err)
	}
	return out
}

// start starts a program in the guest, whose output its console shows, and returns its number.
func (g *guest) start(line string) (pid int) {
	g.t.Helper()
	out := g.sh(line + " >/dev/console 2>&1 & echo $!")
	pid, err := strconv.Atoi(out)
	if err != nil {
		g.t.Fatalf("guest %d: %s: %q is no pid", g.cid, line, out)
	}
	return pid
}

// kill ends a program of the guest.
func (g *guest) kill(pid int) {
	g.t.Helper()
	g.sh(fmt.Sprintf("kill -9 %d", pid))
}

// startEcho starts an echo server in the guest.
func (g *guest) startEcho(network, address string) (pid int) {
	g.t.Helper()
	return g.start(fmt.Sprintf("%s=%s/%s /test/echo", echoVariable, network, address))
}

// startAgent starts the agent, with a token that it has or makes. It polls for sockets, as
// loading hooks takes half a minute in such a guest, and they are not what is tested.
func (g *guest) startAgent() (pid int) {
	g.t.Helper()
	return g.start("/test/fairlead agent --link vsock://:1023 --observer poll --source socket")
}

// off powers the guest off, as pulling its plug does.
func (g *guest) off() {
	g.t.Helper()
	if _, err := io.WriteString(g.port, "poweroff -f\n"); err != nil {
		g.t.Fatal(err)
	}
	wait.For(g.t, "the end of the guest", g.qemu.Done())
}

// serveEcho serves until it is killed.
func serveEcho(at string) error {
	network, address, _ := strings.Cut(at, "/")
	if network == "udp" {
		c, err := net.ListenPacket(network, address)
		if err != nil {
			return err
		}
		echo.ServePackets(c)
		return net.ErrClosed
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	echo.Serve(l)
	return net.ErrClosed
}
