// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"cmp"
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
)

// Check reports whether a receiver would accept r.
func (r Unread) Check() error {
	return cmp.Or(port.CheckText("place", r.Where, port.MaxReason), port.CheckText("text", r.Rule, port.MaxReason), port.CheckText("reason", r.Reason, port.MaxReason))
}

func (q FlowRequest) check() error {
	if err := q.Key.Check(); err != nil {
		return err
	}
	for _, a := range [...]netip.AddrPort{q.Peer, q.At} {
		if a == (netip.AddrPort{}) {
			continue
		}
		if err := port.CheckAddr(a.Addr()); err != nil {
			return err
		}
	}
	return nil
}

func (p FlowReply) check() error {
	switch p.Status {
	case FlowOK, FlowRefused, FlowForbidden, FlowUnreachable:
		return port.CheckText("reason", p.Reason, port.MaxReason)
	}
	return malformed("unknown status %q", string(p.Status))
}
