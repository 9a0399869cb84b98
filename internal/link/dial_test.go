// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
)

// What connect(2) says of vsock is told in words of machines, and errors.Is still finds it.
func TestVsockErrorsNameTheMachine(t *testing.T) {
	for errno, want := range map[syscall.Errno]string{
		syscall.ENODEV:       "has this CID",
		syscall.ECONNRESET:   "nothing listens",
		syscall.ETIMEDOUT:    "does not answer",
		syscall.EAFNOSUPPORT: "vhost_vsock",
	} {
		err := explainVsock(os.NewSyscallError("connect", errno))
		if !errors.Is(err, errno) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", errno, err, want)
		}
	}
	if err := errors.New("other"); explainVsock(err) != err {
		t.Error("another error was changed")
	}
}
