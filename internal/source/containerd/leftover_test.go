// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"context"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/engine"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
)

func TestRefusedAddresses(t *testing.T) {
	enginetest.RefusedAddresses(t, hanging(t), engine.ErrAbsent, engine.ErrRefused, connectError(t))
}

func TestConnectionIsTraced(t *testing.T) {
	enginetest.ConnectionIsTraced(t, hanging(t), connectError(t))
}

// hanging returns the socket of an engine that does not answer.
func hanging(t *testing.T) string {
	e := newFake(t)
	e.hang["Version"] = true
	return e.socket
}

// connectError returns a function that returns why no engine at sockets answers.
func connectError(t *testing.T) func(ctx context.Context, paths ...string) error {
	return func(ctx context.Context, paths ...string) error {
		return source(t, nil, Options{Sockets: paths, Timeout: 50 * time.Millisecond}).session(ctx, nil, nil)
	}
}
