// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/test/kit/netns"
	"github.com/fairlead/fairlead/test/kit/usage"
)

// The ways from a client to the server; splice is the baseline.
const (
	waySplice  = "splice"   // two relays with splice(2), or copying over vsock
	wayDirect  = "direct"   // client and server in one namespace
	wayLink    = "fairlead" // host peer and agent
	wayGvproxy = "gvproxy"  // gvproxy's forwarder and its tap device in the guest
)

const (
	toGuest   = "TCP to the guest, 1 flow"
	roundTrip = "TCP round trip of 64 bytes, 1 flow, median"
)

var tcpWays = []string{waySplice, wayDirect, wayLink, wayGvproxy}

// flowMeasure is a measure, and the load that measures it.
type flowMeasure struct {
	measure
	load load
}

// flowMeasures returns all measures, with so many connections a second.
func flowMeasures(rate int) []flowMeasure {
	return []flowMeasure{
		{measure{name: toGuest, unit: "B/s", modes: tcpWays}, throughput(1, push)},
		{measure{name: "TCP to the host, 1 flow", unit: "B/s", modes: tcpWays}, throughput(1, pull)},
		{measure{name: "TCP to the guest, 64 flows", unit: "B/s", modes: tcpWays}, throughput(64, push)},
		{measure{name: roundTrip, unit: "s", modes: tcpWays}, roundTrips},
		{measure{name: fmt.Sprintf("TCP connections with 64 bytes each way, %s per second", number(float64(rate))), unit: "per second", modes: tcpWays}, connections(rate)},
		{measure{name: "UDP echo of 64 bytes, 16 clients, one datagram in flight each", unit: "per second", modes: []string{wayDirect, wayLink, wayGvproxy}}, echoes},
	}
}

// vsockMeasures are the same in an emulated machine, which opens tens of connections a
// second.
func vsockMeasures() []flowMeasure {
	all := flowMeasures(20)
	for i := range all {
		m := &all[i].measure
		what, rest, _ := strings.Cut(m.name, ",")
		m.name = what + " over vsock, emulated," + rest
	}
	return all
}

func measuresOf(all []flowMeasure) (out []measure) {
	for _, m := range all {
		out = append(out, m.measure)
	}
	return out
}

func flowsPart() part {
	all := flowMeasures(1000)
	return part{"flows", "flows", measuresOf(all), func(ctx context.Context, b *bench) {
		starters := []starter{startSplice, startLink}
		if b.scale == full { // it is built from source
			starters = append(starters, startGvproxy)
		}
		b.flows(ctx, false, all, b.of(3, 1, 1), b.lasting(time.Second, 500*time.Millisecond, 200*time.Millisecond), starters...)
	}}
}

func vsockPart() part {
	return part{"vsock", "vsock", measuresOf(vsockMeasures()), inVM}
}

// flows measures each for d on each way, in turns.
func (b *bench) flows(ctx context.Context, overVsock bool, all []flowMeasure, rounds int, d time.Duration, starters ...starter) {
	r := b.newFlowRig(ctx, overVsock, starters...)
	for range rounds {
		for _, m := range all {
			for _, w := range r.ways {
				if slices.Contains(m.modes, w.name) {
					b.progress("%s, %s", m.name, w.name)
					run := &meter{w: w}
					m.load(ctx, w, run, d)
					run.record(b, m.measure)
				}
			}
		}
	}
}

// way is one way to the server.
type way struct {
	name     string
	from     *netns.Space // where the client is
	tcp, udp netip.AddrPort
	procs    []*exec.Cmd // that carry the bytes
	slow     bool        // the machine is emulated
}

// patience is d, or more in an emulated machine.
func (w *way) patience(d time.Duration) time.Duration {
	if w.slow {
		return 15 * d
	}
	return d
}

// cpu is the CPU time of the processes of a way so far.
func (w *way) cpu() (used time.Duration) {
	for _, p := range w.procs {
		used += must(usage.Of(p.Process.Pid)).CPU
	}
	return used
}

// flowRig is a host and a guest, a server in the guest, and the ways to it.
type flowRig struct {
	b           *bench
	vsock       bool // between host and guest, instead of unix sockets
	host, guest *netns.Space
	dir         string
	ways        []*way
}

// starter starts a way.
type starter func(ctx context.Context, r *flowRig) *way

const serverTCP, serverUDP = 7000, 7001

func at(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
}

func (b *bench) newFlowRig(ctx context.Context, overVsock bool, starters ...starter) *flowRig {
	r := &flowRig{b: b, vsock: overVsock, host: must(netns.New()), guest: must(netns.New()), dir: b.tempDir()}
	b.cleanup(func() { _, _ = r.host.Close(), r.guest.Close() })
	b.cleanup(startServer(r.guest))
	r.ways = []*way{{name: wayDirect, from: r.guest, tcp: at(serverTCP), udp: at(serverUDP)}}
	for _, start := range starters {
		w := start(ctx, r)
		w.from = r.host
		r.ways = append(r.ways, w)
	}
	for _, w := range r.ways {
		w.slow = overVsock
		if err := eventually(ctx, func() error { return w.from.Do(func() error { return echo(w) }) }); err != nil {
			check(fmt.Errorf("%s does not work: %w", w.name, err))
		}
	}
	return r
}

