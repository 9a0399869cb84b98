// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// The ways from a client to the server.
const (
	directWay  = "direct"     // client and server in one namespace
	spliceWay  = "splice"     // two relays with splice(2), a unix socket between; or copying, over vsock
	linkWay    = "fairlead"   // host peer and agent, link over unix or vsock
	socatWay   = "socat pair" // the same as splice, with socat
	gvproxyWay = "gvproxy"    // gvproxy's forwarder and its tap device in the guest
)

const (
	serverTCP, serverUDP = 7000, 7001
	splicePort           = 7100
	socatPort            = 7200
	gvproxyPort          = 7300
)

// way is one way to the server.
type way struct {
	name     string
	from     *netns.Space // where the client is
	tcp, udp netip.AddrPort
	procs    []*exec.Cmd // that carry the bytes
	slow     bool        // the machine is emulated
}

// patience is d, or what takes as long in an emulated machine that is busy.
func (w *way) patience(d time.Duration) time.Duration {
	if w.slow {
		return 15 * d
	}
	return d
}

// starter makes a way; at is an address on the host.
type starter func(r *flowRig, ctx context.Context, binary string, at func(uint16) netip.AddrPort) (*way, error)

// Where the two halves of a way meet over vsock's loopback.
const (
	vsockSplice = "1:7100"
	vsockLink   = "1023"
)

// flowRig is a host and a guest, a server in the guest, and the ways to it.
type flowRig struct {
	vsock       bool // between host and guest, in place of unix sockets
	host, guest *netns.Space
	dir         string
	ways        []*way
	procs       []*exec.Cmd
	server      *flowServer
}

