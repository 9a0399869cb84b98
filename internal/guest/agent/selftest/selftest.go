// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package selftest opens and closes sockets and adds and removes a NAT rule, in a network
// namespace that it makes for that, and finds out whether the kernel's events of them
// arrive, by which method and how fast.
package selftest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/doctor"
)

const (
	// startTimeout bounds the wait for hooks to be attached and all to be read.
	startTimeout = time.Minute
	// eventTimeout bounds the wait for one event. An event takes less than a millisecond, and
	// polling a second; the rest is for machines that are very busy.
	eventTimeout = 20 * time.Second
)

// Options are what the agent observes with.
type Options struct {
	Sockets *observer.Options // nil: sockets are not tested
	NAT     *nat.Options      // nil: NAT rules are not tested
}

// test is one run.
type test struct {
	options Options
	own     own.Sockets // of the test, in its namespace
	space   *kernel.Namespace
	result  doctor.SelfTest
}

// Run tests until ctx ends. It fails where it may not make a network namespace. When it
// returns, all that it made is gone.
func Run(ctx context.Context, o Options) doctor.SelfTest {
	space, err := newSpace()
	if err != nil {
		return doctor.SelfTest{Error: err.Error()}
	}
	t := &test{options: o, space: space}
	defer func() { _ = t.space.Close() }()
	if o.Sockets != nil {
		t.sockets(ctx)
	}
	if o.NAT != nil {
		t.rules(ctx)
	}
	return t.result
}

// newSpace makes a network namespace with its loopback up.
func newSpace() (*kernel.Namespace, error) {
	space, err := kernel.NewNamespace()
	if err != nil {
		return nil, err
	}
	if err := space.Do(kernel.LoopbackUp); err != nil {
		return nil, errors.Join(fmt.Errorf("set up the loopback: %w", err), space.Close())
	}
	return space, nil
}

var errEnded = errors.New("it ended")

// within starts run, and calls body when ready is closed, until run ends. It returns after
// both.
func within(parent context.Context, run func(context.Context) error, ready <-chan struct{}, body func(context.Context)) error {
	ctx, cancel := context.WithCancel(parent)
	var work sync.WaitGroup
	var err error
	ended := make(chan struct{})
	work.Go(func() {
		defer cancel()
		defer close(ended)
		err = run(ctx)
	})
	late := time.NewTimer(startTimeout)
	defer late.Stop()
	var reason error
	select {
	case <-ready:
		if body(ctx); ctx.Err() != nil && parent.Err() == nil {
			reason = errEnded
		}
	case <-ended:
		reason = errEnded
	case <-late.C:
		reason = fmt.Errorf("nothing was read within %v", startTimeout)
	case <-parent.Done():
		reason = parent.Err()
	}
	cancel()
	work.Wait()
	if reason != nil && err != nil {
		return err
	}
	return reason
}

// step does one thing and waits for the event of it, and adds the result. It reports
// success.
func (t *test) step(ctx context.Context, name string, do func() error, seen func() (method string, at time.Time, err error), changed <-chan struct{}) bool {
	began := time.Now()
	s := doctor.SelfTestStep{Name: name}
	if err := do(); err != nil {
		s.Error, s.Remedy = err.Error(), refusedRemedy
		t.result.Steps = append(t.result.Steps, s)
		return false
	}
	method, at, err := await(ctx, seen, changed)
	s.Method = method
	if err != nil {
		s.Error, s.Remedy = err.Error(), missingRemedy
	} else {
		s.Microseconds = at.Sub(began).Microseconds()
	}
	t.result.Steps = append(t.result.Steps, s)
	return err == nil
}

const (
	refusedRemedy = "give the agent the rights that it needs, and see the checks of area kernel"
	missingRemedy = "run the agent with --observer poll, and report this with the output of `fairlead doctor -v`"
)

// await waits until something was seen. Before that, at is zero.
func await(ctx context.Context, seen func() (method string, at time.Time, err error), changed <-chan struct{}) (string, time.Time, error) {
	late := time.NewTimer(eventTimeout)
	defer late.Stop()
	for {
		method, at, err := seen()
		if err != nil || !at.IsZero() {
			return method, at, err
		}
		select {
		case <-changed:
		case <-late.C:
			return method, at, fmt.Errorf("no event within %v", eventTimeout)
		case <-ctx.Done():
			return method, at, ctx.Err()
		}
	}
}

// sockets tests listening and bound sockets.
func (t *test) sockets(ctx context.Context) {
	o := *t.options.Sockets
	ob, err := observer.New(o)
	if err != nil {
		t.result.Error = err.Error()
		return
	}
	r := newSockets(t.own.Has)
	run := func(ctx context.Context) error { return t.space.Do(func() error { return ob.Run(ctx, r) }) }
	err = within(ctx, run, r.ready, func(ctx context.Context) {
		for _, protocol := range []port.Protocol{port.TCP, port.UDP} {
			t.socket(ctx, r, protocol, t.opener(ctx, protocol, "127.0.0.1:0"))
		}
	})
	if err != nil {
		t.result.Error = "observe sockets: " + err.Error()
	}
}

// opener returns a function that opens a socket.
func (t *test) opener(ctx context.Context, protocol port.Protocol, address string) func() (io.Closer, error) {
	if protocol == port.UDP {
		return func() (io.Closer, error) { return t.own.ListenPacket(ctx, "udp4", address) }
	}
	return func() (io.Closer, error) { return t.own.Listen(ctx, "tcp4", address) }
}

// socket opens a socket and closes it.
func (t *test) socket(ctx context.Context, r *sockets, protocol port.Protocol, open func() (io.Closer, error)) {
	var socket io.Closer
	var cookie uint64
	opened := t.step(ctx, protocol.String()+" open", func() error {
		return t.space.Do(func() error {
			opened, err := open()
			if err != nil {
				return err // opened may be a nil pointer
			}
			socket = opened
			cookie, err = cookieOf(opened)
			return err
		})
	}, func() (string, time.Time, error) { return r.opened(protocol, cookie) }, r.changed)
	if socket == nil {
		return
	}
	if !opened {
		_ = socket.Close()
		return
	}
	t.step(ctx, protocol.String()+" close", socket.Close, func() (string, time.Time, error) { return r.closed(protocol, cookie) }, r.changed)
}

func cookieOf(socket any) (cookie uint64, err error) {
	c, ok := socket.(syscall.Conn)
	if !ok {
		return 0, fmt.Errorf("%T has no descriptor", socket)
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	if cerr := rc.Control(func(fd uintptr) {
		cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
	}); cerr != nil {
		return 0, cerr
	}
	return cookie, err
}

// rules tests a DNAT rule.
func (t *test) rules(ctx context.Context) {
	o := *t.options.NAT
	o.NetNS = t.space.Path()
	source, err := nat.New(o)
	if err != nil {
		t.result.Error = err.Error()
		return
	}
	r := newRules()
	run := func(ctx context.Context) error { return source.Run(ctx, r) }
	err = within(ctx, run, r.ready, func(ctx context.Context) {
		add := func() error { return t.space.Do(addRule) }
		if t.step(ctx, "NAT rule add", add, r.added, r.changed) {
			t.step(ctx, "NAT rule remove", func() error { return t.space.Do(removeRule) }, r.removed, r.changed)
		}
	})
	if err != nil {
		t.result.Error = "read NAT rules: " + errors.Join(err, r.reason()).Error()
	}
}
