// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
)

// Unpublished returns a table of the ports that guests do not publish. They are for display: they
// ask for no host address, the policy does not see them, and no flow is requested for them.
func (h *Host) Unpublished() *table.Table[ID, Row] { return h.others }

// applyUnpublished applies a step of the ports that the guest does not publish.
func (g *guest) applyUnpublished(ctx context.Context, s replica.Step[port.Key, port.Fact]) error {
	l := g.lockToOpen()
	defer l.unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	l.denyKept(s.Put)
	l.status.Omitted = s.Omitted
	named := make(map[port.Key]struct{}, len(s.Put))
	g.h.others.Update(func(tx *table.Tx[ID, Row]) {
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

func (g *lockedGuest) removeUnpublished(tx *table.Tx[ID, Row], k port.Key) {
	delete(g.others, k)
	tx.Delete(ID{g.name, k})
}

func (g *lockedGuest) putUnpublished(tx *table.Tx[ID, Row], p port.Fact) {
	id := ID{g.name, p.Key}
	if known, had := g.others[p.Key]; had && known.Equal(p) {
		return
	}
	fact := p // not a part of the step, which is not kept
	g.others[p.Key] = &fact
	row, had := tx.Get(id)
	if !had {
		row = Row{Guest: g.name, Since: time.Now()}
	}
	row.Fact = &fact
	tx.Put(id, row)
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
	g.h.others.Update(func(tx *table.Tx[ID, Row]) {
		for k := range g.others {
			g.removeUnpublished(tx, k)
		}
	})
}
