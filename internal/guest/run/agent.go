// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// askTimeout bounds how long an agent's answer is waited for.
const askTimeout = 5 * time.Second

// errNoAgent is what a client is told: the log says more.
var errNoAgent = peer.Refuse(peer.ReasonAgent, "it cannot be asked whose this process is: the log of fairlead-run says why")

// AskAgent returns a function that asks the agent at a control socket for the container of a
// process, by its cgroups. It asks one question at a time, so that clients cannot keep the
// agent from others.
func AskAgent(control string, log *slog.Logger) func(ctx context.Context, cgroups []string) (port.Owner, error) {
	client := status.NewClient(control)
	free := make(chan struct{}, 1)
	told := rate.Sometimes{Interval: 10 * time.Second}
	return func(ctx context.Context, cgroups []string) (port.Owner, error) {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		select {
		case free <- struct{}{}:
			defer func() { <-free }()
		case <-ctx.Done():
			return port.Owner{}, errNoAgent
		}
		owner, err := client.Whois(ctx, cgroups)
		if _, ok := errors.AsType[status.NoContainer](err); err == nil || ok {
			return owner, err
		}
		told.Do(func() { log.Warn("the agent cannot be asked", "err", err) })
		return owner, errNoAgent
	}
}
