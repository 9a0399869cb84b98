// SPDX-License-Identifier: Apache-2.0

package docker

import (
	"context"
	"errors"
	"net"
	"net/http/httptrace"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/engine"
)

// leftover makes a socket at which nobody listens.
func leftover(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "left.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// Nobody listens only where that holds for every address.
func TestRefusedAddresses(t *testing.T) {
	e := newFake(t)
	e.set(func() { e.slow = map[string]chan struct{}{"/_ping": make(chan struct{})} })
	none, left := filepath.Join(t.TempDir(), "none.sock"), leftover(t)
	for _, x := range []struct {
		paths           []string
		absent, refused bool
	}{
		{paths: []string{none}, absent: true},
		{paths: []string{left}, refused: true},
		{paths: []string{none, left}, refused: true},
		{paths: []string{left, none}, refused: true},
		{paths: []string{left, e.socket}},
		{paths: []string{e.socket, none}},
	} {
		err := connectError(t.Context(), t, x.paths)
		if errors.Is(err, engine.ErrAbsent) != x.absent || errors.Is(err, engine.ErrRefused) != x.refused {
			t.Errorf("%q: %v; want absent %v, refused %v", x.paths, err, x.absent, x.refused)
		}
	}
}

// A connection is noticed before the engine answers.
func TestConnectionIsTraced(t *testing.T) {
	e := newFake(t)
	e.set(func() { e.slow = map[string]chan struct{}{"/_ping": make(chan struct{})} })
	var connected atomic.Bool
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{ConnectDone: func(_, _ string, err error) {
		if err == nil {
			connected.Store(true)
		}
	}})
	err := connectError(ctx, t, []string{e.socket})
	if !connected.Load() {
		t.Errorf("no connection was noticed in a session that ended by %v", err)
	}
}

// connectError returns why no engine at these sockets answers.
func connectError(ctx context.Context, t *testing.T, paths []string) error {
	t.Helper()
	var hosts []string
	for _, p := range paths {
		hosts = append(hosts, "unix://"+p)
	}
	_, _, err := source(t, nil, Options{Hosts: hosts, Timeout: 50 * time.Millisecond}).connect(ctx)
	return err
}
