// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/replica"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/wire"
)

// Unpublished is a port of a guest that the guest does not publish. It is for display: it
// asks for no host address, the policy does not see it, and no flow is requested for it.
// All text comes from the guest.
type Unpublished struct {
	ID
	Rule    port.RuleRef
	Reason  port.Reason
	Owner   port.Owner // without labels
	Source  string
	Demands []string  // by which it was asked for, see port.Demand
	Since   time.Time // when the host first received it
}

// Unpublished returns a table of the ports that guests do not publish.
func (h *Host) Unpublished() *table.Table[ID, Unpublished] { return h.others }

// applyUnpublished applies a step of the ports that the guest does not publish.
func (g *guest) applyUnpublished(ctx context.Context, s replica.Step[port.Key, wire.UnpublishedPort]) error {
	l := g.lockToOpen()
	defer l.unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	l.denyKept(s.Put)
	l.status.Omitted = s.Omitted
	named := make(map[port.Key]struct{}, len(s.Put))
	g.h.others.Update(func(tx *table.Tx[ID, Unpublished]) {
		for _, k := range s.Removed {
			l.removeUnpublished(tx, k)
		}
		for _, p := range s.Put {
			named[p.Key] = struct{}{}
			l.putUnpublished(tx, p)
		}
		for k := range l.others {
			if _, ok := named[k]; s.Whole && !ok {
				l.removeUnpublished(tx, k)
			}
		}
	})
	if n := len(l.others); n > wire.MaxUnpublished {
		return fmt.Errorf("%w: %d ports that are not published, at most %d", errProtocol, n, wire.MaxUnpublished)
	}
	return nil
}

func (g *lockedGuest) removeUnpublished(tx *table.Tx[ID, Unpublished], k port.Key) {
	delete(g.others, k)
	tx.Delete(ID{g.name, k})
}

func (g *lockedGuest) putUnpublished(tx *table.Tx[ID, Unpublished], p wire.UnpublishedPort) {
	id := ID{g.name, p.Key}
	if known, had := g.others[p.Key]; had && known.Equal(p) {
		return
	}
	g.others[p.Key] = p
	old, had := tx.Get(id)
	since := old.Since
	if !had {
		since = time.Now()
	}
	tx.Put(id, Unpublished{
		ID: id, Rule: p.Rule, Reason: p.Reason.Reason, Owner: p.Owner, Source: p.Source,
		Demands: p.Demands, Since: since,
	})
}

// applyUnread applies a step of the NAT rules that the guest does not understand.
func (g *guest) applyUnread(s replica.Step[wire.Unread, wire.Unread]) error {
	l := g.lock()
	defer l.unlock()
	list := slices.Clone(l.status.Unread) // others have the old one
	if s.Whole {
		list = nil
	}
	list = slices.DeleteFunc(list, func(r wire.Unread) bool { return slices.Contains(s.Removed, r) })
	list = append(list, s.Put...)
	slices.SortFunc(list, wire.Unread.Compare)
	l.status.Unread = slices.Compact(list)
	if n := len(l.status.Unread); n > wire.MaxUnread {
		return fmt.Errorf("%w: %d NAT rules, at most %d", errProtocol, n, wire.MaxUnread)
	}
	return nil
}

// dropUnpublished forgets what the guest said of ports that it does not publish.
func (g *lockedGuest) dropUnpublished() {
	g.status.Unread, g.status.Omitted = nil, 0
	if len(g.others) == 0 {
		return
	}
	g.h.others.Update(func(tx *table.Tx[ID, Unpublished]) {
		for k := range g.others {
			g.removeUnpublished(tx, k)
		}
	})
}
