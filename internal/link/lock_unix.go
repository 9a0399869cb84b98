// SPDX-License-Identifier: Apache-2.0

//go:build linux || darwin

package link

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

// lockDir keeps other processes of ours from claiming a socket in dir at the
// same time. It leaves no file behind.
func lockDir(ctx context.Context, dir string) (unlock func() error, err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for range 100 {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f.Close, nil // closing gives the lock back
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			break
		}
		if err := schedule.Sleep(ctx, 10*time.Millisecond); err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
	return nil, errors.Join(fmt.Errorf("lock directory %s: %w", dir, err), f.Close())
}
