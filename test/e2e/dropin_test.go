// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/peertest"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/gvtools"
	"github.com/fairlead/fairlead/test/kit/program"
)

// dropIn builds the drop-in for Rancher Desktop's agent, which starts the program under
// test: that is linked beside it.
var dropIn = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(scratch, "dropin")
	path := filepath.Join(dir, "rancher-desktop-guestagent")
	if err := program.Build("rancher-desktop-guestagent", path); err != nil {
		return "", err
	}
	target, err := filepath.Abs(binary)
	if err != nil {
		return "", err
	}
	return path, os.Symlink(target, filepath.Join(dir, "fairlead"))
})

// TestDropInIsFairleadByAnotherName starts the drop-in in each way in which it can be
// installed.
func TestDropInIsFairleadByAnotherName(t *testing.T) {
	launcher, err := dropIn()
	if err != nil {
		t.Fatal(err)
	}
	linked, alone := filepath.Join(t.TempDir(), "rancher-desktop-guestagent"), filepath.Join(t.TempDir(), "rancher-desktop-guestagent")
	if err := os.Symlink(binary, linked); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(launcher, alone); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, program, path string // path is the environment's PATH
		code                int
		want                string // in the output
	}{
		{"beside fairlead", launcher, "", 0, "-tap-interface-ip"},
		{"fairlead in PATH", alone, filepath.Dir(launcher), 0, "-tap-interface-ip"},
		{"a link to fairlead", linked, "", 0, "-tap-interface-ip"},
		{"no fairlead", alone, t.TempDir(), 1, "cannot start fairlead"},
		{"fairlead itself", filepath.Join(filepath.Dir(launcher), "fairlead"), "", 2, "unknown shorthand flag"},
	} {
		cmd := exec.Command(tt.program, "-help")
		cmd.Env = []string{"PATH=" + tt.path}
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != tt.code || !strings.Contains(string(out), tt.want) {
			t.Errorf("%s: %v, want exit status %d and %q:\n%s", tt.name, err, tt.code, tt.want, out)
		}
	}
	if info, err := os.Stat(launcher); err != nil || info.Size() > 4<<20 {
		t.Errorf("the launcher is a file of %d bytes, %v", info.Size(), err)
	}
}

