// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf/ringbuf"
)

// Reader reads the records of a ring buffer, one at a time. One goroutine uses it.
type Reader struct {
	reader *ringbuf.Reader
	record ringbuf.Record
}

// Reader opens one of Config.Maps. It is closed with the object.
func (o *Object) Reader(name string) (*Reader, error) {
	r, err := ringbuf.NewReader(o.maps[name])
	if err != nil {
		return nil, fmt.Errorf("ring buffer: %w", err)
	}
	o.made = append(o.made, r)
	return &Reader{reader: r}, nil
}

// Read waits for a record and returns it; it is valid until the next Read. After
// Close of the object it returns os.ErrClosed, after the deadline
// os.ErrDeadlineExceeded.
func (r *Reader) Read() ([]byte, error) {
	err := r.reader.ReadInto(&r.record)
	return r.record.RawSample, err
}

// SetDeadline bounds the next Read; the zero time is none.
func (r *Reader) SetDeadline(t time.Time) { r.reader.SetDeadline(t) }
