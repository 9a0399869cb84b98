// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package gather collects the facts that packages explain and doctor judge: from
// the agent's tables, from the kernel and from the machine.
package gather

import (
	"context"
	"net"
	"net/netip"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// Agent is what a diagnosis reads of an agent. Outcomes, Rules and Forwards are needed
// by Explainer only.
type Agent struct {
	Registry  *registry.Registry
	Outcomes  *table.Table[port.Key, reconcile.Outcomes]
	Rules     func() *rules.Set
	RulesFile string          // the file to add a rule to
	Forwards  *forwards.Store // the run-time rules
	Sockets   *own.Sockets
	Observer  *observer.Observer

	// Unread returns NAT rules that are not understood, and how many there are.
	Unread func() (list []explain.Unread, all int)
	// Refused returns the last host that was refused, nil if a host is connected or
	// none was refused.
	Refused func() *explain.Refusal
	// Container returns the container of a cgroup's path.
	Container func(path string) (port.Owner, bool)
	// Dial connects to a target of a publication. Nil means forward.DialGuest.
	Dial func(ctx context.Context, network string, target netip.AddrPort) (net.Conn, error)
}

// socketSource is the name of the source of sockets.
const socketSource = "socket"