// startDropIn runs it in the guest, where /run is a directory of the test's own.
func startDropIn(t *testing.T, guest *space, run string, flags ...string) *process {
	t.Helper()
	path, err := dropIn()
	if err != nil {
		t.Fatal(err)
	}
	script := `mount --make-rprivate / && mount --bind "$1" /run && shift && exec "$@"`
	cmd := exec.Command("/bin/sh", append([]string{"-euc", script, "sh", run, path}, flags...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	return guest.startCmd(t, "rancher-desktop-guestagent", cmd)
}

const hostPortRule = `nft -f - <<'END'
table ip fl { chain pre { type nat hook prerouting priority -100; fib daddr type local tcp dport 8083 dnat to 10.88.0.2:80; }; }
END`

func TestDropInServesVirtualNetwork(t *testing.T) {
	n := newVirtualNetwork(t)
	run := t.TempDir()
	proxy := peertest.NewReceiver(t, "unix", filepath.Join(run, "wsl-proxy.sock"), net.Listen)
	c := container(t, n.guest)
	go echo.Serve(c.listen(t, "tcp4", "0.0.0.0:80"))

	flags := []string{
		"-debug", "-docker=true", "-containerd=false", "-kubernetes=true", "-kubeconfig=" + filepath.Join(run, "k3s.yaml"),
		"-k8sServiceListenerAddr=127.0.0.1", "-adminInstall=false", "-k8sAPIPort=6443", "-tap-interface-ip=" + gvtools.GuestIP,
	}
	const api, web, rule = "6443/tcp 127.0.0.1 to upstream", "8080/tcp 127.0.0.1 to upstream", "8083/tcp 127.0.0.1 to upstream"
	p := startDropIn(t, n.guest, run, flags...)
	proxy.Want(api)
	l := n.guest.listen(t, "tcp4", "0.0.0.0:8080")
	go echo.Serve(l)
	n.guest.sh(t, hostPortRule)
	proxy.Want(api, web, rule)
	n.wantForwards(sshForward, "tcp 127.0.0.1:8080 192.168.127.2:8080", "tcp 127.0.0.1:8083 192.168.127.2:8083")
	n.answers("tcp", "127.0.0.1:8080")
	n.answers("tcp", "127.0.0.1:8083")

	_ = l.Close()
	n.guest.sh(t, "nft delete table ip fl")
	proxy.Want(api)
	n.wantForwards(sshForward)

	// The incumbent exits with status 1 on SIGTERM, ignores SIGINT, and withdraws
	// nothing.
	go echo.Serve(n.guest.listen(t, "tcp4", "0.0.0.0:9090"))
	const last = "9090/tcp 127.0.0.1 to upstream"
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		proxy.Want(api, last)
		if code := p.Stop(sig); code != 0 {
			t.Errorf("exit code %d after %v", code, sig)
		}
		proxy.Want()
		n.wantForwards(sshForward)
		p = startDropIn(t, n.guest, run, flags...)
	}
	// What a killed agent left behind does not keep the next one from starting.
	proxy.Want(api, last)
	p.Kill()
	p = startDropIn(t, n.guest, run, flags...)
	wait.Until(t, "the second start has found its peers", func() error {
		if p.Ended() || !strings.Contains(p.Output(), "peer found") {
			return errors.New(p.Output())
		}
		return nil
	})
	proxy.Want(api, last)
	if code := p.Stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	proxy.Want()
}

func TestDropInServesVtunnel(t *testing.T) {
	guest, run := newSpace(t), t.TempDir()
	guest.sh(t, `
/usr/sbin/ip link add eth0 type veth peer name far0
echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6
/usr/sbin/ip addr add 172.27.96.5/20 dev eth0
/usr/sbin/ip link set eth0 up`)
	peer := peertest.NewReceiver(t, "tcp", "127.0.0.1:3040", guest.Listen)
	p := startDropIn(t, guest, run, "-privilegedService=true", "-docker=true", "-iptables=true", "-kubernetes=false")
	guest.sh(t, hostPortRule)
	peer.Want("8083/tcp 0.0.0.0 to 172.27.96.5:8083")
	guest.sh(t, `
/usr/sbin/ip addr del 172.27.96.5/20 dev eth0
/usr/sbin/ip addr add 172.19.240.9/20 dev eth0`)
	peer.Want("8083/tcp 0.0.0.0 to 172.19.240.9:8083")
	peer.Stop()
	peer.Start()
	peer.Want("8083/tcp 0.0.0.0 to 172.19.240.9:8083")
	if code := p.Stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	peer.Want()
}

// wsl-proxy connects to an address of its own, from the network of the other
// distributions.
func TestDropInBridgesLoopback(t *testing.T) {
	guest, wsl, run := newSpace(t), newSpace(t), t.TempDir()
	guest.sh(t, fmt.Sprintf(`
/usr/sbin/ip link add veth-rd-ns type veth peer name veth-rd-wsl netns /proc/%d/fd/%d
/usr/sbin/ip addr add 192.168.143.1/24 dev veth-rd-ns
/usr/sbin/ip link set veth-rd-ns up`, os.Getpid(), wsl.FD()))
	wsl.sh(t, `
/usr/sbin/ip addr add 192.168.143.2/24 dev veth-rd-wsl
/usr/sbin/ip link set veth-rd-wsl up`)
	proxy := peertest.NewReceiver(t, "unix", filepath.Join(run, "wsl-proxy.sock"), net.Listen)
	go echo.Serve(guest.listen(t, "tcp4", "127.0.0.1:8084"))
	p := startDropIn(t, guest, run, "-docker=true")
	proxy.Want("8084/tcp 127.0.0.1 to upstream")
	wait.Until(t, "the address of wsl-proxy answers", func() error {
		conn, err := wsl.Dial("tcp", "192.168.143.1:8084")
		if err != nil {
			return err
		}
		defer conn.Close()
		return roundTrip(conn, "through wsl-proxy's address")
	})
	if code := p.Stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	proxy.Want()
}

// Without a tunnel and without an administrator, WSL's own relay opens the ports that
// listen in the guest. The incumbent's listeners drop every connection.
func TestDropInListenersServe(t *testing.T) {
	guest, run := newSpace(t), t.TempDir()
	c := container(t, guest)
	go echo.Serve(c.listen(t, "tcp4", "0.0.0.0:80"))
	p := startDropIn(t, guest, run, "-iptables=true", "-kubernetes=false", "-adminInstall=false")
	guest.sh(t, hostPortRule)
	wait.Until(t, "the guest's loopback answers", func() error {
		conn, err := guest.Dial("tcp", "127.0.0.1:8083")
		if err != nil {
			return err
		}
		defer conn.Close()
		return roundTrip(conn, "as WSL's relay does")
	})
	if code := p.Stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if err := probe.WantClosed(guest.dialer("127.0.0.1:8083")); err != nil {
		t.Error("after its program ended:", err)
	}
}
