// SPDX-License-Identifier: Apache-2.0

// Package ports gives tests ports that no other test takes.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"strconv"
	"testing"
)

// Ports that no system gives to clients or to listeners on port 0, which could take a
// test's port now and then. Nor are they node ports of Kubernetes.
const first, last = 10_000, 29_999

// Free returns a port that is free for TCP and UDP on all addresses. On Linux no other
// caller in this network namespace, in whatever process, gets it before the test ends.
func Free(tb testing.TB) uint16 {
	tb.Helper()
	var err error
	for range 1000 {
		p := first + rand.IntN(last-first+1)
		var hold func()
		if hold, err = reserve(p); err != nil {
			continue
		}
		if err = try(p); err == nil {
			tb.Cleanup(hold)
			return uint16(p)
		}
		hold()
	}
	tb.Fatalf("no port is free: %v", err)
	return 0
}

// reserve keeps a port from other callers until release. An abstract socket belongs to
// a network namespace, as ports do, and ends with its process.
func reserve(p int) (release func(), err error) {
	if runtime.GOOS != "linux" {
		return func() {}, nil
	}
	l, err := net.Listen("unix", fmt.Sprintf("@fairlead-test-port-%d", p))
	if err != nil {
		return nil, err
	}
	return func() { _ = l.Close() }, nil
}

func try(p int) error {
	at := net.JoinHostPort("", strconv.Itoa(p))
	l, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := net.ListenPacket("udp", at)
	if err != nil {
		return err
	}
	return c.Close()
}
