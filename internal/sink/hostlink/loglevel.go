// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/wire"
)

const (
	maxLevels  = 16                     // requests of a host for a log level that wait
	levelPause = 100 * time.Millisecond // between two of them: each is logged
)

// askLevel has a log level set by setLogLevels, which may wait for the host to read.
func (c *session) askLevel(l wire.LogLevel) error {
	select {
	case c.levels <- l:
		return nil
	default:
		return fmt.Errorf("%w: asks for log levels too often", wire.ErrMalformed)
	}
}

// setLogLevels sets the levels that the host asks for, and answers, until the session ends.
func (s *Sink) setLogLevels(ctx context.Context, c *session) {
	for {
		select {
		case <-ctx.Done():
			return
		case l := <-c.levels:
			err := errors.New("this agent takes no log level from a host")
			if s.o.SetLogLevel != nil {
				err = s.o.SetLogLevel(l.Level, l.Components, time.Duration(l.Seconds)*time.Second)
			}
			if err := c.write(ctx, []wire.Control{{LogLevelSet: wire.NewLogLevelSet(l.Number, err)}}); err != nil {
				_ = c.CloseWith(link.ReasonSilent) // a part of the answer may have been sent
				return
			}
		}
		if schedule.Sleep(ctx, levelPause) != nil {
			return
		}
	}
}
