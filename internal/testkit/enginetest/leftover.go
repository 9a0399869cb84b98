// SPDX-License-Identifier: Apache-2.0

package enginetest

import (
	"context"
	"errors"
	"net"
	"net/http/httptrace"
	"path/filepath"
	"sync/atomic"
	"testing"
)

// Leftover makes a socket at which nobody listens.
func Leftover(t *testing.T) string {
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

// RefusedAddresses tests that nobody listens only where that holds for every address.
// Connect returns why no engine at these sockets answers, which is absent or refused in
// that case; at hangs one accepts and does not answer.
func RefusedAddresses(t *testing.T, hangs string, absent, refused error, connect func(ctx context.Context, paths ...string) error) {
	t.Helper()
	none, left := filepath.Join(t.TempDir(), "none.sock"), Leftover(t)
	for _, x := range []struct {
		paths           []string
		absent, refused bool
	}{
		{paths: []string{none}, absent: true},
		{paths: []string{left}, refused: true},
		{paths: []string{none, left}, refused: true},
		{paths: []string{left, none}, refused: true},
		{paths: []string{left, hangs}},
		{paths: []string{hangs, none}},
	} {
		err := connect(t.Context(), x.paths...)
		if errors.Is(err, absent) != x.absent || errors.Is(err, refused) != x.refused {
			t.Errorf("%q: %v; want absent %v, refused %v", x.paths, err, x.absent, x.refused)
		}
	}
}

// ConnectionIsTraced tests that a connection is noticed before the engine answers.
func ConnectionIsTraced(t *testing.T, hangs string, connect func(ctx context.Context, paths ...string) error) {
	t.Helper()
	var connected atomic.Bool
	err := connect(httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{ConnectDone: func(_, _ string, err error) {
		if err == nil {
			connected.Store(true)
		}
	}}), hangs)
	if !connected.Load() {
		t.Errorf("no connection was noticed in a session that ended by %v", err)
	}
}
