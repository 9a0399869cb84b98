// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
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
