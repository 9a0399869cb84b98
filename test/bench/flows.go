// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
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
	"github.com/fairlead/fairlead/internal/privilege"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/gvtools"
)

// The ways from a client to the server; splice is the baseline.
const (
	waySplice  = "splice"   // two relays with splice(2), or copying over vsock
	wayDirect  = "direct"   // client and server in one namespace
	wayLink    = "fairlead" // host peer and agent
	wayGvproxy = "gvproxy"  // gvproxy's forwarder and its tap device in the guest
)

// flowMeasures returns what is measured on all ways. An emulated machine with vsock opens
// tens of connections a second, any other a thousand.
func flowMeasures(vsock bool) (all []measure) {
	prefix, where, rate := "", "", 1000
	if vsock {
		prefix, where, rate = "Vsock", " over vsock, emulated", 20
	}
	add := func(name, title, unit string, load load) {
		modes := []string{waySplice, wayDirect, wayLink, wayGvproxy}
		if name == "UDPEcho" {
			modes = modes[1:] // splice(2) is for streams
		}
		all = append(all, measure{name: prefix + name, title: strings.Replace(title, ",", where+",", 1), unit: unit, modes: modes, load: load})
	}
	add("ToGuest", "TCP to the guest, 1 flow", "B/s", throughput(1, push))
	add("ToHost", "TCP to the host, 1 flow", "B/s", throughput(1, pull))
	add("ToGuest64", "TCP to the guest, 64 flows", "B/s", throughput(64, push))
	add("ToHost64", "TCP to the host, 64 flows", "B/s", throughput(64, pull))
	add("RoundTrip", "TCP round trip of 64 bytes, 1 flow", "p50-sec", roundTrips)
	add("Connections", fmt.Sprintf("TCP connections with 64 bytes each way, %s per second", number(float64(rate))), "1/s", connections(rate))
	add("UDPEcho", "UDP echo of 64 bytes, 16 clients, one datagram in flight each", "1/s", echoes)
	return all
}

func flowsPart() part {
	return part{"flows", "flows", flowMeasures(false), func(ctx context.Context, b *bench) {
		ways := []starter{startSplice, startLink}
		if b.scale == full { // it is built from source
			ways = append(ways, startGvproxy)
		}
		b.flows(ctx, false, b.of(3, 1, 1), b.lasting(time.Second, 500*time.Millisecond, 200*time.Millisecond), ways...)
	}}
}

func vsockPart() part { return part{"vsock", "vsock", flowMeasures(true), inVM} }

// vsockFlows is what runs in the emulated machine.
func vsockFlows(ctx context.Context, b *bench) {
	b.flows(ctx, true, b.of(2, 1, 1), b.lasting(3*time.Second, 3*time.Second, 500*time.Millisecond), startSplice, startLink)
}

// flows measures each for d on each way, in turns.
func (b *bench) flows(ctx context.Context, vsock bool, rounds int, d time.Duration, starters ...starter) {
	ways := b.ways(ctx, vsock, starters...)
	for range rounds {
		for _, m := range flowMeasures(vsock) {
			for _, w := range ways {
				if slices.Contains(m.modes, w.name) {
					b.progress("%s, %s", m.name, w.name)
					run := &meter{w: w}
					m.load(ctx, w, run, d)
					b.add(m.name, w.name, 0, run.values(m.unit))
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
	procs    []*process    // that carry the bytes
	patience time.Duration // with a connection
}

// cpu is the CPU time of the processes of a way so far.
func (w *way) cpu() (used time.Duration) {
	for _, p := range w.procs {
		used += p.used().CPU
	}
	return used
}

// flowRig is a host and a guest with a server.
type flowRig struct {
	b           *bench
	vsock       bool // between host and guest, instead of unix sockets
	host, guest *netns.Space
	dir         string
}

// starter starts a way.
type starter func(ctx context.Context, r *flowRig) *way

// ways starts a server in a guest, and the ways to it.
func (b *bench) ways(ctx context.Context, vsock bool, starters ...starter) []*way {
	r := &flowRig{b: b, vsock: vsock, host: b.space(), guest: b.space(), dir: b.tempDir()}
	b.cleanup(startServer(r.guest))
	ways := []*way{{name: wayDirect, from: r.guest, tcp: at(serverTCP), udp: at(serverUDP)}}
	for _, start := range starters {
		w := start(ctx, r)
		w.from = r.host
		ways = append(ways, w)
	}
	for _, w := range ways {
		w.patience = 2 * time.Second
		if vsock { // an emulated machine is slow
			w.patience = 30 * time.Second
		}
		if err := eventually(ctx, func() error { return w.from.Do(func() error { return echo(w) }) }); err != nil {
			check(fmt.Errorf("%s does not work: %w", w.name, err))
		}
	}
	return ways
}

// run starts a program of a way.
func (r *flowRig) run(w *way, in *netns.Space, cmd *exec.Cmd) {
	w.procs = append(w.procs, r.b.start(in, cmd))
}

func startSplice(_ context.Context, r *flowRig) *way {
	w := &way{name: waySplice, tcp: at(7100)}
	between := "unix " + filepath.Join(r.dir, "splice")
	if r.vsock {
		between = "vsock 7100"
	}
	self := must(os.Executable())
	r.run(w, r.guest, exec.Command(self, "-relay", between+" tcp "+at(serverTCP).String()))
	r.run(w, r.host, exec.Command(self, "-relay", "tcp "+w.tcp.String()+" "+between))
	return w
}

// runRelay is all that a process of the way "splice" does: spec is network and address to
// listen at, and to dial. A vsock address is a port, dialed through the loopback.
func runRelay(ctx context.Context, spec string) error {
	// With them it could have more in pipes than a user may, as fairlead cannot.
	if err := privilege.Limit(0); err != nil {
		return fmt.Errorf("relay: %w", err)
	}
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
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
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
	start := func(in *netns.Space, role string, flags ...string) {
		args := []string{role, "--link-token=" + token, "--control", filepath.Join(r.dir, role, "s"), "--log-level", "error"}
		r.run(w, in, exec.Command(r.b.program, append(args, flags...)...))
	}
	start(r.guest, "agent", "--link", listen, "--allow-cids", "1", "--source", "socket")
	start(r.host, "host", "--connect", connect)
	return w
}

func startGvproxy(ctx context.Context, r *flowRig) *way {
	w := &way{name: wayGvproxy, tcp: at(7300), udp: at(7300)}
	check(gvtools.Build(r.dir))
	network := filepath.Join(r.dir, "network")
	r.run(w, r.host, gvtools.Proxy(r.dir, network))
	r.run(w, r.guest, gvtools.VM(r.dir, network))
	check(eventually(ctx, func() error { return r.guest.Do(gvtools.Configure) }))
	dial := func() (net.Conn, error) { return r.guest.Dial("tcp", gvtools.API) }
	for protocol, port := range map[string]int{"tcp": serverTCP, "udp": serverUDP} {
		expose := fmt.Sprintf(`{"local":%q,"remote":"%s:%d","protocol":%q}`, w.tcp, gvtools.GuestIP, port, protocol)
		check(eventually(ctx, func() error {
			_, err := fetch(ctx, dial, "POST", "/services/forwarder/expose", expose)
			return err
		}))
	}
	return w
}
