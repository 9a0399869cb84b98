// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// The guest's network: what may be its gvproxy, and another machine.
const (
	autoGuest, autoPeer, autoThird = "192.168.127.2", "192.168.127.1", "192.168.127.66"
	portal                         = "<html>Please log in</html>"
)

// switchPeer is what answers at the address of a gvproxy.
type switchPeer struct {
	mu      sync.Mutex
	text    string // of the list, if it is no gvproxy
	entries []string
	asked   int
}

func (p *switchPeer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	if p.text != "" {
		_, _ = io.WriteString(w, p.text)
		return
	}
	var f struct {
		Local    string `json:"local"`
		Remote   string `json:"remote"`
		Protocol string `json:"protocol"`
	}
	if r.Method == http.MethodPost {
		if err := json.NewDecoder(r.Body).Decode(&f); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	switch {
	case strings.HasSuffix(r.URL.Path, "/unexpose"):
		p.entries = slices.DeleteFunc(p.entries, func(e string) bool { return strings.HasPrefix(e, f.Local+" ") })
	case strings.HasSuffix(r.URL.Path, "/expose"):
		p.entries = append(p.entries, f.Local+" "+f.Remote)
	default:
		list := []map[string]string{}
		for _, e := range p.entries {
			local, remote, _ := strings.Cut(e, " ")
			list = append(list, map[string]string{"local": local, "remote": remote, "protocol": "tcp"})
		}
		_ = json.NewEncoder(w).Encode(list)
	}
}

// become makes it answer text, or be a gvproxy if that is empty.
func (p *switchPeer) become(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = text
}

// at returns where an entry leads, "" if there is none.
func (p *switchPeer) at(local string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.entries {
		if l, remote, _ := strings.Cut(e, " "); l == local {
			return remote
		}
	}
	return ""
}

func (p *switchPeer) requests() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

// autoRig is a guest on a network with a peer, whose agent chooses its sinks. The guest's
// /etc/hosts has that text.
func autoRig(t *testing.T, hosts string, flags ...string) (*rig, *switchPeer) {
	t.Helper()
	r := newRig(t)
	r.guest.sh(t, fmt.Sprintf(`
/usr/sbin/ip link add eth0 type veth peer name far0 netns /proc/%d/fd/%d
/usr/sbin/ip addr add %s/24 dev eth0
/usr/sbin/ip link set eth0 up
/usr/sbin/ip route add default via %s`, os.Getpid(), r.outside.FD(), autoGuest, autoPeer))
	r.outside.sh(t, fmt.Sprintf(`
/usr/sbin/ip addr add %s/24 dev far0
/usr/sbin/ip addr add %s/24 dev far0
/usr/sbin/ip link set far0 up`, autoPeer, autoThird))
	p := new(switchPeer)
	srv := &http.Server{Handler: p, ReadHeaderTimeout: time.Minute}
	l := r.outside.listen(t, "tcp4", autoPeer+":80")
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	path := filepath.Join(r.dir, "hosts")
	if err := os.WriteFile(path, []byte("127.0.0.1 localhost\n"+hosts), 0o600); err != nil {
		t.Fatal(err)
	}
	r.agentFlags = append([]string{"--sink", "auto", "--source", "socket"}, flags...)
	return r, p
}

// startAuto starts the agent of an autoRig.
func (r *rig) startAuto() {
	r.t.Helper()
	script := `mount --make-rprivate / && mount --bind "$1" /etc/hosts && shift && exec "$@"`
	args := []string{"-euc", script, "sh", filepath.Join(r.dir, "hosts"), binary, "agent", "--config", "/dev/null", "--link", r.link, "--control", r.agentCtl}
	cmd := exec.Command("/bin/sh", append(args, r.agentFlags...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	r.agent = r.guest.startCmd(r.t, "agent", cmd)
}

const rancherHosts = autoPeer + " gateway.rancher-desktop.internal\n"

// via returns the outcome of a sink for a publication, "" if it has none.
func (r *rig) via(key, sink string) (state, reason string) {
	_, p := r.state(key)
	for _, o := range p.Outcomes {
		if o.Sink == sink {
			return o.State.String(), o.Reason
		}
	}
	return "", ""
}

func (r *rig) wantVia(key, sink, want string) (reason string) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("%s is %q on %s", key, want, sink), func() error {
		var got string
		if got, reason = r.via(key, sink); got != want {
			return fmt.Errorf("it is %q (%s)", got, reason)
		}
		return nil
	})
	return reason
}

// A machine of the network that answers as a gvproxy does is not asked for anything, where
// no product of gvproxy is, and where DNS alone would name it.
func TestAutoIgnoresAnImpostor(t *testing.T) {
	r, p := autoRig(t, "")
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:5432"))
	r.startAuto()
	r.wantVia("tcp 127.0.0.1:5432", "hostlink", "pending")
	if state, reason := r.via("tcp 127.0.0.1:5432", "gvproxy"); state != "" {
		t.Errorf("gvproxy: %s (%s)", state, reason)
	}
	if n := p.requests(); n > 0 {
		t.Errorf("the impostor got %d requests", n)
	}
}

// A captive portal answers everything with a page. It changes nothing; the gvproxy is
// found when the portal is gone, and given up when one is back.
func TestAutoSurvivesACaptivePortal(t *testing.T) {
	r, p := autoRig(t, rancherHosts)
	p.become(portal)
	go echo.Serve(r.guest.listen(t, "tcp4", "0.0.0.0:8080"))
	r.startAuto()
	r.wantVia("tcp 0.0.0.0:8080", "hostlink", "pending")
	if state, reason := r.via("tcp 0.0.0.0:8080", "gvproxy"); state != "" {
		t.Errorf("gvproxy: %s (%s)", state, reason)
	}
	p.become("")
	r.wantVia("tcp 0.0.0.0:8080", "gvproxy", "active")
	if got := p.at("127.0.0.1:8080"); got != autoGuest+":8080" {
		t.Errorf("the peer leads to %q", got)
	}
	p.become(portal)
	r.guest.sh(t, "/usr/sbin/ip addr add 198.51.100.7/32 dev eth0") // have it looked at now
	r.wantVia("tcp 0.0.0.0:8080", "gvproxy", "")
}

// The peer may reach the loopback of the guest if the user says so, and another machine
// of its network may not in any case.
func TestAutoBridgesToThePeerAlone(t *testing.T) {
	t.Run("unasked", func(t *testing.T) {
		r, p := autoRig(t, rancherHosts)
		go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:5432"))
		go echo.Serve(r.guest.listen(t, "tcp4", "0.0.0.0:8080"))
		r.startAuto()
		r.wantVia("tcp 0.0.0.0:8080", "gvproxy", "active")
		if reason := r.wantVia("tcp 127.0.0.1:5432", "gvproxy", "failed"); !strings.Contains(reason, "--bridge-loopback") {
			t.Errorf("reason %q", reason)
		}
		if at := p.at("127.0.0.1:5432"); at != "" {
			t.Errorf("the peer leads to %s", at)
		}
	})
	t.Run("asked", func(t *testing.T) {
		r, p := autoRig(t, rancherHosts, "--bridge-loopback")
		go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:5432"))
		r.startAuto()
		r.wantVia("tcp 127.0.0.1:5432", "gvproxy", "active")
		at := p.at("127.0.0.1:5432")
		from := func(source string) func() (net.Conn, error) {
			return func() (c net.Conn, err error) {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Timeout: 30 * time.Second}
				err = r.outside.Do(func() error { c, err = d.DialContext(context.Background(), "tcp", at); return err })
				return c, err
			}
		}
		wait.Until(t, "the peer reaches it", func() error {
			c, err := from(autoPeer)()
			if err != nil {
				return err
			}
			return errors.Join(roundTrip(c, "from the peer"), c.Close())
		})
		if err := probe.Want(probe.Reset, from(autoThird), ""); err != nil {
			t.Errorf("from another machine: %v", err)
		}
	})
}
