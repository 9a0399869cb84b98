// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hook

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/kernel/bpf"
)

// records are what the hooks send for an event with these bytes.
func records(e bpf.NftChangeEvent, payload []byte) (out [][]byte) {
	e.Total = uint16(len(payload))
	for at := 0; at == 0 || at < len(payload); at += len(e.Bytes) {
		e.Offset = uint16(at)
		e.Bytes = [len(e.Bytes)]uint8{}
		copy(e.Bytes[:], payload[at:])
		out = append(out, slices.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&e)), commitRecordSize)))
	}
	return out
}

func TestDecodeCommitRecords(t *testing.T) {
	long := strings.Repeat("n", 255)
	for _, tt := range []struct {
		event   bpf.NftChangeEvent
		payload string
		chunks  int
		want    CommitEvent
	}{
		{
			bpf.NftChangeEvent{Kind: uint8(CommitEnd), Generation: 7}, "", 1,
			CommitEvent{Kind: CommitEnd, Generation: 7},
		},
		{
			bpf.NftChangeEvent{Kind: uint8(CommitRule), Family: 2, Handle: 5, Previous: 4}, "nat\x00DOCKER\x00", 1,
			CommitEvent{Kind: CommitRule, Family: 2, Table: "nat", Name: "DOCKER", Handle: 5, Previous: 4},
		},
		{
			bpf.NftChangeEvent{Kind: uint8(CommitChain), Family: 10, Deleted: 1}, "t\x00" + long + "\x00", 2,
			CommitEvent{Kind: CommitChain, Family: 10, Deleted: true, Table: "t", Name: long},
		},
		{
			bpf.NftChangeEvent{Kind: uint8(CommitElement), Handle: 9, KeyLength: 2, EndLength: 2, ValueLength: 4, Flags: 1},
			"t\x00m\x00\x00P\x00Z\x0a\x00\x00\x01", 1,
			CommitEvent{
				Kind: CommitElement, Table: "t", Name: "m", Handle: 9, Flags: 1,
				Key: []byte{0, 'P'}, End: []byte{0, 'Z'}, Value: []byte{10, 0, 0, 1},
			},
		},
		{
			bpf.NftChangeEvent{Kind: uint8(CommitElement), KeyLength: 1, IsVerdict: 1, Verdict: 0xfffffffc}, long + "\x00" + long + "\x00k" + long + "\x00", 4,
			CommitEvent{Kind: CommitElement, Table: long, Name: long, Key: []byte("k"), IsVerdict: true, Verdict: -4, Chain: long},
		},
	} {
		var d decoder
		rs := records(tt.event, []byte(tt.payload))
		if len(rs) != tt.chunks {
			t.Errorf("%v: %d chunks, want %d", tt.want, len(rs), tt.chunks)
		}
		for i, r := range rs {
			e, complete, err := d.add(r)
			if err != nil || complete != (i == len(rs)-1) {
				t.Fatalf("%v: chunk %d: complete %v, %v", tt.want, i, complete, err)
			}
			if complete {
				if diff := cmp.Diff(tt.want, e); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
		}
	}
}

// A missing chunk must not look like a shorter name.
func TestMissingChunkIsAnError(t *testing.T) {
	rs := records(bpf.NftChangeEvent{Kind: uint8(CommitRule)}, []byte(strings.Repeat("t", 255)+"\x00"+strings.Repeat("c", 255)+"\x00"))
	for _, order := range [][]int{{1}, {0, 2}, {0, 0}} {
		var d decoder
		var err error
		for _, i := range order {
			_, _, err = d.add(rs[i])
		}
		if !errors.Is(err, errCommitRecord) {
			t.Errorf("chunks %v: %v", order, err)
		}
	}
}

// A record of a rule costs the two names in it.
func TestDecodeAllocatesOnlyNames(t *testing.T) {
	var d decoder
	rule := records(bpf.NftChangeEvent{Kind: uint8(CommitRule), Family: 2, Handle: 5, Previous: 4}, []byte("nat\x00DOCKER\x00"))[0]
	end := records(bpf.NftChangeEvent{Kind: uint8(CommitEnd), Generation: 7}, nil)[0]
	for name, c := range map[string]struct {
		record []byte
		most   float64
	}{"rule": {rule, 2}, "end": {end, 0}} {
		if n := testing.AllocsPerRun(1000, func() { _, _, _ = d.add(c.record) }); n > c.most {
			t.Errorf("%s: %v allocations, want at most %v", name, n, c.most)
		}
	}
}

func FuzzCommitRecord(f *testing.F) {
	for _, r := range records(bpf.NftChangeEvent{Kind: uint8(CommitElement), KeyLength: 4, ValueLength: 9}, []byte("a\x00b\x00keyvalue")) {
		f.Add(r, r)
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var d decoder
		for _, r := range [][]byte{a, b} {
			e, complete, err := d.add(r)
			if err == nil && complete && len(e.Table)+len(e.Name)+len(e.Key)+len(e.End)+len(e.Value)+len(e.Chain) > maxCommitBytes {
				t.Errorf("%d bytes", len(e.Table))
			}
			if len(d.have) > maxCommitBytes {
				t.Errorf("keeps %d bytes", len(d.have))
			}
		}
	})
}
