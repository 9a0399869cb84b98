// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
)

func TestCodeOf(t *testing.T) {
	for _, c := range []struct {
		err    error
		code   string
		remote bool
	}{
		{&link.RefusedError{Code: link.RefusedUID, Remote: true}, "uid", true},
		{fmt.Errorf("dial: %w", &link.RefusedError{Code: link.RefusedUID}), "uid", false},
		{&link.RefusedError{Code: link.RefusedToken, Err: syscall.EACCES}, CodeTokenFile, false},
		{&link.RefusedError{Code: link.RefusedToken}, "token", false},
		{&link.CloseError{Remote: true, Reason: link.ReasonReplaced}, CodeReplaced, true},
		{fmt.Errorf("dial: %w", &net.OpError{Op: "dial", Err: syscall.EACCES}), CodePermission, false},
		{fmt.Errorf("dial: %w", &net.OpError{Op: "dial", Err: syscall.ENODEV}), CodeNoMachine, false},
		{errors.New("connection refused"), "", false},
	} {
		if code, remote := codeOf(c.err); code != c.code || remote != c.remote {
			t.Errorf("%v: %q, %v", c.err, code, remote)
		}
	}
}
