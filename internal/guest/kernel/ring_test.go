// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
)

// fakeRing is a ring whose producer is the test.
func fakeRing(size int) *Ring {
	return &Ring{
		consumer: new(atomic.Uint64), producer: new(atomic.Uint64), control: new(Control),
		data: make([]byte, size), mask: uint64(size - 1),
	}
}

// produce puts a record at the end, with flags in its header.
func (r *Ring) produce(b []byte, flags uint32) {
	at := r.producer.Load()
	put := func(at uint64, b byte) { r.data[at&r.mask] = b }
	header := binary.NativeEndian.AppendUint32(nil, uint32(len(b))|flags)
	for i, c := range header {
		put(at+uint64(i), c)
	}
	for i, c := range b {
		put(at+ringHeader+uint64(i), c)
	}
	r.producer.Store(at + ringHeader + uint64(len(b)+7)&^7)
}

func (r *Ring) all(t *testing.T, limit int) []string {
	t.Helper()
	var got []string
	if _, err := r.Read(limit, func(b []byte) { got = append(got, string(b)) }); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestRing(t *testing.T) {
	r := fakeRing(128)
	if r.ready() || len(r.all(t, 10)) != 0 {
		t.Error("an empty ring is ready")
	}
	// Many times around, with lengths that end at every place.
	for i := range 500 {
		want := []string{fmt.Sprintf("%0*d", 1+i%40, i), "second"}
		r.produce([]byte(want[0]), 0)
		r.produce([]byte("not for us"), ringDiscard)
		r.produce([]byte(want[1]), 0)
		if !r.ready() {
			t.Fatal("not ready")
		}
		if got := r.all(t, 10); !slices.Equal(got, want) {
			t.Fatalf("round %d: %q, want %q", i, got, want)
		}
		if r.Position() != r.End() {
			t.Fatalf("round %d: room is not freed", i)
		}
	}
}

func TestRingStopsAtUncommittedRecord(t *testing.T) {
	r := fakeRing(256)
	r.produce([]byte("one"), 0)
	busy := r.End()
	r.produce([]byte("two"), ringBusy)
	r.produce([]byte("three"), 0)
	if got := r.all(t, 10); !slices.Equal(got, []string{"one"}) {
		t.Errorf("read %q", got)
	}
	if r.ready() {
		t.Error("ready with a record that is not committed")
	}
	r.data[busy+3] &^= 0x80
	if got := r.all(t, 1); !slices.Equal(got, []string{"two"}) {
		t.Errorf("read %q, want one record", got)
	}
	if got := r.all(t, 10); !slices.Equal(got, []string{"three"}) {
		t.Errorf("read %q", got)
	}
}

func TestRingRefusesBadRecord(t *testing.T) {
	r := fakeRing(128)
	r.produce([]byte("one"), 0)
	binary.NativeEndian.PutUint32(r.data, 100)
	_, err := r.Read(10, func([]byte) { t.Error("a record that is not there") })
	if !errors.Is(err, errRing) {
		t.Errorf("error %v, want %v", err, errRing)
	}
	if r.Position() != r.End() {
		t.Error("stays at the record that it cannot read")
	}
}

func FuzzRing(f *testing.F) {
	f.Add([]byte("\x05\x00\x00\x00\x00\x00\x00\x00hello\x00\x00\x00"), uint64(16), uint64(0))
	f.Fuzz(func(t *testing.T, data []byte, written, at uint64) {
		r := fakeRing(256)
		copy(r.data, data)
		at &^= 7
		r.consumer.Store(at)
		r.producer.Store(at + written%257&^7)
		for range 64 {
			n, err := r.Read(8, func(b []byte) {
				if len(b) > 256 {
					t.Errorf("a record of %d bytes", len(b))
				}
			})
			if n == 0 || err != nil {
				break
			}
		}
		if r.Position() > r.End() {
			t.Errorf("read to %d of %d", r.Position(), r.End())
		}
	})
}
