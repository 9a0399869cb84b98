// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/kit/leak"
)

// childVar makes the test binary play a part instead of running tests.
const childVar = "FAIRLEAD_OBSERVER_CHILD"

func TestMain(m *testing.M) {
	if part := os.Getenv(childVar); part != "" {
		play(part)
		return
	}
	leak.Main(m)
}

// play is a process that holds sockets until it is killed.
func play(part string) {
	if part == "listen" {
		to := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 8080}
		tcp, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		udp, uerr := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		err = errors.Join(err, uerr, unix.Bind(tcp, to), unix.Listen(tcp, 1), unix.Bind(udp, to))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	fmt.Println("ready")
	for { // the runtime's own signals end a pause
		_ = unix.Pause()
	}
}
