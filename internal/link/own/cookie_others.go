// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package own

import (
	"errors"
	"syscall"
)

func cookieOf(syscall.RawConn) (uint64, error) { return 0, errors.ErrUnsupported }
