// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

package main

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/fairlead/fairlead/internal/sink/hostlink"
	"github.com/fairlead/fairlead/internal/source/nat"
	"github.com/fairlead/fairlead/test/bench/report"
	"github.com/fairlead/fairlead/test/kit/program"
)

// emulatedModes are the hooks first, then what is compared with them.
var emulatedModes = []natMode{
	{emulatedHook, forced(nat.MethodFentry), 1},
	{"kprobe", forced(nat.MethodKprobe), 1},
	{"nfnetlink", forced(nat.MethodNetlink), 1},
	{modeDump1, func(ctx context.Context, _, _ string, n int) (natWatcher, error) {
		return newNATPoller(ctx, n, time.Second, false, dumpPorts)
	}, 1},
}

// Hooks tell of a rule sooner than a poller each second, in one machine. The
// benchmark collects what it measures, and how much it asks for.
func TestNATInTheEmulatedMachine(t *testing.T) {
	e := emulatedEnv(t)
	for _, n := range []int{10, 1000} {
		if e.Scale == Tiny && n > 10 {
			break
		}
		if err := measureEmulated(t.Context(), e, n); err != nil {
			t.Errorf("%d rules: %v", n, err)
		}
	}
	if e.err != nil {
		t.Error(e.err)
	}
}

// emulatedEnv measures as much as the benchmark asks for, tiny if nobody does.
func emulatedEnv(t *testing.T) *Env {
	t.Helper()
	scale := Tiny
	if s := os.Getenv(scaleVariable); s != "" {
		i := slices.IndexFunc([]Scale{Full, Quick, Tiny}, func(x Scale) bool { return x.String() == s })
		if i < 0 {
			t.Fatalf("%s=%q", scaleVariable, s)
		}
		scale = Scale(i)
	}
	dir, err := os.MkdirTemp("", "flb")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	binary, err := program.Path(dir)
	if err != nil {
		t.Fatal(err)
	}
	return toStdout(dir, binary, scale)
}