func newFlowRig(ctx context.Context, binary, dir string, vsock bool, starters ...starter) (_ *flowRig, err error) {
	r := &flowRig{dir: dir, vsock: vsock}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.host, err = netns.New(); err != nil {
		return nil, err
	}
	if r.guest, err = netns.New(); err != nil {
		return nil, err
	}
	if r.server, err = startServer(r.guest); err != nil {
		return nil, err
	}
	loopback := netip.MustParseAddr("127.0.0.1")
	at := func(p uint16) netip.AddrPort { return netip.AddrPortFrom(loopback, p) }
	r.ways = append(r.ways, &way{name: directWay, from: r.guest, tcp: at(serverTCP), udp: at(serverUDP), slow: vsock})
	for _, start := range starters {
		w, err := start(r, ctx, binary, at)
		if err != nil {
			return nil, err
		}
		w.from, w.slow = r.host, vsock
		r.ways = append(r.ways, w)
	}
	for _, w := range r.ways {
		if err := r.answers(ctx, w); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// start starts a command that lives as long as the rig.
func (r *flowRig) start(w *way, in *netns.Space, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := in.Start(cmd); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	w.procs, r.procs = append(w.procs, cmd), append(r.procs, cmd)
	return nil
}

func (r *flowRig) close() {
	for _, p := range r.procs {
		_ = p.Process.Kill()
		_ = p.Wait()
	}
	if r.server != nil {
		r.server.close()
	}
	for _, s := range []*netns.Space{r.host, r.guest} {
		if s != nil {
			_ = s.Close()
		}
	}
}

// answers waits until a way works.
func (r *flowRig) answers(ctx context.Context, w *way) error {
	var err error
	for end := time.Now().Add(w.patience(20 * time.Second)); time.Now().Before(end); {
		var c net.Conn
		if c, err = w.from.Dial("tcp4", w.tcp.String()); err == nil {
			_ = c.SetDeadline(time.Now().Add(w.patience(2 * time.Second)))
			_, err = c.Write([]byte{askEcho, 'x'})
			if err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			_ = c.Close()
			if err == nil {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return fmt.Errorf("%s does not work: %w", w.name, err)
}

func (r *flowRig) splice(_ context.Context, _ string, at func(uint16) netip.AddrPort) (*way, error) {
	w := &way{name: spliceWay, tcp: at(splicePort)}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	between := "unix " + filepath.Join(r.dir, "splice")
	if r.vsock {
		between = "vsock " + vsockSplice
	}
	err = errors.Join(
		r.start(w, r.guest, self, "-relay", between+" tcp "+at(serverTCP).String()),
		r.start(w, r.host, self, "-relay", "tcp "+w.tcp.String()+" "+between))
	return w, err
}

// relay is the whole of a process of the way "splice".
func relay(ctx context.Context, spec string) error {
	f := strings.Fields(spec)
	if len(f) != 4 {
		return fmt.Errorf("relay %q: want NETWORK ADDRESS NETWORK ADDRESS", spec)
	}
	l, err := listenAt(f[0], f[1])
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			d, err := dialAt(f[2], f[3])
			if err != nil {
				forward.Reset(c)
				return
			}
			_ = forward.Splice(ctx, c, d, nil)
		}()
	}
}

// listenAt is net.Listen, which knows no vsock: CID:PORT.
func listenAt(network, address string) (net.Listener, error) {
	if network != "vsock" {
		return net.Listen(network, address)
	}
	_, port, err := vsockAddress(address)
	if err != nil {
		return nil, err
	}
	return vsock.ListenContextID(unix.VMADDR_CID_ANY, port, nil)
}

func dialAt(network, address string) (net.Conn, error) {
	if network != "vsock" {
		return net.Dial(network, address)
	}
	cid, port, err := vsockAddress(address)
	if err != nil {
		return nil, err
	}
	return vsock.Dial(cid, port, nil)
}

func vsockAddress(s string) (cid, port uint32, err error) {
	if n, err := fmt.Sscanf(s, "%d:%d", &cid, &port); n != 2 {
		return 0, 0, fmt.Errorf("vsock address %q: want CID:PORT: %w", s, err)
	}
	return cid, port, nil
}

func (r *flowRig) link(_ context.Context, binary string, at func(uint16) netip.AddrPort) (*way, error) {
	w := &way{name: linkWay, tcp: at(serverTCP), udp: at(serverUDP)}
	listen, token := "unix://"+filepath.Join(r.dir, "link", "s"), ""
	connect := listen
	if r.vsock { // where only a token proves who is there
		listen, connect, token = "vsock://:"+vsockLink, "vsock://1:"+vsockLink, filepath.Join(r.dir, "token")
		if err := os.WriteFile(token, []byte(strings.Repeat("k", 32)), 0o600); err != nil {
			return nil, err
		}
	}
	return w, errors.Join(
		r.start(w, r.guest, binary, "agent", "--link-token="+token, "--link", listen, "--allow-cids", "1", "--source", "socket",
			"--control", filepath.Join(r.dir, "agent", "s"), "--log-level", "error"),
		r.start(w, r.host, binary, "host", "--link-token="+token, "--connect", connect,
			"--control", filepath.Join(r.dir, "host", "s"), "--log-level", "error"))
}

func (r *flowRig) socat(_ context.Context, _ string, at func(uint16) netip.AddrPort) (*way, error) {
	w := &way{name: socatWay, tcp: at(socatPort)}
	socket := filepath.Join(r.dir, "socat")
	return w, errors.Join(
		r.start(w, r.guest, "socat", "-b65536", "UNIX-LISTEN:"+socket+",fork,backlog=1024", "TCP:"+at(serverTCP).String()),
		r.start(w, r.host, "socat", "-b65536", fmt.Sprintf("TCP-LISTEN:%d,bind=%s,fork,reuseaddr,backlog=1024", w.tcp.Port(), w.tcp.Addr()), "UNIX-CONNECT:"+socket))
}

// The addresses that gvproxy gives unless told otherwise.
const (
	gvproxyGuest   = "192.168.127.2"
	gvproxyGateway = "192.168.127.1"
	gvproxyMAC     = "5a:94:ef:e4:0c:ee"
)

func (r *flowRig) gvproxy(ctx context.Context, _ string, at func(uint16) netip.AddrPort) (*way, error) {
	w := &way{name: gvproxyWay, tcp: at(gvproxyPort), udp: at(gvproxyPort)}
	for _, tool := range []string{"gvproxy", "vm"} {
		build := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(r.dir, tool), "github.com/containers/gvisor-tap-vsock/cmd/"+tool)
		build.Dir, build.Stderr = "test/gvproxy", os.Stderr
		if err := build.Run(); err != nil {
			return nil, fmt.Errorf("build %s (run this in the root of the project): %w", tool, err)
		}
	}
	for _, args := range []string{
		"tuntap add dev tap0 mode tap", "link set tap0 address " + gvproxyMAC + " mtu 1500 up",
		"addr add " + gvproxyGuest + "/24 dev tap0", "route add default via " + gvproxyGateway,
	} {
		if err := r.guest.Do(func() error {
			out, err := exec.CommandContext(ctx, "ip", strings.Fields(args)...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("ip %s: %w: %s", args, err, out)
			}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	network, api := filepath.Join(r.dir, "gvnet"), filepath.Join(r.dir, "gvapi")
	if err := r.start(w, r.host, filepath.Join(r.dir, "gvproxy"), "-listen", "unix://"+network, "-listen", "unix://"+api, "-ssh-port", "7399"); err != nil {
		return nil, err
	}
	if err := eventually(ctx, func() error { _, err := os.Stat(api); return err }); err != nil {
		return nil, err
	}
	if err := r.start(w, r.guest, filepath.Join(r.dir, "vm"), "-preexisting", "-iface", "tap0", "-url", "unix://"+network); err != nil {
		return nil, err
	}
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", api)
	}}}
	for protocol, port := range map[string]int{"tcp": serverTCP, "udp": serverUDP} {
		body := fmt.Sprintf(`{"local":%q,"remote":"%s:%d","protocol":%q}`, w.tcp, gvproxyGuest, port, protocol)
		if err := eventually(ctx, func() error {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://gvproxy/services/forwarder/expose", bytes.NewReader([]byte(body)))
			if err != nil {
				return err
			}
			resp, err := client.Do(req)
			if err != nil {
				return err
			}
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return fmt.Errorf("gvproxy: expose %s: %s", body, resp.Status)
			}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// cpu returns the processor time that the relays of a way have used so far, with
// their children's.
func (w *way) cpu() time.Duration {
	var ticks int64
	for _, p := range w.procs {
		ticks += cpuTicks(p.Process.Pid)
	}
	return time.Duration(ticks) * (time.Second / 100) // USER_HZ is 100
}

func cpuTicks(pid int) (ticks int64) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0 // it has ended, and its parent has its time
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	if f := strings.Fields(rest); len(f) > 14 {
		for _, v := range f[11:15] { // utime, stime, cutime, cstime
			n, _ := strconv.ParseInt(v, 10, 64)
			ticks += n
		}
	}
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, c := range strings.Fields(string(children)) {
		if n, err := strconv.Atoi(c); err == nil {
			ticks += cpuTicks(n)
		}
	}
	return ticks
}
