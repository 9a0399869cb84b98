// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"errors"
	"fmt"

	"github.com/fairlead/fairlead/internal/link"
)

// OpenRun opens a stream to the host that is connected, to ask it for a program.
func (s *Sink) OpenRun(ctx context.Context) (link.Stream, link.Peer, error) {
	s.mu.Lock()
	sess := s.cur
	s.mu.Unlock()
	if sess == nil {
		return nil, link.Peer{}, errors.New("no host is connected")
	}
	p := sess.Peer()
	if !p.Runs {
		return nil, p, fmt.Errorf("host %q (fairlead %s) runs no programs: its run.allow has no entry, or it is too old", p.Name, p.Version)
	}
	st, err := sess.Open(ctx)
	return st, p, err
}
