// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"context"
	"errors"
	"testing"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// Only the guest says that a server is silent: a guest or a link that hangs has tried nothing.
func TestAnswerOfADial(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	replied := func(s wire.FlowStatus) error { return &host.FlowError{FlowReply: wire.FlowReply{Status: s}} }
	for _, c := range []struct {
		name string
		late bool // the time is over
		err  error
		want explain.Answer
	}{
		{"answers", false, nil, explain.Answers},
		{"refuses", false, replied(wire.FlowRefused), explain.Refuses},
		{"silent", false, replied(wire.FlowUnreachable), explain.Silent},
		{"silent, late", true, replied(wire.FlowUnreachable), explain.Silent},
		{"the guest hangs", true, context.DeadlineExceeded, explain.NotTried},
		{"no guest", false, errors.New("not connected"), explain.NotTried},
	} {
		ctx := t.Context()
		if c.late {
			ctx = ended
		}
		if got := answer(ctx, c.err); got.Answer != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
