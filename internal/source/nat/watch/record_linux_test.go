// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/kernel/bpf"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// records are what the hooks send for an event with these bytes.
func records(e bpf.NftChangeEvent, payload []byte) (out [][]byte) {
	e.Total = uint16(len(payload))
	for at := 0; at == 0 || at < len(payload); at += len(e.Bytes) {
		e.Offset = uint16(at)
		e.Bytes = [len(e.Bytes)]uint8{}
		copy(e.Bytes[:], payload[at:])
		out = append(out, slices.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&e)), recordSize)))
	}
	return out
}

func TestDecodeRecords(t *testing.T) {
	long := strings.Repeat("n", 255)
	table := ruleset.TableID{Family: ruleset.FamilyIP, Name: "t"}
	for _, tt := range []struct {
		event   bpf.NftChangeEvent
		payload string
		chunks  int
		want    ruleset.Message
	}{
		{
			bpf.NftChangeEvent{Kind: changeEnd, Generation: 7, Since: 5}, "", 1,
			ruleset.Message{Type: ruleset.MsgNewGen, Generation: 7, Since: 5, Sparse: true},
		},
		{
			bpf.NftChangeEvent{Kind: changeRule, Table: 8, Handle: 5, Previous: 4}, "t\x00DOCKER\x00", 1,
			ruleset.Message{Type: ruleset.MsgNewRule, Chain: "DOCKER", Handle: 5, Position: 4},
		},
		{
			bpf.NftChangeEvent{Kind: changeChain, Table: 8, Handle: 3, Deleted: 1}, "t\x00" + long + "\x00", 2,
			ruleset.Message{Type: ruleset.MsgDelChain, Chain: long, Handle: 3},
		},
		{
			bpf.NftChangeEvent{Kind: changeElement, Table: 8, Handle: 9, KeyLength: 2, EndLength: 2, ValueLength: 4, Flags: 1},
			"t\x00m\x00\x00P\x00Z\x0a\x00\x00\x01", 1,
			ruleset.Message{Type: ruleset.MsgNewElem, Set: &ruleset.Set{Name: "m", Handle: 9}, Elements: []ruleset.Element{
				{Flags: 1, Key: []byte{0, 'P'}, End: []byte{0, 'Z'}, Data: []byte{10, 0, 0, 1}},
			}},
		},
		{
			bpf.NftChangeEvent{Kind: changeElement, Table: 8, Handle: 9, KeyLength: 1, IsVerdict: 1, Verdict: 0xfffffffc},
			"t\x00" + long + "\x00k" + long + "\x00", 3,
			ruleset.Message{Type: ruleset.MsgNewElem, Set: &ruleset.Set{Name: long, Handle: 9}, Elements: []ruleset.Element{
				{Key: []byte("k"), Verdict: &ruleset.Verdict{Code: -4, Chain: long}},
			}},
		},
	} {
		if tt.event.Kind != changeEnd {
			tt.event.Family = ruleset.FamilyIP
			tt.want.Bare, tt.want.Table, tt.want.TableHandle = true, table, 8
		}
		var d decoder
		rs := records(tt.event, []byte(tt.payload))
		if len(rs) != tt.chunks {
			t.Errorf("%v: %d chunks, want %d", tt.want, len(rs), tt.chunks)
		}
		for i, r := range slices.Concat(rs, rs) { // the second is independent of the first
			complete, err := d.add(r)
			if err != nil || complete != (i%len(rs) == len(rs)-1) {
				t.Fatalf("%v: chunk %d: complete %v, %v", tt.want, i, complete, err)
			}
			if !complete {
				continue
			}
			m, err := d.message()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(&tt.want, m); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		}
	}
}

// A missing chunk must not look like a shorter name.
func TestMissingChunkIsAnError(t *testing.T) {
	rs := records(bpf.NftChangeEvent{Kind: changeRule}, []byte(strings.Repeat("t", 255)+"\x00"+strings.Repeat("c", 255)+"\x00"))
	for _, order := range [][]int{{1}, {0, 2}, {0, 0}} {
		var d decoder
		var err error
		for _, i := range order {
			_, err = d.add(rs[i])
		}
		if !errors.Is(err, errRecord) {
			t.Errorf("chunks %v: %v", order, err)
		}
	}
}

// A record of a rule costs a message with two names.
func TestDecodeAllocatesOnlyMessage(t *testing.T) {
	var d decoder
	rule := records(bpf.NftChangeEvent{Kind: changeRule, Family: 2, Handle: 5, Previous: 4}, []byte("nat\x00DOCKER\x00"))[0]
	if n := testing.AllocsPerRun(1000, func() {
		_, _ = d.add(rule)
		_, _ = d.message()
	}); n > 3 {
		t.Errorf("%v allocations, want at most 3", n)
	}
}

func FuzzCommitRecord(f *testing.F) {
	for _, r := range records(bpf.NftChangeEvent{Kind: changeElement, KeyLength: 4, ValueLength: 9}, []byte("a\x00b\x00keyvalue")) {
		f.Add(r, r)
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var d decoder
		for _, r := range [][]byte{a, b} {
			if complete, err := d.add(r); err == nil && complete {
				_, _ = d.message()
			}
			if len(d.have) > maxRecordBytes {
				t.Errorf("keeps %d bytes", len(d.have))
			}
		}
	})
}
