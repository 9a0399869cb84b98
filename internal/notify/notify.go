// SPDX-License-Identifier: Apache-2.0

// Package notify shows notifications on the desktop: of ports that opened, or that another
// program has. What comes fast is put together, and nothing waits for the desktop.
package notify

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	gather   = 300 * time.Millisecond // changes that follow the first within it are told with it
	pause    = 10 * time.Second       // between two notifications
	limit    = 10 * time.Second       // for one to be shown
	maxKept  = 256                    // changes that wait
	maxNamed = 4                      // changes that one notification names
	maxText  = 160                    // characters that one change has
)

// Kind is what happened to a port.
type Kind uint8

// The kinds.
const (
	Opened   Kind = iota
	Conflict      // another program has the host port
)

// Change is a port that opened, or could not be.
type Change struct {
	Kind Kind
	Text string // for people; names in it come from a guest
}

// Notifier tells of changes. Create it with New; Run does the work.
type Notifier struct {
	show   func(ctx context.Context, title, text string) error
	failed func(error)
	wake   schedule.Signal

	mu      sync.Mutex
	changes map[string]Change // by what is told of, which is told of once
	order   []string          // keys of changes
	more    int               // changes that were not kept
}

// New returns a notifier that shows notifications by show, such as Show. Failed is called with
// errors of show, in Run.
func New(show func(ctx context.Context, title, text string) error, failed func(error)) *Notifier {
	return &Notifier{show: show, failed: failed, wake: schedule.NewSignal(), changes: make(map[string]Change)}
}

// Tell has a change shown soon, in place of an earlier one with this key that was not. It does
// not wait.
func (n *Notifier) Tell(key string, c Change) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, had := n.changes[key]
	switch {
	case !had && len(n.changes) >= maxKept:
		n.more++
	case !had:
		n.order = append(n.order, key)
		fallthrough
	default:
		n.changes[key] = c
	}
	n.wake.Notify()
}

// Forget takes back a change that was not shown yet: it is over.
func (n *Notifier) Forget(key string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, had := n.changes[key]; had {
		delete(n.changes, key)
		n.order = without(n.order, key)
	}
}

func without(list []string, key string) []string {
	for i, k := range list {
		if k == key {
			return append(list[:i:i], list[i+1:]...)
		}
	}
	return list
}

// Run shows what is told until ctx ends.
func (n *Notifier) Run(ctx context.Context) {
	for schedule.Wait(ctx, time.Time{}, n.wake) == nil && schedule.Sleep(ctx, gather) == nil {
		list, more := n.take()
		if len(list) == 0 {
			continue
		}
		title, text := describe(list, more)
		within, cancel := context.WithTimeout(ctx, limit)
		err := n.show(within, title, text)
		cancel()
		if err != nil && ctx.Err() == nil {
			n.failed(err)
		}
		if schedule.Sleep(ctx, pause) != nil {
			return
		}
	}
}

// take returns what is to be shown now.
func (n *Notifier) take() (list []Change, more int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, key := range n.order {
		list = append(list, n.changes[key])
	}
	more = n.more
	clear(n.changes)
	n.order, n.more = nil, 0
	return list, more
}

// describe returns one notification of all changes, and of more that are not known.
func describe(list []Change, more int) (title, text string) {
	var counts [2]int
	for _, c := range list {
		counts[c.Kind]++
	}
	var parts []string
	for kind, what := range [...][2]string{Opened: {"port opened", "ports opened"}, Conflict: {"port is in use", "ports are in use"}} {
		switch n := counts[kind]; {
		case n == 1:
			parts = append(parts, "a "+what[0])
		case n > 1:
			parts = append(parts, fmt.Sprintf("%d %s", n, what[1]))
		}
	}
	var lines []string
	for _, c := range list[:min(len(list), maxNamed)] {
		lines = append(lines, plain(c.Text))
	}
	if rest := len(list) - maxNamed + more; rest > 0 && len(list) >= maxNamed {
		lines = append(lines, fmt.Sprintf("and %d more: fairlead ls", rest))
	}
	return "fairlead: " + strings.Join(parts, ", "), strings.Join(lines, "\n")
}

// plain makes a text with names from a guest safe for a desktop, which may read markup or
// escapes in it: characters that begin these are replaced by others that look alike, what is
// not printed by a question mark, and the end of a long text is cut.
func plain(s string) string {
	var b strings.Builder
	n := 0
	for _, r := range s {
		if n++; n > maxText {
			b.WriteRune('…')
			break
		}
		switch {
		case r == '<':
			r = '‹'
		case r == '>':
			r = '›'
		case r == '&':
			r = '＆'
		case r == '\\':
			r = '＼'
		case !unicode.IsPrint(r) || r == unicode.ReplacementChar:
			r = '?'
		}
		b.WriteRune(r)
	}
	return cmp.Or(b.String(), "?")
}
