// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Vitals is what the page's charts show of a moment. Counts are since the start,
// but for what is open now.
type Vitals struct {
	Time    time.Time `json:"time"`
	TCP     int       `json:"tcp"` // flows open now
	UDP     int       `json:"udp"`
	ToGuest uint64    `json:"toGuest"` // payload bytes
	ToHost  uint64    `json:"toHost"`
	Errors  uint64    `json:"errors"` // flows that failed
	// Latencies are the seconds from the kernel's event to the acknowledgement,
	// of what was published since the Vitals before, at most 256.
	Latencies []float64 `json:"latencies"`
	// Mark is where the next Vitals begin with Latencies.
	Mark uint64 `json:"-"`
}

// hello is the first event of a stream.
type hello struct {
	Role    string `json:"role"` // "agent" or "host"
	Name    string `json:"name"` // of the machine
	Version string `json:"version"`
	// Explains says that /v1/explain is there.
	Explains bool `json:"explains"`
}

// rows is what changed in the table. Several may make up one reset.
type rows struct {
	Generation uint64        `json:"generation"`
	Reset      bool          `json:"reset,omitempty"` // forget what was said before
	More       bool          `json:"more,omitempty"`  // the next one belongs to it
	Put        []Publication `json:"put,omitempty"`
	Removed    []Removed     `json:"removed,omitempty"`
}

const (
	pulse     = 2 * time.Second       // between two Vitals
	pace      = 50 * time.Millisecond // at least, between two changes; what comes faster is joined
	rowsAMax  = 500                   // publications in one event
	eventKind = "text/event-stream"
)

// events streams what the page shows, as server-sent events: hello, sources,
// rows and vitals. It is all that ever runs for the page, and only while one is
// open and in sight.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	if !s.enter(w) {
		return
	}
	defer s.leave()
	w.Header().Set("Content-Type", eventKind)
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{})
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	st := stream{w: w, rc: rc, provider: s.o.Provider, vitals: s.o.Vitals}
	if err := st.send("hello", s.hello); err != nil {
		return
	}
	var beat sync.WaitGroup
	defer beat.Wait()
	defer cancel()
	beat.Go(func() {
		defer cancel()
		st.beat(ctx)
	})
	err := s.o.Provider.Changes(ctx, func(d Delta) error { return st.change(ctx, d) })
	if err != nil && ctx.Err() == nil {
		s.o.Logger.Debug("event stream ended", "err", err)
	}
}

// stream is one page that looks on.
type stream struct {
	rc       *http.ResponseController
	provider Provider
	vitals   func(mark uint64) Vitals

	mu      sync.Mutex // guards w and sources
	w       http.ResponseWriter
	sources []Source

	begun bool // a reset was sent; of change alone
}

func (s *stream) send(event string, data any) error {
	b, err := json.Marshal(data)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := fmt.Fprintf(s.w, "event: %s\ndata: %s\n\n", event, b); err != nil {
		return err
	}
	return s.rc.Flush()
}

// change sends a delta, in parts that a browser digests one by one, and then
// holds back for a moment.
func (s *stream) change(ctx context.Context, d Delta) error {
	if err := s.tellSources(); err != nil {
		return err
	}
	slices.SortFunc(d.Put, func(a, b Publication) int { return a.Key().Compare(b.Key()) })
	part := rows{Generation: d.Generation, Reset: !s.begun, Removed: d.Removed}
	s.begun = true
	for put := range slices.Chunk(d.Put, rowsAMax) {
		if len(part.Put) > 0 {
			part.More = true
			if err := s.send("rows", part); err != nil {
				return err
			}
			part = rows{Generation: d.Generation}
		}
		part.Put = put
	}
	if err := s.send("rows", part); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pace):
		return nil
	}
}

// beat sends what is not told by changes of the table, until ctx ends or the
// client does not read.
func (s *stream) beat(ctx context.Context) {
	tick := time.NewTicker(pulse)
	defer tick.Stop()
	var mark uint64
	for first := true; ; first = false {
		if err := s.tellSources(); err != nil {
			return
		}
		if s.vitals != nil {
			v := s.vitals(mark)
			mark = v.Mark
			if first { // nobody knows when they were
				v.Latencies = []float64{}
			}
			if err := s.send("vitals", v); err != nil {
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// tellSources sends the sources if they are not as they were told last.
func (s *stream) tellSources() error {
	now := s.provider.Sources()
	s.mu.Lock()
	same := s.sources != nil && slices.EqualFunc(now, s.sources, Source.equal)
	s.sources = now
	s.mu.Unlock()
	if same {
		return nil
	}
	return s.send("sources", now)
}
