// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

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
	_ = d.ports.Changes(ctx, newTeller(n, d.host.Guests).take) // take does not fail
}

// teller tells a notifier of what opens, and of what is in conflict.
type teller struct {
	n      *notify.Notifier
	guests func() []host.GuestStatus
	ports  map[host.ID]told
}

// told is what was told of a port.
type told struct {
	state port.State
	early bool // it was there when its guest connected, and is pending since
}

func newTeller(n *notify.Notifier, guests func() []host.GuestStatus) *teller {
	return &teller{n: n, guests: guests, ports: make(map[host.ID]told)}
}

// take takes a change of the table. What a guest has when it connects did not open now.
func (t *teller) take(d status.Delta) error {
	for _, r := range d.Removed {
		if id := (host.ID{Guest: r.Guest, Key: r.Key}); !r.Unpublished {
			delete(t.ports, id)
			t.n.Forget(keyOf(id))
		}
	}
	var connected map[string]time.Time
	for _, p := range d.Put {
		id := host.ID{Guest: p.Guest, Key: p.Key()}
		old, had := t.ports[id]
		if p.Unpublished || had && old.state == p.State {
			continue
		}
		if !had {
			if connected == nil {
				connected = t.connected()
			}
			at, ok := connected[p.Guest]
			old.early = !ok || !p.Since.After(at)
		}
		t.ports[id] = told{p.State, old.early && p.State == port.Pending}
		switch {
		case p.State != port.Active && p.State != port.Conflict:
			t.n.Forget(keyOf(id))
		case !old.early:
			t.n.Tell(keyOf(id), changeOf(p))
		}
	}
	return nil
}

// connected returns since when guests are connected. A guest is not yet while its first ports
// are read.
func (t *teller) connected() map[string]time.Time {
	list := make(map[string]time.Time)
	for _, g := range t.guests() {
		if g.Connected {
			list[g.Name] = g.Since
		}
	}
	return list
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
