// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/leak"
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

// play is a process that holds sockets until it is killed, or goes on as its part says when
// it is told to by its descriptor 3.
func play(part string) {
	var tcp, udp int
	if part != "sleep" {
		var err, uerr error
		to := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 8080}
		tcp, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		udp, uerr = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		err = errors.Join(err, uerr, unix.Bind(tcp, to), unix.Listen(tcp, 1), unix.Bind(udp, to))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	fmt.Println("ready")
	if part != "sleep" && part != "listen" {
		_, _ = os.NewFile(3, "go").Read(make([]byte, 1))
	}
	var err error
	switch part {
	case "exec":
		err = unix.Exec("/bin/sleep", []string{"sleep", "1000"}, nil)
	case "rename":
		err = os.WriteFile("/proc/self/comm", []byte("renamed"), 0)
	case "close":
		err = errors.Join(unix.Close(tcp), unix.Close(udp))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for { // the runtime's own signals end a pause
		_ = unix.Pause()
	}
}
