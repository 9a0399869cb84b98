// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/table"
)

// stalled is a control stream that takes the first message, and whose sender gives up
// meanwhile.
type stalled struct {
	link.Stream
	giveUp  func()
	expired chan struct{} // a deadline that has passed was set
	writes  int
}

func (s *stalled) SetWriteDeadline(at time.Time) error {
	if at.Before(time.Now()) {
		close(s.expired)
	}
	return nil
}

func (s *stalled) Write(b []byte) (int, error) {
	if s.writes++; s.writes == 1 {
		s.giveUp()
		<-s.expired
	}
	return len(b), nil
}

type stalledSession struct {
	link.Session
	stream *stalled
}

func (s stalledSession) Control() link.Stream { return s.stream }

// A message of many parts is not continued when its context was cancelled.
func TestCancelledSendEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	stream := &stalled{giveUp: cancel, expired: make(chan struct{})}
	wanted := table.New[port.Key, port.Publication](port.Key.Compare)
	wanted.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for n := range uint16(2000) {
			k := port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 1 + n}
			owner := port.Owner{Kind: port.OwnerProcess, ID: "1", Name: strings.Repeat("x", 200)}
			tx.Put(k, port.Publication{Key: k, Owner: owner, Decision: port.Decision{Allow: true}})
		}
	})
	o := Options{
		Epoch: "e", Lookup: wanted.View().Get, Serve: nil, Logger: slog.New(slog.DiscardHandler), maxPublications: 10_000,
	}
	c := newSession(stalledSession{stream: stream}, new(counters), o, schedule.NewSignal())
	err := c.send(ctx, wanted.View(), reconcile.Change{}, make(port.Outcomes))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("send = %v, want that it was cancelled", err)
	}
	if stream.writes != 1 {
		t.Errorf("%d writes, want none after the first", stream.writes)
	}
}
