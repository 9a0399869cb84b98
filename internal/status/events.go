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

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Vitals are the numbers for the page's charts. They count from the start, except
// open flows.
type Vitals struct {
	Time    time.Time `json:"time"`
	TCP     int       `json:"tcp"` // flows open now
	UDP     int       `json:"udp"`
	ToGuest uint64    `json:"toGuest"` // payload bytes
	ToHost  uint64    `json:"toHost"`
	Errors  uint64    `json:"errors"` // flows that failed
	// Latencies are the seconds from kernel event to acknowledgement of the ports
	// published since the previous Vitals, at most 256.
	Latencies []float64 `json:"latencies"`
	// Mark is where the Latencies of the next Vitals begin.
	Mark uint64 `json:"-"`
}

// hello is the first event of a stream.
type hello struct {
	Role    string `json:"role"` // "agent" or "host"
	Name    string `json:"name"` // of the machine
	Version string `json:"version"`
	// Explains reports whether /v1/explain is served.
	Explains bool `json:"explains"`
	// Changes reports whether this page may change what is forwarded, and Why, if not, the
	// reason; it is empty if nobody may.
	Changes bool   `json:"changes"`
	Why     string `json:"why,omitempty"`
	// Names reports whether /v1/names is served.
	Names bool `json:"names"`
}

// rows is a change of the table. A reset may consist of several.
type rows struct {
	Generation uint64        `json:"generation"`
	Reset      bool          `json:"reset,omitempty"` // forget all previous rows
	More       bool          `json:"more,omitempty"`  // the next one continues it
	Put        []Publication `json:"put,omitempty"`
	Removed    []RowID       `json:"removed,omitempty"`
}

const (
	pulse     = 2 * time.Second       // interval of Vitals
	pace      = 50 * time.Millisecond // least interval of changes; faster ones are coalesced
	rowsAMax  = 500                   // publications in one event
	eventKind = "text/event-stream"
)

// events streams the page's data as server-sent events: hello, sources, rows and
// vitals. Nothing else runs for the page, and this only while it is open and visible.
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
	st := stream{w: w, rc: rc, provider: s.o.Provider, vitals: s.o.Vitals, peers: s.peers, forwards: s.o.Forwards}
	hello := s.hello
	hello.Why = onlyReads(r)
	switch {
	case s.o.Forwards == nil:
		hello.Why = ""
	case s.o.Forwards.Path() == "" && hello.Why == "":
		hello.Why = forwards.ErrNoFile.Error()
	default:
		hello.Changes = hello.Why == ""
	}
	if err := st.send("hello", hello); err != nil {
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

// stream serves one open page.
type stream struct {
	rc       *http.ResponseController
	provider Provider
	vitals   func(mark uint64) Vitals
	peers    func() []Peer
	forwards *forwards.Store // nil for none

	mu        sync.Mutex // guards what follows
	w         http.ResponseWriter
	sources   []Source
	lastPeers []Peer
	rules     *uint64 // generation of the run-time rules that were sent; nil for none

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

// change sends a delta, in parts of limited size, and then pauses.
func (s *stream) change(ctx context.Context, d Delta) error {
	if err := s.sendSources(); err != nil {
		return err
	}
	slices.SortFunc(d.Put, func(a, b Publication) int { return a.Key.Compare(b.Key) })
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
	return schedule.Sleep(ctx, pace)
}

// beat sends sources and vitals regularly, until ctx ends or the client stops reading.
func (s *stream) beat(ctx context.Context) {
	tick := time.NewTicker(pulse)
	defer tick.Stop()
	var mark uint64
	for first := true; ; first = false {
		if err := s.sendSources(); err != nil {
			return
		}
		if s.vitals != nil {
			v := s.vitals(mark)
			mark = v.Mark
			if first { // of an unknown time
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

// sendSources sends peers, sources and run-time rules if they changed.
func (s *stream) sendSources() error {
	if err := s.sendRules(); err != nil {
		return err
	}
	peers := s.peers()
	s.mu.Lock()
	known := s.lastPeers != nil && slices.Equal(peers, s.lastPeers)
	s.lastPeers = peers
	s.mu.Unlock()
	if !known {
		if err := s.send("peers", peers); err != nil {
			return err
		}
	}
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

// sendRules sends the run-time rules if they changed. They have no states: the page has the
// ports.
func (s *stream) sendRules() error {
	if s.forwards == nil {
		return nil
	}
	now := s.forwards.Generation()
	s.mu.Lock()
	known := s.rules != nil && *s.rules == now
	s.rules = &now
	s.mu.Unlock()
	if known {
		return nil
	}
	return s.send("forwards", forwardsOf(s.forwards, nil))
}
