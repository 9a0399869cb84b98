// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"maps"
	"time"

	"github.com/fairlead/fairlead/internal/port"
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

// applyUnpublished applies a message of the guest. Ports beyond the limit are ignored;
// stale ports do not count, so there are at most twice as many.
func (g *guest) applyUnpublished(ctx context.Context, m *wire.Unpublished) {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	g.denyKept(ctx, m)
	g.omitted = m.Omitted
	if m.Unread != nil {
		g.unread = (*m.Unread)[:min(len(*m.Unread), wire.MaxUnread)]
	}
	if m.Reset {
		g.stale = maps.Clone(g.others)
	}
	g.h.others.Update(func(tx *table.Tx[ID, Unpublished]) {
		for _, k := range m.Removed {
			g.removeUnpublished(tx, k)
		}
		for _, p := range m.Put {
			g.putUnpublished(tx, p)
		}
		if !m.More {
			for k := range g.stale {
				g.removeUnpublished(tx, k)
			}
			g.stale = nil
		}
	})
}

func (g *guest) removeUnpublished(tx *table.Tx[ID, Unpublished], k port.Key) {
	delete(g.others, k)
	delete(g.stale, k)
	tx.Delete(ID{g.name, k})
}

func (g *guest) putUnpublished(tx *table.Tx[ID, Unpublished], p wire.UnpublishedPort) {
	id := ID{g.name, p.Key}
	known, had := g.others[p.Key]
	_, stale := g.stale[p.Key]
	if (!had || stale) && len(g.others)-len(g.stale) >= wire.MaxUnpublished {
		return
	}
	delete(g.stale, p.Key)
	if had && known.Equal(p) {
		return
	}
	if !had && len(g.others) >= 2*wire.MaxUnpublished {
		g.removeOneStale(tx)
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

// removeOneStale makes room: a guest may begin one report after the other and end none.
func (g *guest) removeOneStale(tx *table.Tx[ID, Unpublished]) {
	for k := range g.stale {
		g.removeUnpublished(tx, k)
		return
	}
}

// forgetUnpublished forgets all unpublished ports of the guest.
func (g *guest) forgetUnpublished() {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	g.dropUnpublished()
}

// dropUnpublished is forgetUnpublished with h.mu held.
func (g *guest) dropUnpublished() {
	g.unread, g.omitted, g.stale = nil, 0, nil
	if len(g.others) == 0 {
		return
	}
	g.h.others.Update(func(tx *table.Tx[ID, Unpublished]) {
		for k := range g.others {
			g.removeUnpublished(tx, k)
		}
	})
}
