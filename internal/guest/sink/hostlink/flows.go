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
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

// The results of a flow, as Stats.Flows names them.
const (
	FlowServed    = "served"    // carried to its end
	FlowFailed    = "failed"    // Serve returned an error, after a refusal or on the way
	FlowCut       = "cut"       // reset because a rule denied it
	FlowLost      = "lost"      // the link was lost
	FlowForbidden = "forbidden" // names no publication that is wanted
	FlowLimit     = "limit"     // over MaxFlows
	FlowMalformed = "malformed" // has a malformed request
	FlowTimeout   = "timeout"   // sent no request in time
)

type flowResult int

const (
	served flowResult = iota
	failed
	denied
	lost
	forbidden
	overLimit
	malformed
	timedOut
)

var flowResults = [...]string{
	FlowServed, FlowFailed, FlowCut, FlowLost, FlowForbidden, FlowLimit, FlowMalformed, FlowTimeout,
}

// Reset resets the flows of keys that a rule forbids. The keys must be out of the
// wanted set before, so that no new flow can begin. Flows of keys that are merely
// gone continue: a server that drains closes its listener first.
func (s *Sink) Reset(keys []port.Key) { s.flows.Reset(ErrCut, keys...) }

// acceptFlows serves the flows of a session until it ends, and waits for them.
func (s *Sink) acceptFlows(ctx context.Context, sess *session) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		st, err := sess.Accept(ctx)
		if err != nil {
			return
		}
		wg.Go(func() {
			s.stats.open.Add(1)
			result := s.flow(ctx, sess, st)
			s.stats.open.Add(-1)
			s.stats.flows[result].Add(1)
		})
	}
}

const (
	requestBuffer = 512              // takes most requests at once
	replyTimeout  = 10 * time.Second // for a stream to take the reply
)

// errWithdrawn ends a flow whose publication ended while its server was dialled.
var errWithdrawn = errors.New("not published any more")

// flow reads, authorises and serves one flow.
func (s *Sink) flow(ctx context.Context, sess *session, st link.Stream) flowResult {
	_ = st.SetReadDeadline(time.Now().Add(s.o.RequestTimeout))
	q, err := wire.ReadRequest(bufio.NewReaderSize(st, requestBuffer)) // nothing follows it before our reply
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

	// Entered, then looked up: if a rule denies the key in between, either the
	// lookup fails or Reset finds the flow.
	fctx, f := s.flows.Begin(ctx, q.Key)
	if f == nil {
		s.forbid(st, fmt.Sprintf("limit of %d flows reached", s.o.MaxFlows))
		return overLimit
	}
	defer f.End()
	pub, ok := s.o.Lookup(q.Key)
	if !ok {
		s.forbid(st, "no such publication")
		return forbidden
	}
	stop := context.AfterFunc(fctx, func() { _ = st.Reset() })
	answer := func(err error) error {
		if _, ok := s.o.Lookup(q.Key); !ok && err == nil { // dialling may take long: the address may be another server's by now
			s.forbid(st, errWithdrawn.Error())
			return errWithdrawn
		}
		return reply(st, err)
	}
	err = s.handle(fctx, st, forward.Request{Publication: pub, Peer: q.Peer, At: q.At, Answer: answer})
	ended := !stop()
	_ = st.Close() // usually closed already
	switch cause := context.Cause(fctx); {
	case ended && errors.Is(cause, ErrCut):
		return denied
	case ended || (err != nil && sess.Err() != nil):
		return lost
	case errors.Is(err, errWithdrawn):
		return forbidden
	case err != nil:
		return failed
	}
	return served
}

// handle serves the flow by its protocol.
func (s *Sink) handle(ctx context.Context, st link.Stream, req forward.Request) error {
	if req.Publication.Protocol == port.UDP {
		return s.o.ServeUDP(ctx, link.NewDatagrams(st), req)
	}
	return s.o.Serve(ctx, st, req)
}

// What forward leaves room for is what the link needs.
var (
	_ [forward.ChunkHead]byte   = [wire.ChunkHeader]byte{}
	_ [forward.FrameHead]byte   = [link.DatagramHead]byte{}
	_ [forward.MaxDatagram]byte = [wire.MaxDatagram]byte{}
)

// reply answers a request: with an error, nil or a *forward.DialError.
func reply(st link.Stream, err error) error {
	r := wire.FlowReply{Status: wire.FlowOK}
	if err != nil {
		r = wire.FlowReply{Status: wire.FlowUnreachable, Reason: err.Error()}
	}
	var d *forward.DialError
	if errors.As(err, &d) {
		r.Reason = d.Err.Error()
		if d.Refused {
			r.Status = wire.FlowRefused
		}
	}
	_ = st.SetDeadline(time.Now().Add(replyTimeout))
	if err := wire.WriteReply(st, r); err != nil {
		return err
	}
	return st.SetDeadline(time.Time{})
}

// forbid answers a request in place of handle.
func (s *Sink) forbid(st link.Stream, reason string) {
	_ = st.SetWriteDeadline(time.Now().Add(s.o.RequestTimeout))
	if err := wire.WriteReply(st, wire.FlowReply{Status: wire.FlowForbidden, Reason: reason}); err != nil {
		_ = st.Reset()
		return
	}
	_ = st.Close()
}
