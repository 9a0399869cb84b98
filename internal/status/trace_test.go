// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestTraceOverTheControlSocket(t *testing.T) {
	hub := new(trace.Hub)
	s := NewServer(Options{Trace: hub, Logger: slog.New(slog.DiscardHandler)})
	path := filepath.Join(t.TempDir(), "d", "s")
	ln, err := ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	run(t, func(ctx context.Context) { _ = s.Serve(ctx, ln, true) })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	begun, ended := make(chan struct{}), make(chan error, 1)
	events := make(chan trace.Event, 10)
	go func() {
		ended <- NewClient(path).Trace(ctx, trace.Filter{Port: 80, Protocol: port.TCP, Hex: 2}, func() { close(begun) }, func(e trace.Event) error {
			events <- e
			return nil
		})
	}()
	wait.For(t, "start of the trace", begun)
	f := hub.Begin(trace.Subject{Key: port.Key{Protocol: port.TCP, Address: netip.MustParseAddr("::1"), Port: 80}})
	f.Moved(trace.ToGuest, 3, []byte("abc"))
	want := []string{trace.Open, trace.Payload, trace.Bytes}
	for _, kind := range want { // the last one after a second
		if e := wait.For(t, kind, events); e.Event != kind {
			t.Errorf("%+v, want %s", e, kind)
		}
	}
	f.End(net.ErrClosed)
	if e := wait.For(t, "end", events); e.Event != trace.Close || e.Reason != net.ErrClosed.Error() || e.ToGuest != 3 {
		t.Errorf("%+v", e)
	}
	cancel()
	if err := wait.For(t, "end of the trace", ended); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	wait.Until(t, "the server's end", func() error {
		if hub.Begin(trace.Subject{Key: port.Key{Protocol: port.TCP, Port: 80}}) != nil {
			return errors.New("somebody traces")
		}
		return nil
	})
}

func TestTraceRefusesNonsense(t *testing.T) {
	s := NewServer(Options{Trace: new(trace.Hub), Logger: slog.New(slog.DiscardHandler)})
	for _, query := range []string{"", "?port=0", "?port=80/sctp", "?port=80&hex=x", "?port=80&hex=-1", "?port=80&hex=1025"} {
		if code, body := serve(s, http.MethodGet, "/v1/trace"+query, ""); code != http.StatusBadRequest {
			t.Errorf("%s: %d %s", query, code, body)
		}
	}
}

// What peers chose is quoted.
func TestTraceText(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
	for _, tt := range []struct {
		e    trace.Event
		want string
	}{
		{trace.Event{Event: trace.Open, Flow: 1, Protocol: "tcp", Address: "0.0.0.0", Port: 80, Peer: netip.MustParseAddrPort("10.0.0.1:5"), Guest: "vm\x1b[2J"},
			`03:04:05.000  open     #1     80/tcp      from 10.0.0.1:5  to 0.0.0.0  guest "vm\x1b[2J"`},
		{trace.Event{Event: trace.Bytes, Flow: 1, Protocol: "tcp", Port: 80, ToGuest: 1, ToHost: 2}, "03:04:05.000  bytes    #1     80/tcp      1 B to the guest, 2 B back"},
		{trace.Event{Event: trace.Close, Flow: 1, Protocol: "tcp", Port: 80, Reason: "a\nb"}, `03:04:05.000  close    #1     80/tcp      0 B to the guest, 0 B back  ("a\nb")`},
		{trace.Event{Event: trace.Dropped, Dropped: 7}, "03:04:05.000  dropped  7 events were lost: they come faster than they are read"},
		{trace.Event{Event: trace.Payload, Flow: 1, Protocol: "tcp", Port: 80, Sent: "client", Payload: "1b5b41"},
			"03:04:05.000  payload  #1     80/tcp      sent by the client:\n00000000  1b 5b 41                                          |.[A|"},
	} {
		tt.e.Time = at
		var b strings.Builder
		if err := WriteTrace(&b, tt.e, Painter{}); err != nil || b.String() != tt.want+"\n" {
			t.Errorf("got  %q\nwant %q, %v", b.String(), tt.want, err)
		}
	}
}
