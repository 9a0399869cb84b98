// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// AwaitTCP returns nil when a TCP port with this number appears in the table, at any
// address, or changes there. Ports that are in the table already do not count. It returns
// ctx's error when ctx ends.
func (r *Registry) AwaitTCP(ctx context.Context, number uint16) error {
	pubs := r.publications.Subscribe()
	defer pubs.Close()
	pubs.Take()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-pubs.C():
		}
		view, change := pubs.Take()
		if slices.ContainsFunc(change.Keys, func(k port.Key) bool {
			_, present := view.Get(k)
			return present && k.Protocol == port.TCP && k.Port == number
		}) {
			return nil
		}
	}
}

// AwaitStarted waits until none of the named sources is at work on its first set: each has
// reported it, or failed. It returns when ctx ends, too.
func (r *Registry) AwaitStarted(ctx context.Context, names ...string) {
	changes := r.status.Watch()
	defer changes.Close()
	starting := func(name string) bool {
		s, ok := r.status.View().Get(name)
		return ok && s.State == Starting
	}
	for slices.ContainsFunc(names, starting) && schedule.Wait(ctx, time.Time{}, changes.C()) == nil {
		changes.Take()
	}
	r.Touch() // Ready is closed with the last of them
}
