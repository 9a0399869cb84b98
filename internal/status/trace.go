// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/link/trace"
)

// tracePause is between two reports of the bytes that flows moved.
const tracePause = time.Second

// ParseTrace reads the query of a trace: the port as ParseQuery does, and how many bytes
// of payload to show.
func ParseTrace(port string, payload int) (trace.Filter, error) {
	q, err := ParseQuery(port)
	if err == nil && (payload < 0 || payload > trace.MaxHex) {
		err = fmt.Errorf("%d bytes of payload: want 0 to %d", payload, trace.MaxHex)
	}
	return trace.Filter{Port: q.Port, Protocol: q.Protocol, Hex: payload}, err
}

// trace streams the events of a port's flows as JSON lines until the client disconnects.
func (s *Server) trace(w http.ResponseWriter, r *http.Request) {
	payload, err := 0, error(nil)
	if v := r.URL.Query().Get("hex"); v != "" {
		payload, err = strconv.Atoi(v)
	}
	var f trace.Filter
	if err == nil {
		f, err = ParseTrace(r.URL.Query().Get("port"), payload)
	}
	if err != nil {
		text(w, http.StatusBadRequest, err.Error())
		return
	}
	if !s.enter(w) {
		return
	}
	defer s.leave()
	if f.Hex > 0 {
		s.o.Logger.Warn("payload is traced", "port", f.Port, "bytes", f.Hex)
	}
	sub := s.o.Trace.Subscribe(f)
	defer sub.Close()
	w.Header().Set("Content-Type", "application/jsonl")
	if err := streamTrace(r.Context(), w, sub); err != nil {
		s.o.Logger.Debug("trace ended", "err", err)
	}
}

// streamTrace writes events until ctx ends or the client reads nothing any more.
func streamTrace(ctx context.Context, w http.ResponseWriter, sub *trace.Subscription) error {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{})
	enc := json.NewEncoder(w)
	tick := time.NewTicker(tracePause)
	defer tick.Stop()
	for list := []trace.Event(nil); ; {
		_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
		for _, e := range list {
			if err := enc.Encode(e); err != nil {
				return err
			}
		}
		if err := rc.Flush(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case e := <-sub.C():
			list = []trace.Event{e}
		case <-tick.C:
			list = sub.Take()
		}
	}
}

// Trace calls begun when the trace runs, and then f with each event of the flows that
// begin, until ctx ends, f fails, or the connection is lost (io.ErrUnexpectedEOF).
func (c *Client) Trace(ctx context.Context, t trace.Filter, begun func(), f func(trace.Event) error) error {
	port := strconv.Itoa(int(t.Port))
	if t.Protocol != 0 {
		port += "/" + t.Protocol.String()
	}
	query := url.Values{"port": {port}, "hex": {strconv.Itoa(t.Hex)}}
	return follow(ctx, c, "/v1/trace?"+query.Encode(), begun, f)
}

var traceColors = map[string]Color{trace.Open: Green, trace.Close: Yellow, trace.Dropped: Red}

// WriteTrace writes an event of a trace as a human-readable line.
func WriteTrace(w io.Writer, e trace.Event, paint Painter) error {
	line := e.Time.Local().Format("15:04:05.000") + "  " + paint.Paint(traceColors[e.Event], fmt.Sprintf("%-7s", e.Event))
	if e.Event == trace.Dropped {
		_, err := fmt.Fprintf(w, "%s  %d events were lost: they come faster than they are read\n", line, e.Dropped)
		return err
	}
	line += fmt.Sprintf("  #%-5d %-10s", e.Flow, fmt.Sprintf("%d/%s", e.Port, Quote(e.Protocol)))
	switch e.Event {
	case trace.Open:
		line += "  from " + peerText(e.Peer) + "  to " + Quote(e.Address)
		if e.Guest != "" {
			line += "  guest " + Quote(e.Guest)
		}
	case trace.Payload:
		line += "  sent by the " + Quote(e.Sent) + ":" + dump(e.Payload)
	default:
		line += fmt.Sprintf("  %d B to the guest, %d B back", e.ToGuest, e.ToHost)
		if e.Reason != "" {
			line += "  (" + Quote(e.Reason) + ")"
		}
	}
	_, err := fmt.Fprintln(w, line)
	return err
}

func peerText(a netip.AddrPort) string {
	if !a.IsValid() {
		return "-"
	}
	return a.String()
}

// dump returns hexadecimal digits as lines with the printable characters beside them.
func dump(digits string) string {
	b, err := hex.DecodeString(digits)
	if err != nil {
		return " " + Quote(digits)
	}
	return "\n" + strings.TrimSuffix(hex.Dump(b), "\n")
}
