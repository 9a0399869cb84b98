// SPDX-License-Identifier: Apache-2.0

package docker

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
	e.set(func() { e.slow = map[string]chan struct{}{"/_ping": make(chan struct{})} })
	return e.socket
}

// connectError returns a function that returns why no engine at sockets answers.
func connectError(t *testing.T) func(ctx context.Context, paths ...string) error {
	return func(ctx context.Context, paths ...string) error {
		var hosts []string
		for _, p := range paths {
			hosts = append(hosts, "unix://"+p)
		}
		_, _, err := source(t, nil, Options{Hosts: hosts, Timeout: 50 * time.Millisecond}).connect(ctx)
		return err
	}
}