func measureEmulated(ctx context.Context, e *Env, n int) error {
	var watchers []natWatcher
	defer func() {
		for _, w := range watchers {
			w.close()
		}
	}()
	for _, m := range emulatedModes {
		dir, err := e.Dir()
		if err != nil {
			return err
		}
		w, err := m.make(ctx, e.Program, dir, n)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		watchers = append(watchers, w)
	}
	samples := make([][]float64, len(watchers))
	var polled []func() error
	for i := range e.Of(110, 40, 3) {
		for j, w := range watchers {
			p := uint16(i + 1)
			said := w.seen(p)
			// A poller is met at any phase; it is not waited for.
			if err := pause(ctx, 20*time.Millisecond+rand.N(60*time.Millisecond)); err != nil {
				return err
			}
			began, err := w.commit(p)
			if err != nil {
				return err
			}
			wait := func() error {
				select {
				case at := <-said:
					samples[j] = append(samples[j], at.Sub(began).Seconds())
					return nil
				case <-time.After(limit):
					return fmt.Errorf("%s: port %d was not seen within %v", emulatedModes[j].name, p, limit)
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			if _, ok := w.(*natPoller); ok {
				polled = append(polled, wait)
			} else if err := wait(); err != nil {
				return err
			}
		}
	}
	for _, wait := range polled {
		if err := wait(); err != nil {
			return err
		}
	}
	for i, m := range emulatedModes {
		c := report.Cell{Measure: emulatedNAT, Mode: m.name, Size: float64(n), SizeUnit: "rules", Unit: "s"}
		by, err := watchers[i].check(ctx)
		if err != nil {
			e.Fail(c, err)
			continue
		}
		c.By = by
		e.Samples(c, samples[i])
	}
	return nil
}

// forcedAgent is what an agent has between NAT rules and the link, with a source
// that has one way to hear of them.
type forcedAgent struct {
	*natTable
	method string
	reg    *registry.Registry
	peer   *peer
	stop   context.CancelFunc
	done   chan struct{} // closed when it has ended
	why    error         // of its end, once done is closed
}

func forced(method string) func(context.Context, string, string, int) (natWatcher, error) {
	return func(ctx context.Context, _, dir string, n int) (natWatcher, error) {
		return newForced(ctx, dir, method, n)
	}
}

func newForced(ctx context.Context, dir, method string, n int) (_ natWatcher, err error) {
	g, err := newSpaces(dir, mode{})
	if err != nil {
		return nil, err
	}
	a := &forcedAgent{method: method, done: make(chan struct{})}
	run, stop := context.WithCancel(ctx)
	a.stop = func() { stop(); g.close() }
	running := false
	defer func() {
		if err != nil && running {
			a.close()
		} else if err != nil {
			a.stop()
		}
	}()
	if a.natTable, err = fillNAT(g.space, n); err != nil {
		return nil, err
	}
	quiet := slog.New(slog.DiscardHandler)
	src, err := nat.New(nat.Options{NetNS: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), g.space.FD()), Methods: []string{method}})
	if err != nil {
		return nil, err
	}
	at, err := link.ParseEndpoint(g.link)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(at.Path), 0o700); err != nil {
		return nil, err
	}
	o := link.Options{Role: link.RoleAgent, Identity: link.NewIdentity(), Name: "bench", Version: "bench", Logger: quiet}
	listener, err := link.Listen(ctx, at, o)
	if err != nil {
		return nil, err
	}
	a.reg = registry.New(registry.Options{Rules: all{}, Logger: quiet})
	var r *reconcile.Reconciler
	sink, err := hostlink.New(listener, hostlink.Options{
		Epoch:  o.Identity,
		Lookup: func(k port.Key) (port.Publication, bool) { return r.Wanted().View().Get(k) },
		Serve: func(_ context.Context, s net.Conn, _ forward.Request) error {
			return errors.Join(errors.New("no flows here"), s.Close())
		},
		ServeUDP: func(_ context.Context, client forward.Datagrams, _ forward.Request) error {
			return errors.Join(errors.New("no flows here"), client.Close())
		},
		Logger: quiet,
	})
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	r = reconcile.New(a.reg.Publications(), []reconcile.Sink{sink}, reconcile.Options{Ready: a.reg.Ready(), Logger: quiet})
	feed := a.reg.Feed(src.Name())
	group, run := errgroup.WithContext(run)
	for _, f := range []func(context.Context) error{
		sink.Run, r.Run, func(ctx context.Context) error { return src.Run(ctx, feed) },
	} {
		group.Go(func() error { return f(run) })
	}
	running = true
	go func() {
		defer close(a.done)
		a.why = errors.Join(group.Wait(), listener.Close())
	}()
	if a.peer, err = newPeer(ctx, g); err != nil {
		return nil, err
	}
	if _, err := a.peer.settled(ctx, n); err != nil {
		return nil, err
	}
	return a, nil
}

func (a *forcedAgent) seen(p uint16) <-chan time.Time {
	return a.peer.expect(port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: p})
}

func (a *forcedAgent) cpu() (time.Duration, error) { return 0, errors.New("not measured") }

func (a *forcedAgent) spacing() time.Duration { return 20 * time.Millisecond }

// check returns the mechanism that tells of rules, which must be the one that was asked for.
func (a *forcedAgent) check(context.Context) (string, error) {
	select {
	case <-a.done:
		return "", fmt.Errorf("it has ended: %w", a.why)
	default:
	}
	for _, s := range a.reg.Sources().View().All() {
		if s.State == registry.Live && strings.HasPrefix(s.Method, a.method) {
			return a.method, nil
		}
		return "", fmt.Errorf("the NAT source is %s by %q, want %q", s.State, s.Method, a.method)
	}
	return "", errors.New("there is no NAT source")
}

func (a *forcedAgent) close() {
	if a.natTable != nil {
		_ = a.conn.CloseLasting()
	}
	if a.peer != nil {
		a.peer.close()
	}
	a.stop()
	<-a.done
}

// all lets everything through, at the host's addresses.
type all struct{}

func (all) Decide(p port.Publication) port.Decision {
	return port.Decision{Allow: true, Host: []netip.AddrPort{netip.AddrPortFrom(netip.IPv4Unspecified(), p.Port)}}
}
