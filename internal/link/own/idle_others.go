// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package own

import (
	"context"
	"errors"
	"syscall"
)

// waiter is for systems with epoll.
type waiter struct{}

func (*waiter) start(context.Context, func(func())) bool { return false }

func (*waiter) wait(uint64, syscall.RawConn, func()) (uint64, error) { return 0, errors.ErrUnsupported }

func (*waiter) forget(uint64) {}
