// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"slices"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/guest/agent/selftest"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/source/socket"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
)

// SelfTest tries whether the events arrive that an agent with that configuration would
// observe. It does so beside a running agent, which sees nothing of it: it fails where it
// may not make a network namespace. Then it compares the rows of the agent at the control
// socket, unless that is empty, with those of an agent that starts now.
func SelfTest(ctx context.Context, cfg config.Agent, control string) doctor.SelfTest {
	a := &Agent{cfg: cfg, log: slog.New(slog.DiscardHandler)}
	var o selftest.Options
	if mode, err := observer.ParseMode(cfg.Observer); err == nil && slices.Contains(cfg.Sources, socket.Name) {
		sockets := a.observerOptions(mode)
		o.Sockets = &sockets
	}
	if slices.Contains(cfg.Sources, port.SourceNAT) {
		rules := a.natOptions()
		o.NAT = &rules
	}
	result := selftest.Run(ctx, o)
	if control != "" && result.Error == "" {
		compared := Compare(ctx, cfg, status.NewClient(control))
		result.Compared = &compared
	}
	return result
}
