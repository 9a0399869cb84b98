// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package observer

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/netns"
)

var update = flag.Bool("update", false, "write what the kernel sends as seeds of the fuzz targets")

// What this kernel answers about sockets is understood. With -update it becomes seeds of
// FuzzParseDiag.
func TestRecordedDiag(t *testing.T) {
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = space.Close() }()
	var open []io.Closer
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	for _, address := range []string{"127.0.0.1:80", "[::]:81", "[::1]:82"} {
		l, err := space.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		c, err := space.ListenPacket("udp", address)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, l, c)
	}
	for _, c := range []struct {
		name     string
		family   uint8
		protocol uint16
		state    uint32
		rows     int
	}{
		{"tcp4", unix.AF_INET, unix.IPPROTO_TCP, 1 << tcpListen, 1},
		{"tcp6", unix.AF_INET6, unix.IPPROTO_TCP, 1 << tcpListen, 2},
		{"tcp", unix.AF_UNSPEC, unix.IPPROTO_TCP, 1 << tcpListen, 3},
		{"udp4", unix.AF_INET, unix.IPPROTO_UDP, 1 << tcpClose, 1},
		{"udp6", unix.AF_INET6, unix.IPPROTO_UDP, 1 << tcpClose, 2},
	} {
		var b []byte
		err := space.Do(func() (err error) {
			b, err = rawDiag(c.family, c.protocol, c.state)
			return err
		})
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		rows := 0
		if _, _, err := parseDiag(b, 5, func(*diagRow) { rows++ }); err != nil || rows < c.rows {
			t.Errorf("%s: %d sockets, %v", c.name, rows, err)
		}
		if *update {
			dir := "testdata/fuzz/FuzzParseDiag"
			text := fmt.Sprintf("go test fuzz v1\n[]byte(%q)\n", b)
			if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "recorded-"+c.name), []byte(text), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// rawDiag returns the first part of the kernel's answer, with the sequence number that the
// fuzz target expects.
func rawDiag(family uint8, protocol uint16, states uint32) ([]byte, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Sendto(fd, diagRequest(5, family, protocol, states), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	b := make([]byte, diagBuffer)
	n, _, err := unix.Recvfrom(fd, b, 0)
	return b[:max(n, 0)], err
}
