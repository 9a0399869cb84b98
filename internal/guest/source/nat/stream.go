// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"errors"
	"fmt"
	"sync"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
)

// maxPending bounds the messages of commits that wait to be applied.
const maxPending = 200_000

// batch is what a stream received at once.
type batch struct {
	msgs []*ruleset.Message
	err  error
}

// streamGoesOn reports whether a stream may be read again after err.
func streamGoesOn(err error) bool { return err == nil || errors.Is(err, watch.ErrLost) }

// commits receives the commits of nftables by the best method that works, and
// sorts their messages. It belongs to the session's goroutine.
type commits struct {
	sys     system
	method  string       // in use
	current watch.Stream // nil while the generation is polled

	events chan batch    // what the stream received
	ended  chan struct{} // closed at the end
	reader sync.WaitGroup

	pending []*ruleset.Message // complete commits, each ending with a MsgNewGen
	partial []*ruleset.Message // a commit that is not complete
}

func newCommits(sys system) *commits {
	return &commits{sys: sys, ended: make(chan struct{}), events: make(chan batch, 64)}
}

func (c *commits) close() {
	close(c.ended)
	if c.current != nil {
		_ = c.current.Close()
	}
	c.reader.Wait()
}

// polled reports whether nothing reports commits, so that the generation is polled.
func (c *commits) polled() bool { return c.method == watch.MethodGeneration }

// filtered reports whether commits that do not concern NAT are left out.
func (c *commits) filtered() bool { return c.current != nil && c.current.Filtered() }

// covers reports whether a model of generation have lacks no commit up to generation
// gen, which is that of a dump that was just read. So all its commits were notified.
func (c *commits) covers(have, gen uint32) bool {
	if have == gen || !c.filtered() {
		return have == gen
	}
	last, err := c.current.Passed()
	return err == nil && (last == 0 || int32(last-have) <= 0)
}

// use takes the first of the methods that works, and returns why others do not.
func (c *commits) use(methods []string) error {
	var failed error
	for _, method := range methods {
		if method == watch.MethodGeneration {
			c.method = method
			break
		}
		st, err := c.sys.Watch()
		if err == nil {
			c.method, c.current = method, st
			c.start(st)
			break
		}
		failed = fmt.Errorf("%s: %w", method, err)
	}
	return failed
}

// start reads a stream until it ends or is closed.
func (c *commits) start(st watch.Stream) {
	c.reader.Go(func() {
		for {
			msgs, err := st.Next()
			select {
			case c.events <- batch{msgs, err}:
			case <-c.ended:
				return
			}
			if !streamGoesOn(err) {
				return
			}
		}
	})
}

// add sorts received messages into complete commits.
func (c *commits) add(msgs []*ruleset.Message) error {
	for _, m := range msgs {
		c.partial = append(c.partial, m)
		if m.Type == ruleset.MsgNewGen {
			c.pending = append(c.pending, c.partial...)
			c.partial = emptied(c.partial)
		}
	}
	if len(c.pending)+len(c.partial) > maxPending {
		return watch.ErrLost
	}
	return nil
}

// drop forgets all messages.
func (c *commits) drop() { c.pending, c.partial = nil, nil }

// applied forgets the complete commits.
func (c *commits) applied() { c.pending = emptied(c.pending) }

// emptied returns msgs without its messages, and with its room unless that is much.
func emptied(msgs []*ruleset.Message) []*ruleset.Message {
	if cap(msgs) > 4096 {
		return nil
	}
	clear(msgs)
	return msgs[:0]
}

// after returns the pending messages of commits after generation gen.
func (c *commits) after(gen uint32) []*ruleset.Message {
	from := 0
	for i, m := range c.pending {
		if m.Type == ruleset.MsgNewGen {
			if int32(m.Generation-gen) > 0 {
				break
			}
			from = i + 1
		}
	}
	return c.pending[from:]
}