// start starts a program of a way.
func (r *flowRig) start(w *way, in *netns.Space, name string, args ...string) {
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = r.b.log, r.b.log
	check(in.Start(cmd))
	w.procs = append(w.procs, cmd)
	r.b.cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
}

func startSplice(_ context.Context, r *flowRig) *way {
	w := &way{name: waySplice, tcp: at(7100)}
	self := must(os.Executable())
	between := "unix " + filepath.Join(r.dir, "splice")
	if r.vsock {
		between = "vsock 7100"
	}
	r.start(w, r.guest, self, "-relay", between+" tcp "+at(serverTCP).String())
	r.start(w, r.host, self, "-relay", "tcp "+w.tcp.String()+" "+between)
	return w
}

// runRelay is all that a process of the way "splice" does: spec is network and address to
// listen at, and to dial. A vsock address is a port, dialed through the loopback.
func runRelay(ctx context.Context, spec string) error {
	f := strings.Fields(spec)
	listen, dial := net.Listen, net.Dial
	if f[0] == "vsock" {
		listen = func(_, port string) (net.Listener, error) {
			return vsock.ListenContextID(unix.VMADDR_CID_ANY, uint32(must(strconv.Atoi(port))), nil)
		}
	}
	if f[2] == "vsock" {
		dial = func(_, port string) (net.Conn, error) {
			return vsock.Dial(unix.VMADDR_CID_LOCAL, uint32(must(strconv.Atoi(port))), nil)
		}
	}
	l, err := listen(f[0], f[1])
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			d, err := dial(f[2], f[3])
			if err != nil {
				forward.Reset(c)
				return
			}
			_ = forward.Splice(ctx, c, d, nil)
		}()
	}
}

func startLink(_ context.Context, r *flowRig) *way {
	w := &way{name: wayLink, tcp: at(serverTCP), udp: at(serverUDP)}
	listen, token := "unix://"+filepath.Join(r.dir, "link", "s"), ""
	connect := listen
	if r.vsock { // which needs a token
		listen, connect, token = "vsock://:1023", "vsock://1:1023", filepath.Join(r.dir, "token")
		check(os.WriteFile(token, []byte(strings.Repeat("k", 32)), 0o600))
	}
	r.start(w, r.guest, r.b.program, "agent", "--link-token="+token, "--link", listen, "--allow-cids", "1", "--source", "socket",
		"--control", filepath.Join(r.dir, "agent", "s"), "--log-level", "error")
	r.start(w, r.host, r.b.program, "host", "--link-token="+token, "--connect", connect,
		"--control", filepath.Join(r.dir, "host", "s"), "--log-level", "error")
	return w
}

// startGvproxy uses the addresses that are gvproxy's defaults.
func startGvproxy(ctx context.Context, r *flowRig) *way {
	w := &way{name: wayGvproxy, tcp: at(7300), udp: at(7300)}
	build := exec.CommandContext(ctx, "go", "build", "-C", "test/gvproxy", "-o", r.dir,
		"github.com/containers/gvisor-tap-vsock/cmd/gvproxy", "github.com/containers/gvisor-tap-vsock/cmd/vm")
	if out, err := build.CombinedOutput(); err != nil {
		check(fmt.Errorf("build gvproxy (in the root of the repository): %w: %s", err, out))
	}
	for _, args := range []string{
		"tuntap add dev tap0 mode tap", "link set tap0 address 5a:94:ef:e4:0c:ee mtu 1500 up",
		"addr add 192.168.127.2/24 dev tap0", "route add default via 192.168.127.1",
	} {
		runIn(r.guest, exec.CommandContext(ctx, "ip", strings.Fields(args)...))
	}
	network, api := filepath.Join(r.dir, "gvnet"), filepath.Join(r.dir, "gvapi")
	r.start(w, r.host, filepath.Join(r.dir, "gvproxy"), "-listen", "unix://"+network, "-listen", "unix://"+api, "-ssh-port", "7399")
	check(eventually(ctx, func() error { _, err := os.Stat(api); return err }))
	r.start(w, r.guest, filepath.Join(r.dir, "vm"), "-preexisting", "-iface", "tap0", "-url", "unix://"+network)
	for protocol, port := range map[string]int{"tcp": serverTCP, "udp": serverUDP} {
		check(eventually(ctx, func() error {
			expose := fmt.Sprintf(`{"local":%q,"remote":"192.168.127.2:%d","protocol":%q}`, w.tcp, port, protocol)
			_, err := fetch(unixClient(api), must(http.NewRequestWithContext(ctx, http.MethodPost, "http://gvproxy/services/forwarder/expose", strings.NewReader(expose))))
			return err
		}))
	}
	return w
}
