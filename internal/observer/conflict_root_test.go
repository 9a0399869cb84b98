// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package observer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
)

// Who wants a port that is watched and held is told, on the best method that this
// kernel takes, with what it asked for and who it is.
func TestWhoeverIsRefusedAPortIsTold(t *testing.T) { refusedPorts(t, "") }

func refusedPorts(t *testing.T, method string) {
	const held, free = 8080, 8081
	r, elsewhere := newRoom(t), newRoom(t)
	var opt ConflictOptions
	if method != "" {
		opt.Methods = []string{method}
	}
	var c *Conflicts
	var err error
	r.do(func() { c, err = OpenConflicts(opt) })
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("method %+v", c.Method())
	var mu sync.Mutex
	var told []Socket
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- c.Run(ctx, func(s Socket) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, s)
		})
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()

	// ask binds a socket and returns what bind said.
	ask := func(in *room, family, kind, protocol int, to unix.Sockaddr, v6only bool) error {
		t.Helper()
		var err error
		in.do(func() {
			var fd int
			if fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol); err != nil {
				t.Errorf("socket: %v", err)
				return
			}
			defer func() { _ = unix.Close(fd) }()
			if v6only {
				if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
					t.Error(err)
				}
			}
			err = unix.Bind(fd, to)
		})
		return err
	}
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: bind said %v, want EADDRINUSE", what, err)
		}
	}
	expect := func(what string, want ...string) {
		t.Helper()
		var got []string
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
			mu.Lock()
			got = nil
			for _, s := range told {
				got = append(got, fmt.Sprintf("%s %s:%d", s.Protocol, s.Address, s.Port))
			}
			mu.Unlock()
			if len(got) >= len(want) {
				break
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: told %q, want %q", what, got, want)
		}
		mu.Lock()
		told = nil
		mu.Unlock()
	}

	tcp, udp := -1, -1
	r.do(func() {
		to := loopback4(held)
		tcp, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		var uerr error
		udp, uerr = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		err = errors.Join(err, uerr, unix.Bind(tcp, to), unix.Listen(tcp, 1), unix.Bind(udp, to))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = unix.Close(tcp), unix.Close(udp) }()

	refused("not watched", ask(r, unix.AF_INET, unix.SOCK_STREAM, 0, any4(held), false))
	if err := c.Watch(held, true); err != nil {
		t.Fatal(err)
	}
	if err := ask(r, unix.AF_INET, unix.SOCK_STREAM, 0, any4(free), false); err != nil {
		t.Errorf("another port: %v", err)
	}
	if err := ask(elsewhere, unix.AF_INET, unix.SOCK_STREAM, 0, any4(held), false); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	refused("all addresses", ask(r, unix.AF_INET, unix.SOCK_STREAM, 0, any4(held), false))
	var first Socket
	for end := time.Now().Add(patience); time.Now().Before(end) && first.Port == 0; time.Sleep(time.Millisecond) {
		mu.Lock()
		if len(told) > 0 {
			first = told[0]
		}
		mu.Unlock()
	}
	if int(first.PID) != os.Getpid() || first.Comm == "" || first.Protocol != port.TCP {
		t.Errorf("told %+v, want it to name this process (%d)", first, os.Getpid())
	}
	expect("all addresses", "tcp 0.0.0.0:8080")

	refused("the same address", ask(r, unix.AF_INET, unix.SOCK_STREAM, 0, loopback4(held), false))
	refused("UDP", ask(r, unix.AF_INET, unix.SOCK_DGRAM, 0, any4(held), false))
	refused("both families", ask(r, unix.AF_INET6, unix.SOCK_STREAM, 0, any6(held), false))
	refused("both families, UDP", ask(r, unix.AF_INET6, unix.SOCK_DGRAM, 0, any6(held), false))
	refused("MPTCP", ask(r, unix.AF_INET, unix.SOCK_STREAM, protocolMPTCP, any4(held), false))
	expect("each kind", "tcp 127.0.0.1:8080", "udp 0.0.0.0:8080", "tcp :::8080", "udp :::8080", "tcp 0.0.0.0:8080")

	if err := c.Watch(held, false); err != nil {
		t.Fatal(err)
	}
	refused("no longer watched", ask(r, unix.AF_INET, unix.SOCK_STREAM, 0, any4(held), false))
	time.Sleep(100 * time.Millisecond) // what must not come would be here
	expect("nothing more")
}
