// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func TestBook(t *testing.T) {
	b := NewBook(2)
	cause := errors.New("denied")
	ctx1, one := b.Begin(t.Context(), tcpKey(1))
	ctx2, two := b.Begin(t.Context(), tcpKey(1))
	ctx3, three := b.Begin(t.Context(), udpKey(1))
	if _, f := b.Begin(t.Context(), tcpKey(2)); f != nil {
		t.Error("a third TCP flow was let in, limit 2")
	}
	if b.Len() != 3 || b.Open(port.TCP) != 2 || b.Open(port.UDP) != 1 {
		t.Errorf("%d open, %d TCP, %d UDP", b.Len(), b.Open(port.TCP), b.Open(port.UDP))
	}
	b.Reset(cause, tcpKey(1), tcpKey(9))
	if context.Cause(ctx1) != cause || context.Cause(ctx2) != cause || ctx3.Err() != nil {
		t.Errorf("after Reset: %v, %v, %v", context.Cause(ctx1), context.Cause(ctx2), ctx3.Err())
	}
	for _, f := range []*Flow{one, two, two, three} {
		f.End()
	}
	if ctx3.Err() == nil || b.Len() != 0 || len(b.flows) != 0 {
		t.Errorf("after End: %v, %d open, %d publications", ctx3.Err(), b.Len(), len(b.flows))
	}
	if _, f := b.Begin(t.Context(), tcpKey(2)); f == nil {
		t.Error("no room after all ended")
	} else {
		f.End()
	}
}

func TestResetOutside(t *testing.T) {
	b, k := NewBook(10), port.Key{Protocol: port.TCP, Port: 80}
	inside, f := b.Begin(t.Context(), k)
	defer f.End()
	outside, f := b.Begin(t.Context(), k)
	defer f.End()
	f.Outside(false)
	other, f := b.Begin(t.Context(), port.Key{Protocol: port.TCP, Port: 81})
	defer f.End()
	f.Outside(false)
	cause := errors.New("closed")
	b.ResetOutside(cause, k)
	if inside.Err() != nil || other.Err() != nil || !errors.Is(context.Cause(outside), cause) {
		t.Errorf("%v, %v, %v", inside.Err(), other.Err(), context.Cause(outside))
	}
}

func TestResetExposed(t *testing.T) {
	b := NewBook(10)
	flow := func(k port.Key, exposed bool) context.Context {
		ctx, f := b.Begin(t.Context(), k)
		t.Cleanup(f.End)
		f.Outside(exposed)
		return ctx
	}
	over, lasting := tcpKey(80), tcpKey(81)
	ended, asked, kept := flow(over, true), flow(over, false), flow(lasting, true)
	cause := errors.New("closed")
	b.ResetExposed(cause, func(k port.Key) bool { return k == lasting })
	if asked.Err() != nil || kept.Err() != nil || !errors.Is(context.Cause(ended), cause) {
		t.Errorf("%v, %v, %v", asked.Err(), kept.Err(), context.Cause(ended))
	}
}
