// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
)

// BenchmarkEvent measures from the event of a listener until its binding is fed, where
// sockets have cgroups (cgroup v2 alone), of a process in /proc.
func BenchmarkEvent(b *testing.B) {
	h := &handler{
		feed: new(tally), own: func(uint64) bool { return false }, network: fakeNetwork(), follow: func() {},
		processes: newProcesses(newProcfs(), nil),
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		b.Fatal(err)
	}
	s := observer.Socket{
		Cookie: 1, Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: 80, Listening: true,
		PID: uint32(os.Getpid()), Comm: "bench", PIDSeen: now.Nano() + int64(time.Minute), Observed: now.Nano() + int64(time.Minute),
	}
	up, down := []observer.Event{{Socket: s}}, []observer.Event{{Gone: true, Socket: s}}
	b.ReportAllocs()
	for b.Loop() {
		h.Apply(up)
		h.Apply(down)
	}
}
