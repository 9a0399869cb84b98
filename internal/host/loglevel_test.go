// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/wire"
)

// levelled is a session with an agent that takes log levels.
type levelled struct{ link.Session }

func (s levelled) Peer() link.Peer {
	p := s.Session.Peer()
	p.LogLevel, p.Version = true, "v2"
	return p
}

func startLevelled(t *testing.T, a *agent) *Host {
	t.Helper()
	a.begins(snapshot(1))
	dial := func(ctx context.Context) (link.Session, error) {
		s, err := a.connect(ctx)
		if err == nil {
			s = levelled{s}
		}
		return s, err
	}
	h, _ := startGuests(t, Options{Guests: []Guest{{Name: "vm", Dial: dial}}})
	eventually(t, "the guest is connected", func() bool { return h.Guests()[0].Connected })
	return h
}

func refusedLevel(t *testing.T, h *Host, guest, want string) {
	t.Helper()
	if err := h.SetLogLevel(t.Context(), guest, "debug", []string{"nat"}, time.Minute); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

func TestLogLevelOfAGuest(t *testing.T) {
	a := newAgent(t, "vm")
	h := startLevelled(t, a)
	done := make(chan error, 1)
	set := func() { done <- h.SetLogLevel(t.Context(), "vm", "debug", []string{"nat"}, time.Minute) }
	go set()
	q := <-a.levels
	if q.Level != "debug" || len(q.Components) != 1 || q.Seconds != 60 {
		t.Errorf("%+v", q)
	}
	a.say(wire.Control{LogLevelSet: &wire.LogLevelSet{Number: q.Number + 9}}) // of no request
	a.say(wire.Control{LogLevelSet: &wire.LogLevelSet{Number: q.Number}}, wire.Control{LogLevelSet: &wire.LogLevelSet{Number: q.Number, Reason: "again"}})
	if err := <-done; err != nil {
		t.Error(err)
	}
	go set()
	a.say(wire.Control{LogLevelSet: wire.NewLogLevelSet((<-a.levels).Number, errors.New("no such component"))})
	if err := <-done; err == nil || !strings.Contains(err.Error(), "its agent refuses: no such component") {
		t.Error(err)
	}
	refusedLevel(t, h, "other", `guest "other": want one of "vm"`)

	go set()
	<-a.levels
	a.drop(errors.New("away"))
	if err := <-done; err == nil || !strings.Contains(err.Error(), "the connection was lost") {
		t.Error(err)
	}
	eventually(t, "the guest is away", func() bool { return !h.Guests()[0].Connected })
	refusedLevel(t, h, "vm", "is not connected")
}

// An agent that never answers costs no more than a few requests.
func TestLogLevelWithoutAnswer(t *testing.T) {
	a := newAgent(t, "vm")
	h := startLevelled(t, a)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("waited"))
	for range maxLevelRequests {
		if err := h.SetLogLevel(ctx, "vm", "debug", nil, time.Minute); err == nil || !strings.Contains(err.Error(), "no answer: waited") {
			t.Error(err)
		}
	}
	refusedLevel(t, h, "vm", "16 requests for a log level wait")
}

func TestLogLevelOfAnOlderAgent(t *testing.T) {
	a := newAgent(t, "vm")
	a.begins(snapshot(1))
	h, _ := start(t, Options{}, a)
	eventually(t, "the guest is connected", func() bool { return h.Guests()[0].Connected })
	refusedLevel(t, h, "vm", "takes no log level from a host: it is older")
	select {
	case q := <-a.levels:
		t.Errorf("%+v was sent", q)
	default:
	}
}
