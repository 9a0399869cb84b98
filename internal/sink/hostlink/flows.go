// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

// The results of a flow, as Stats.Flows names them.
const (
	FlowServed    = "served"    // carried to its end
	FlowFailed    = "failed"    // Serve returned an error, after a refusal or on the way
	FlowCut       = "cut"       // denied by a rule while it ran
	FlowLost      = "lost"      // the link went
	FlowForbidden = "forbidden" // names no publication that is wanted
	FlowLimit     = "limit"     // over MaxFlows
	FlowMalformed = "malformed" // its request was
	FlowTimeout   = "timeout"   // its request did not come
)

type flowResult int

const (
	served flowResult = iota
	failed
	wasCut
	lost
	forbidden
	overLimit
	malformed
	timedOut
)

var flowResults = [...]string{
	FlowServed, FlowFailed, FlowCut, FlowLost, FlowForbidden, FlowLimit, FlowMalformed, FlowTimeout,
}

// flows are those that run, by key.
type flows struct {
	mu    sync.Mutex
	byKey map[port.Key]map[*flow]struct{}
}

type flow struct{ cut context.CancelCauseFunc }

func newFlows() *flows { return &flows{byKey: make(map[port.Key]map[*flow]struct{})} }

func (f *flows) add(k port.Key, fl *flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byKey[k] == nil {
		f.byKey[k] = make(map[*flow]struct{})
	}
	f.byKey[k][fl] = struct{}{}
}

func (f *flows) remove(k port.Key, fl *flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byKey[k], fl)
	if len(f.byKey[k]) == 0 {
		delete(f.byKey, k)
	}
}

// Cut ends the flows of keys that a rule forbids. The keys must be out of the
// wanted set before, so that no flow slips in between. Flows of keys that are
// merely gone are left alone: a server that drains closes its listener first.
func (s *Sink) Cut(keys []port.Key) {
	s.flows.mu.Lock()
	defer s.flows.mu.Unlock()
	for _, k := range keys {
		for fl := range s.flows.byKey[k] {
			fl.cut(ErrCut)
		}
	}
}

// acceptFlows serves the streams of a session until it ends, and waits for them.
func (s *Sink) acceptFlows(ctx context.Context, sess *session) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		st, err := sess.Accept(ctx)
		if err != nil {
			return
		}
		wg.Go(func() {
			open := s.stats.open.Add(1)
			result := s.flow(ctx, sess, st, open)
			s.stats.open.Add(-1)
			s.stats.flows[result].Add(1)
		})
	}
}

// requestBuffer takes most requests at once.
const requestBuffer = 512

// flow reads, authorises and serves one flow; open is how many there are with it.
func (s *Sink) flow(ctx context.Context, sess *session, st link.Stream, open int64) flowResult {
	if open > int64(s.o.MaxFlows) {
		s.forbid(st, fmt.Sprintf("limit of %d flows reached", s.o.MaxFlows))
		return overLimit
	}
	_ = st.SetReadDeadline(time.Now().Add(s.o.RequestTimeout))
	req, err := wire.ReadRequest(bufio.NewReaderSize(st, requestBuffer)) // the host says nothing more before our reply
	if err != nil {
		_ = st.Reset()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return timedOut
		case errors.Is(err, wire.ErrMalformed), errors.Is(err, wire.ErrTooLarge):
			return malformed
		}
		return lost
	}
	_ = st.SetReadDeadline(time.Time{})

	fctx, cut := context.WithCancelCause(ctx)
	defer cut(nil)
	fl := &flow{cut}
	// First known, then looked up: a rule that denies the key in between either
	// hides it from the lookup or finds the flow to cut.
	s.flows.add(req.Key, fl)
	defer s.flows.remove(req.Key, fl)
	pub, ok := s.o.Lookup(req.Key)
	if !ok {
		s.forbid(st, "no such publication")
		return forbidden
	}
	stop := context.AfterFunc(fctx, func() { _ = st.Reset() })
	err = s.o.Serve(fctx, pub, req, st)
	ended := !stop()
	_ = st.Close() // no-op after a Serve that did it
	switch cause := context.Cause(fctx); {
	case ended && errors.Is(cause, ErrCut):
		return wasCut
	case ended || (err != nil && sess.Err() != nil):
		return lost
	case err != nil:
		return failed
	}
	return served
}

// forbid answers a request in place of Serve.
func (s *Sink) forbid(st link.Stream, reason string) {
	_ = st.SetWriteDeadline(time.Now().Add(s.o.RequestTimeout))
	if err := wire.WriteReply(st, wire.FlowReply{Status: wire.FlowForbidden, Reason: reason}); err != nil {
		_ = st.Reset()
		return
	}
	_ = st.Close()
}
