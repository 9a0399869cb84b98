// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
)

// Run keeps feed equal to the ruleset until ctx ends, and returns nil then. It
// owns every goroutine that it starts. Failures are reported to feed and tried
// again; what was published remains.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	return s.runWith(ctx, feed, s.open)
}

// open opens the kernel for a session; the function that it returns closes it.
func (s *Source) open() (system, func(), error) {
	k, err := watch.Open(s.log, s.opt.NetNS, s.opt.Filter, s.opt.ReceiveBuffer)
	if err != nil {
		return nil, nil, err
	}
	return k, k.Close, nil
}
