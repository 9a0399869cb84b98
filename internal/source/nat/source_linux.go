// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"fmt"
	"os"
	"sync"

	"github.com/fairlead/fairlead/internal/netwatch"
	"github.com/fairlead/fairlead/internal/registry"
)

// Run keeps feed equal to the ruleset until ctx ends, and returns nil then. It
// owns every goroutine that it starts. Failures are told to feed and tried
// again; what was published stays.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	return s.runWith(ctx, feed, func() (system, func(), error) { return s.open(ctx) })
}

// open makes the kernel ready for a session; the function that it returns ends that.
func (s *Source) open(ctx context.Context) (system, func(), error) {
	k := &kernel{path: s.opt.NetNS, types: s.opt.Types}
	if s.opt.NetNS != "" {
		f, err := os.Open(s.opt.NetNS)
		if err != nil {
			return nil, nil, fmt.Errorf("network namespace: %w", err)
		}
		k.netns = f
	}
	k.net = netwatch.New(netwatch.Options{Log: s.log, NetNS: s.opt.NetNS, Parts: netwatch.Links | netwatch.Routes})
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { k.net.Run(ctx) })
	return k, func() {
		cancel()
		watching.Wait()
		k.close()
		if k.netns != nil {
			_ = k.netns.Close()
		}
	}, nil
}
