// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"slices"

	"github.com/fairlead/fairlead/internal/agent/selftest"
	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/diagnose/doctor"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/socket"
)

// selfTest tries whether the events of sockets and NAT rules arrive, and logs and keeps the
// result. It is done with capabilities that are dropped afterwards.
func (a *Agent) selfTest(ctx context.Context) {
	r := selftest.Run(ctx, a.selfTestOptions())
	a.selfTested.Store(&r)
	a.tried.Notify()
	a.served.Notify()
	if ctx.Err() == nil {
		a.logSelfTest(r)
	}
}

// SelfTest tries whether the events arrive that an agent with that configuration would
// observe. It does so beside a running agent, which sees nothing of it: it fails where it
// may not make a network namespace.
func SelfTest(ctx context.Context, cfg config.Agent) doctor.SelfTest {
	a := &Agent{cfg: cfg, log: slog.New(slog.DiscardHandler), sockets: new(own.Sockets)}
	o := a.selfTestOptions()
	o.Apart = true
	return selftest.Run(ctx, o)
}

// selfTestOptions are those of the configuration.
func (a *Agent) selfTestOptions() selftest.Options {
	o := selftest.Options{Own: a.sockets}
	if mode, err := observer.ParseMode(a.cfg.Observer); err == nil && slices.Contains(a.cfg.Sources, socket.Name) {
		sockets := a.observerOptions(mode)
		o.Sockets = &sockets
	}
	if slices.Contains(a.cfg.Sources, port.SourceNAT) {
		rules := a.natOptions()
		o.NAT = &rules
	}
	return o
}

// logSelfTest logs the result: one line, and one for each failure.
func (a *Agent) logSelfTest(r doctor.SelfTest) {
	for _, s := range r.Failures() {
		a.log.Warn("self-test failed", "step", s.Name, "method", s.Method, "err", s.Error, "remedy", s.Remedy)
	}
	a.log.Info("self-test ended", "events", r.Summary(), "limited", r.Shared)
}
