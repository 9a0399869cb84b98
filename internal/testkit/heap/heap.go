// SPDX-License-Identifier: Apache-2.0

// Package heap measures what tests keep in memory.
package heap

import "runtime"

// Used returns the bytes of the heap that are in use.
func Used() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what the first one kept for finalizers and in pools
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
