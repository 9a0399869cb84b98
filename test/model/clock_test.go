// SPDX-License-Identifier: Apache-2.0

package model

import (
	"sync/atomic"
	"time"
	"unsafe"
)

// clock is the machine's clock: its wall time is off by what it was stepped, and its
// monotonic time is right.
type clock struct{ off atomic.Int64 }

func (c *clock) step(off time.Duration) { c.off.Store(int64(off)) }

// now is what time.Now returns outside of a bubble of synctest, where times have no
// monotonic reading: a time with both.
func (c *clock) now() time.Time {
	const (
		hasMonotonic = 1 << 63
		year1885     = -2682374400 // Unix seconds of the first one that such a time can have
	)
	type fields struct { // of time.Time
		wall uint64
		ext  int64
		loc  *time.Location
	}
	at := time.Now().Add(time.Duration(c.off.Load()))
	f := fields{wall: hasMonotonic, ext: time.Now().UnixNano(), loc: time.Local} //nolint:gosmopolitan // as time.Now
	f.wall |= uint64(at.Unix()-year1885)<<30 | uint64(at.Nanosecond())
	return *(*time.Time)(unsafe.Pointer(&f))
}
