// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"runtime"
	"testing"
	"unsafe"

	"github.com/fairlead/fairlead/internal/kernel/bpf"
	"github.com/fairlead/fairlead/internal/testkit/heap"
)

// The cost of an event does not depend on the number of sockets: a listener that
// appears allocates its entry, one that disappears nothing.
func TestEventCostIsIndependentOfSockets(t *testing.T) {
	cost := func(known int) float64 {
		e := newTestEngine(discard{})
		e.live = true
		for i := range known {
			e.model.sockets[uint64(1000+i)] = &entry{}
		}
		up, down := listenEvent(), listenEvent()
		down.Kind = uint8(bpf.SockEventKindEVENT_CLOSE)
		pair := [][]byte{sample(up), sample(down)}
		return testing.AllocsPerRun(1000, func() {
			for _, b := range pair {
				e.sample(b)
				e.reportDumped(e.batch)
				e.batch = e.batch[:0]
			}
		})
	}
	few, many := cost(10), cost(10_000)
	if few > 1 || many > 1 {
		t.Errorf("a listener that comes and goes allocates %v times among 10 sockets, %v among 10,000; want at most once", few, many)
	}
}

// An event with a cookie needs no dump.
func TestCompleteEventsNeedNoDump(t *testing.T) {
	e := newTestEngine(discard{})
	e.live = true
	dumps := 0
	e.dump = func(context.Context, scope) ([]row, scope, error) { dumps++; return nil, scopeAll, nil }
	for cookie := range uint64(1000) {
		up := listenEvent()
		up.Cookie = cookie + 1
		e.sample(sample(up))
	}
	if e.resolve != 0 || dumps != 0 || len(e.batch) != 1000 {
		t.Errorf("1,000 events made %d changes, asked for a dump of %v and made %d", len(e.batch), e.resolve, dumps)
	}
}

// By default the ring has room for the events of 10,000 listeners, which have two each. An
// event has a header of 8 bytes.
func TestRingHoldsABurst(t *testing.T) {
	var o Options
	o.setDefaults()
	if need := 20_000 * (8 + int(unsafe.Sizeof(bpf.SockEvent{}))); o.RingBytes < need {
		t.Errorf("%d bytes, want at least %d", o.RingBytes, need)
	}
}

// What many sockets that came and went leave is less than a tenth of what they took.
func TestMemoryOfSocketsIsFreed(t *testing.T) {
	const n = 50_000
	m := newModel()
	before := heap.Used()
	for cookie := range uint64(n) {
		_, _, _ = m.put(Socket{Cookie: 1 + cookie, Port: 80, Listening: true})
	}
	full := heap.Used() - before
	for cookie := range uint64(n) {
		if _, ok, _ := m.drop(1+cookie, 0); !ok {
			t.Fatalf("socket %d was not there", cookie)
		}
	}
	if left := heap.Used() - before; left > full/10 {
		t.Errorf("%d of %d bytes are left", left, full)
	}
	runtime.KeepAlive(m)
}
