// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"cmp"
	"context"
	"fmt"
	"sync"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/notify"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// notify shows notifications of ports that open, or cannot, until ctx ends. Nothing else
// waits for the desktop.
func (d *Daemon) notify(ctx context.Context) {
	if err := notify.Available(); err != nil {
		d.log.Warn("notifications cannot be shown", "err", err)
		return
	}
	n := notify.New(notify.Show, func(err error) {
		d.log.Warn("a notification was not shown", "err", err, "next", "run `fairlead host` in the session of a desktop, or without --notify")
	})
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { n.Run(ctx) })
	_ = d.ports.Changes(ctx, newTeller(n).take) // take does not fail
}

// teller tells a notifier of what opens, and of what is in conflict.
type teller struct {
	n      *notify.Notifier
	states map[host.ID]port.State // of what was told, or was there at first; nil before that
}

func newTeller(n *notify.Notifier) *teller { return &teller{n: n} }

// take takes a change of the table. What is there at first is none.
func (t *teller) take(d status.Delta) error {
	first := t.states == nil
	if first {
		t.states = make(map[host.ID]port.State)
	}
	for _, r := range d.Removed {
		if id := (host.ID{Guest: r.Guest, Key: r.Key}); !r.Unpublished {
			delete(t.states, id)
			t.n.Forget(keyOf(id))
		}
	}
	for _, p := range d.Put {
		id := host.ID{Guest: p.Guest, Key: p.Key()}
		told, had := t.states[id]
		switch {
		case p.Unpublished || had && told == p.State:
		case p.State != port.Active && p.State != port.Conflict:
			delete(t.states, id)
			t.n.Forget(keyOf(id))
		default:
			t.states[id] = p.State
			if !first {
				t.n.Tell(keyOf(id), changeOf(p))
			}
		}
	}
	return nil
}

func keyOf(id host.ID) string { return id.Guest + " " + id.Key.String() }

// changeOf describes a port that is active or in conflict.
func changeOf(p status.Publication) notify.Change {
	text := p.Key().Slot().String()
	if name := cmp.Or(p.Owner.Name, p.Owner.ID); name != "" {
		text += " of " + name
	}
	if p.GuestName != "" {
		text += " (" + p.GuestName + ")"
	}
	if p.State == port.Conflict {
		return notify.Change{Kind: notify.Conflict, Text: text + ": " + p.Reason}
	}
	if len(p.HostAddresses) > 0 {
		text += fmt.Sprintf(" at %s", p.HostAddresses[0])
	}
	return notify.Change{Kind: notify.Opened, Text: text}
}
