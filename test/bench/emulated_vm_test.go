// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm && bench

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/sink/hostlink"
	"github.com/fairlead/fairlead/internal/source/nat"
)

// The benchmark runs this test in an emulated machine and collects the samples that it
// prints.
func TestMeasureInTheEmulatedMachine(t *testing.T) {
	b, err := newBench(scale(max(slices.Index(scales, os.Getenv(scaleVariable)), 0)), io.Discard, os.Stderr, os.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	p := emulatedPart()
	p.run = measureEmulated
	if os.Getenv(partVariable) == "vsock" {
		p = vsockPart()
		p.run = func(ctx context.Context, b *bench) {
			b.flows(ctx, true, vsockMeasures(), b.of(2, 1, 1), b.lasting(3*time.Second, 3*time.Second, 500*time.Millisecond), startSplice, startLink)
		}
	}
	if _, err := b.measure(t.Context(), p); err != nil {
		t.Error(err)
	}
	if err := b.close(); err != nil {
		t.Error(err)
	}
}

func measureEmulated(ctx context.Context, b *bench) {
	for _, n := range b.sizes(natSizes[:2]) {
		watchers := map[string]natWatcher{modeDump1: newNATPoller(ctx, b, n, time.Second, dumpPorts, false)}
		for _, method := range []string{nat.MethodFentry, nat.MethodKprobe, nat.MethodNetlink} {
			watchers[method] = newForced(ctx, b, method, n)
		}
		var polled errgroup.Group
		for i := range b.of(110, 40, 3) {
			for mode, w := range watchers {
				one := func() { b.oneNAT(ctx, w, emulatedNAT, mode, n, uint16(i+1)) }
				// At a random phase of the poller's interval.
				check(schedule.Sleep(ctx, 20*time.Millisecond+rand.N(60*time.Millisecond)))
				if mode == modeDump1 {
					polled.Go(func() error { return attempt(one) })
				} else {
					one()
				}
			}
		}
		check(polled.Wait())
		for mode, w := range watchers {
			w.verify(ctx)
			b.method(mode, mode)
		}
	}
}

// forced is the part of an agent between NAT rules and the link, with a source that has
// one method only. The agent has no option for that.
type forced struct {
	natAgent
	method string
	reg    *registry.Registry
}

func newForced(ctx context.Context, b *bench, method string, n int) natWatcher {
	g := b.newGuest(modes[0], nil)
	quiet := slog.New(slog.DiscardHandler)
	f := &forced{natAgent{fillNAT(b, g.space, n), g}, method, registry.New(registry.Options{Rules: allowAll{}, Logger: quiet})}
	src := must(nat.New(nat.Options{NetNS: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), g.space.FD()), Methods: []string{method}}))
	at := must(link.ParseEndpoint(g.link))
	check(os.MkdirAll(filepath.Dir(at.Path), 0o700))
	o := link.Options{Role: link.RoleAgent, Identity: link.NewIdentity(), Name: "bench", Version: "bench", Logger: quiet}
	listener := must(link.Listen(ctx, at, o))
	var r *reconcile.Reconciler
	sink := must(hostlink.New(listener, hostlink.Options{
		Epoch:    o.Identity,
		Lookup:   func(k port.Key) (port.Publication, bool) { return r.Wanted().View().Get(k) },
		Serve:    func(_ context.Context, s net.Conn, _ forward.Request) error { return s.Close() },
		ServeUDP: func(_ context.Context, client forward.Datagrams, _ forward.Request) error { return client.Close() },
		Logger:   quiet,
	}))
	r = reconcile.New(f.reg.Publications(), []reconcile.Sink{sink}, reconcile.Options{Ready: f.reg.Ready(), Logger: quiet})
	feed := f.reg.Feed(src.Name())
	ctx, cancel := context.WithCancel(ctx)
	group, running := errgroup.WithContext(ctx)
	b.cleanup(func() {
		cancel()
		_ = group.Wait()
		_ = listener.Close()
	})
	group.Go(func() error { return sink.Run(running) })
	group.Go(func() error { return r.Run(running) })
	group.Go(func() error { return src.Run(running, feed) })
	g.peer = must(newPeer(ctx, g.link))
	g.peer.settle(ctx, n)
	return f
}

// verify fails unless the source uses its method.
func (f *forced) verify(context.Context) {
	for _, s := range f.reg.Sources().View().All() {
		if s.State != registry.Live || !strings.HasPrefix(s.Method, f.method) {
			check(fmt.Errorf("the NAT source is %s by %q, want %q", s.State, s.Method, f.method))
		}
	}
}

// allowAll allows everything, at the host's wildcard.
type allowAll struct{}

func (allowAll) Decide(p port.Publication) port.Decision {
	return port.Decision{Allow: true, Host: []netip.AddrPort{netip.AddrPortFrom(netip.IPv4Unspecified(), p.Port)}}
}
