// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package refused

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

const (
	held, free = 8080, 8081
)

// TestRefusedBindIsReported uses the best method of this kernel.
func TestRefusedBindIsReported(t *testing.T) {
	if !kernels.Must(kernel.MethodCgroup) {
		testRefused(t)
		return
	}
	for _, method := range []string{kernels.Best(kernel.MethodFentry, kernel.MethodCgroup), kernel.MethodCgroup} {
		t.Run(method, func(t *testing.T) { testRefused(t, method) })
	}
}

func testRefused(t *testing.T, methods ...string) {
	guest, other := newSpace(t), newSpace(t)
	w, binds := start(t, guest, methods)
	holdPort(t, guest)
	refuse := func(what string, family, kind, protocol int, to unix.Sockaddr) {
		t.Helper()
		if err := bind(guest, family, kind, protocol, to); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: bind returned %v, want EADDRINUSE", what, err)
		}
	}
	watch := func(on bool) {
		t.Helper()
		if err := w.Watch(held, on); err != nil {
			t.Fatal(err)
		}
	}

	refuse("not watched", unix.AF_INET, unix.SOCK_STREAM, 0, any4(held))
	watch(true)
	if err := bind(guest, unix.AF_INET, unix.SOCK_STREAM, 0, any4(free)); err != nil {
		t.Errorf("another port: %v", err)
	}
	if err := bind(other, unix.AF_INET, unix.SOCK_STREAM, 0, any4(held)); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	refuse("all addresses", unix.AF_INET, unix.SOCK_STREAM, 0, any4(held))
	first := next(t, binds)
	if int(first.PID) != os.Getpid() || first.Comm == "" || describe(first) != "tcp 0.0.0.0:8080" {
		t.Errorf("reported %+v, want 0.0.0.0:8080 by this process (%d)", first, os.Getpid())
	}
	refuse("the same address", unix.AF_INET, unix.SOCK_STREAM, 0, loopback4(held))
	refuse("UDP", unix.AF_INET, unix.SOCK_DGRAM, 0, any4(held))
	refuse("both families", unix.AF_INET6, unix.SOCK_STREAM, 0, any6(held))
	refuse("both families, UDP", unix.AF_INET6, unix.SOCK_DGRAM, 0, any6(held))
	refuse("MPTCP", unix.AF_INET, unix.SOCK_STREAM, kernels.MPTCP(), any4(held))
	want := []string{"tcp 127.0.0.1:8080", "udp 0.0.0.0:8080", "tcp [::]:8080", "udp [::]:8080", "tcp 0.0.0.0:8080"}
	var got []string
	for range want {
		got = append(got, describe(next(t, binds)))
	}
	if !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
	watch(false)
	refuse("no longer watched", unix.AF_INET, unix.SOCK_STREAM, 0, any4(held))
	watch(true)
	refuse("watched again", unix.AF_INET, unix.SOCK_DGRAM, 0, loopback4(held))
	if got := describe(next(t, binds)); got != "udp 127.0.0.1:8080" {
		t.Errorf("reported %s, want only what came after it was watched again", got)
	}
}

func newSpace(t *testing.T) *netns.Space {
	t.Helper()
	s, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// start runs a watcher in a namespace until the test ends.
func start(t *testing.T, in *netns.Space, methods []string) (*Watcher, <-chan Bind) {
	t.Helper()
	var w *Watcher
	if err := in.Do(func() (err error) { w, err = Open(methods...); return err }); err != nil {
		t.Fatal(err)
	}
	t.Logf("method %+v", w.Method())
	binds := make(chan Bind, 16)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx, func(b Bind) { binds <- b }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w, binds
}

func next(t *testing.T, binds <-chan Bind) Bind {
	t.Helper()
	return wait.For(t, "a report", binds)
}

func describe(b Bind) string { return fmt.Sprintf("%s %s", b.Protocol, b.Address) }

// holdPort has sockets at 127.0.0.1 and the held port until the test ends.
func holdPort(t *testing.T, in *netns.Space) {
	t.Helper()
	tcp, err := in.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", held))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tcp.Close() })
	udp, err := in.ListenPacket("udp4", fmt.Sprintf("127.0.0.1:%d", held))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = udp.Close() })
}

// bind binds a socket and closes it.
func bind(in *netns.Space, family, kind, protocol int, to unix.Sockaddr) error {
	return in.Do(func() error {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		return unix.Bind(fd, to)
	})
}

func any4(p int) unix.Sockaddr { return &unix.SockaddrInet4{Port: p} }
func any6(p int) unix.Sockaddr { return &unix.SockaddrInet6{Port: p} }
func loopback4(p int) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: p, Addr: [4]byte{127, 0, 0, 1}}
}
