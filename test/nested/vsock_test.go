// SPDX-License-Identifier: Apache-2.0

//go:build linux && boot

package nested

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/program"
)

func TestMain(m *testing.M) {
	if at := os.Getenv(echoVariable); at != "" {
		fmt.Fprintln(os.Stderr, serveEcho(at))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// tokenFile is where the agent has its token.
const tokenFile = "/var/lib/fairlead/token"

// hostPeer is the host side of this machine.
type hostPeer struct {
	t       *testing.T
	binary  string
	token   string // its file
	control string
	process *program.Process
}

func newHostPeer(t *testing.T) *hostPeer {
	t.Helper()
	dir := t.TempDir()
	binary, err := program.Path(dir)
	if err != nil {
		t.Fatal(err)
	}
	return &hostPeer{t: t, binary: binary, token: filepath.Join(dir, "token"), control: filepath.Join(dir, "control", "s")}
}

// pair stores a token as the guest's administrator reads it.
func (h *hostPeer) pair(token string) {
	h.t.Helper()
	cmd := exec.Command(h.binary, "host", "pair", "--from", "-", "--guest", "vm", "--link-token", h.token)
	cmd.Stdin = strings.NewReader(token + "\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		h.t.Fatalf("pair: %v: %s", err, out)
	}
	h.t.Logf("%s", out)
}

// start starts the host for a guest at that CID.
func (h *hostPeer) start(cid uint32) {
	h.t.Helper()
	cmd := exec.Command(h.binary, "host", "--connect", fmt.Sprintf("vm=vsock://%d:1023", cid), "--link-token", h.token,
		"--control", h.control, "--forwards-file", filepath.Join(filepath.Dir(h.token), "forwards.json"))
	h.process = program.Start(h.t, program.Command{Cmd: cmd, Name: "host", Trace: true})
}

// wantPeer waits until the host reports its guest in a state, with texts of why and what to do.
func (h *hostPeer) wantPeer(state, why, next string) {
	h.t.Helper()
	wait.Until(h.t, fmt.Sprintf("the guest is %s: %s", state, why), func() error {
		ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
		defer cancel()
		l, err := status.NewClient(h.control).List(ctx)
		if err != nil {
			return err
		}
		if len(l.Peers) != 1 || l.Peers[0].State != state ||
			!strings.Contains(l.Peers[0].Error, why) || !strings.Contains(l.Peers[0].Next, next) {
			return fmt.Errorf("%+v", l.Peers)
		}
		return nil
	})
}

// roundTrip sends text and expects it back.
func roundTrip(network, address, text string) error {
	c, err := net.DialTimeout(network, address, time.Minute)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	sent := make(chan error, 1)
	go func() {
		_, err := io.WriteString(c, text)
		sent <- err
	}()
	b := make([]byte, len(text))
	_, err = io.ReadFull(c, b)
	if err = errors.Join(err, <-sent); err == nil && string(b) != text {
		err = fmt.Errorf("echo of %d bytes differs", len(text))
	}
	return err
}

// carries waits until an echo server of the guest answers.
func carries(t *testing.T, network, address string, size int) {
	t.Helper()
	text := strings.Repeat("0123456789abcdef", size/16)
	start := time.Now()
	wait.Until(t, network+" "+address+" carries data", func() error { return roundTrip(network, address, text) })
	t.Logf("%s %s carried %d bytes after %v", network, address, size, time.Since(start))
}

// gone waits until nothing of this machine is at an address.
func gone(t *testing.T, network, address string) {
	t.Helper()
	start := time.Now()
	wait.Until(t, network+" "+address+" is closed", func() error {
		if network == "tcp" {
			return probe.WantClosed(probe.At(address))
		}
		c, err := net.ListenPacket(network, address)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	t.Logf("%s %s gone after %v", network, address, time.Since(start))
}

func TestVsockBetweenMachines(t *testing.T) {
	for _, module := range []string{"kvm_amd", "vhost_vsock"} {
		if out, err := exec.Command("modprobe", module).CombinedOutput(); err != nil {
			t.Fatalf("modprobe %s: %v: %s", module, err, out)
		}
	}
	image := packImage(t)
	h := newHostPeer(t)
	g := boot(t, image, 3)
	agent := g.startAgent()
	token := ""
	wait.Until(t, "the agent made its token", func() (err error) {
		token, err = g.try("cat " + tokenFile)
		return err
	})
	h.pair(token)
	h.start(g.cid)
	h.wantPeer(status.PeerConnected, "", "")
	tcp, udp := g.startEcho("tcp", "0.0.0.0:7000"), g.startEcho("udp", "0.0.0.0:7001")
	carries(t, "tcp", "127.0.0.1:7000", 1<<20)
	carries(t, "udp", "127.0.0.1:7001", 1<<10)
	g.kill(tcp)
	g.kill(udp)
	gone(t, "tcp", "127.0.0.1:7000")
	gone(t, "udp", "127.0.0.1:7001")

	g.startEcho("tcp", "127.0.0.1:7002")
	carries(t, "tcp", "127.0.0.1:7002", 1<<10)
	g.kill(agent)
	h.wantPeer(status.PeerAway, "nothing listens at this port", "start the guest, and `fairlead agent` in it")
	g.startAgent()
	h.wantPeer(status.PeerConnected, "", "")
	carries(t, "tcp", "127.0.0.1:7002", 1<<10)

	g.off()
	h.wantPeer(status.PeerAway, "no machine that runs here has this CID", "if it has another CID now, connect to that")
	gone(t, "tcp", "127.0.0.1:7002")

	// The guest has its disk, with the token, and another CID.
	g = boot(t, image, 4)
	g.sh(fmt.Sprintf("mkdir -m 700 -p %s && (umask 077 && echo %s >%s)", filepath.Dir(tokenFile), token, tokenFile))
	g.startAgent()
	g.startEcho("tcp", "0.0.0.0:7003")
	h.wantPeer(status.PeerAway, "no machine that runs here has this CID", "if it has another CID now, connect to that")
	h.process.Stop(syscall.SIGTERM)
	h.start(g.cid)
	carries(t, "tcp", "127.0.0.1:7003", 1<<20)
}
