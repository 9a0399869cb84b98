// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/source/nat/watch"
)

// maxPending bounds the messages of commits that wait to be applied.
const maxPending = 200_000

// batch is what a stream received at once.
type batch struct {
	from watch.Stream
	msgs []*ruleset.Message
	err  error
}

// streamGoesOn reports whether a stream may be read again after err.
func streamGoesOn(err error) bool {
	return err == nil || errors.Is(err, watch.ErrLost) || errors.Is(err, watch.ErrMany)
}

// commits receives the commits of nftables by the best method that works, and
// sorts their messages. It belongs to the session's goroutine.
type commits struct {
	sys      system
	method   string         // in use
	hookable bool           // the hooks could be attached to when method was chosen
	current  watch.Stream   // nil while the generation is polled
	all      []watch.Stream // that are not closed

	events  chan batch    // what streams received, also those that were replaced
	ended   chan struct{} // closed at the end
	readers sync.WaitGroup

	pending []*ruleset.Message // complete commits, each ending with a MsgNewGen
	partial []*ruleset.Message // a commit that is not complete
}

func newCommits(sys system) *commits {
	return &commits{sys: sys, ended: make(chan struct{}), events: make(chan batch, 64)}
}

func (c *commits) close() {
	close(c.ended)
	for _, st := range c.all {
		_ = st.Close()
	}
	c.readers.Wait()
}

// polled reports whether nothing reports commits, so that the generation is polled.
func (c *commits) polled() bool { return c.method == watch.MethodGeneration }

// covers reports whether a model of generation have lacks no commit up to generation
// gen, which is that of a dump that was just read.
func (c *commits) covers(have, gen uint32) bool {
	if have == gen {
		return true
	}
	if c.current == nil {
		return false
	}
	last, ended, sparse, err := c.current.Reported()
	return err == nil && sparse && ended != 0 && int32(ended-gen) >= 0 && (last == 0 || int32(last-have) <= 0)
}

// use takes the first of the methods that works, and returns why others do not.
func (c *commits) use(methods []string) error {
	c.hookable = c.sys.Hookable()
	var errs []error
	for _, method := range methods {
		if method == watch.MethodGeneration {
			c.method, c.current = method, nil
			break
		}
		st, err := c.sys.Watch(method)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", method, err))
			continue
		}
		c.method, c.current = method, st
		c.start(st)
		break
	}
	return errors.Join(errs...)
}

// improve tries better methods than the current one. If one works the former
// stream is closed and what it delivered is dropped.
func (c *commits) improve(methods []string) (better bool, err error) {
	old, method := c.current, c.method
	err = c.use(methods[:slices.Index(methods, method)])
	if c.method == method {
		return false, err
	}
	if old != nil {
		c.all = slices.DeleteFunc(c.all, func(st watch.Stream) bool { return st == old })
		_ = old.Close()
	}
	c.drop()
	return true, err
}

// start reads a stream until it ends or is closed.
func (c *commits) start(st watch.Stream) {
	c.all = append(c.all, st)
	c.readers.Go(func() {
		for {
			msgs, err := st.Next()
			select {
			case c.events <- batch{st, msgs, err}:
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
