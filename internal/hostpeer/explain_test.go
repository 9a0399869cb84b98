// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"context"
	"errors"
	"testing"

	"github.com/fairlead/fairlead/internal/diagnose/explain"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/wire"
)

// Only the guest says that a server is silent: a guest or a link that hangs has tried nothing.
func TestAnswerOfADial(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	replied := func(s wire.FlowStatus) error { return &host.FlowError{FlowReply: wire.FlowReply{Status: s}} }
	for _, c := range []struct {
		name string
		ctx  context.Context
		err  error
		want explain.Answer
	}{
		{"answers", t.Context(), nil, explain.Answers},
		{"refuses", t.Context(), replied(wire.FlowRefused), explain.Refuses},
		{"silent", t.Context(), replied(wire.FlowUnreachable), explain.Silent},
		{"silent, late", ended, replied(wire.FlowUnreachable), explain.Silent},
		{"the guest hangs", ended, context.DeadlineExceeded, explain.NotTried},
		{"no guest", t.Context(), errors.New("not connected"), explain.NotTried},
	} {
		if got := answer(c.ctx, c.err); got.Answer != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
