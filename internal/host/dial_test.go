// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
)

// parent is a context that counts what waits for its end.
type parent struct {
	context.Context //nolint:containedctx // it is a context
	children        atomic.Int64
}

func (p *parent) Done() <-chan struct{} { return make(chan struct{}) }

// AfterFunc is called by package context for each child that can be canceled.
func (p *parent) AfterFunc(func()) func() bool {
	p.children.Add(1)
	return func() bool { return p.children.Add(-1) >= 0 }
}

// An attempt at a session leaves no context behind, whichever side dials.
func TestFailedDialLeaksNoContext(t *testing.T) {
	for _, dials := range []bool{false, true} {
		g := newGuest(idle(t, Options{}), Guest{Name: "vm", Dials: dials, Dial: func(ctx context.Context) (link.Session, error) {
			return nil, errors.New("unreachable")
		}})
		ctx := &parent{Context: context.Background()}
		for range 3 {
			if _, _, err := g.session(ctx); err == nil {
				t.Fatal("connected")
			}
		}
		if n := ctx.children.Load(); n != 0 {
			t.Errorf("guest dials: %v: %d contexts are left", dials, n)
		}
	}
}
