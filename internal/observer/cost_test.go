// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"testing"
)

// An event costs the same whatever number of sockets is known: a listener that
// comes takes its entry, one that goes takes nothing.
func TestAnEventCostsTheSameAmongManySockets(t *testing.T) {
	cost := func(known int) float64 {
		e := newTestEngine(discard{})
		e.live = true
		for i := range known {
			e.model.sockets[uint64(1000+i)] = &entry{}
		}
		up, down := listenEvent(), listenEvent()
		down.Kind = uint8(sockEventKindEVENT_CLOSE)
		pair := [][]byte{sample(up), sample(down)}
		return testing.AllocsPerRun(1000, func() {
			for _, b := range pair {
				e.sample(b)
				e.apply(e.batch)
				e.batch = e.batch[:0]
			}
		})
	}
	few, many := cost(10), cost(10_000)
	if few > 1 || many > 1 {
		t.Errorf("a listener that comes and goes allocates %v times among 10 sockets, %v among 10,000; want at most once", few, many)
	}
}

// An event asks for no dump where its hook knows the socket's cookie.
func TestEventsThatSayAllAskForNoDump(t *testing.T) {
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

// A commit's record costs the two names that it carries.
func TestACommitsRecordAllocatesOnlyItsNames(t *testing.T) {
	var d nftDecoder
	rule := records(nftNftEvent{Kind: uint8(CommitRule), Family: 2, Handle: 5, Previous: 4}, []byte("nat\x00DOCKER\x00"))[0]
	end := records(nftNftEvent{Kind: uint8(CommitEnd), Generation: 7}, nil)[0]
	for name, c := range map[string]struct {
		record []byte
		most   float64
	}{"rule": {rule, 2}, "end": {end, 0}} {
		if n := testing.AllocsPerRun(1000, func() { _, _, _ = d.add(c.record) }); n > c.most {
			t.Errorf("%s: %v allocations, want at most %v", name, n, c.most)
		}
	}
}
