// SPDX-License-Identifier: Apache-2.0

package port

import (
	"testing"
	"unsafe"
)

// The table has one entry for each port, a key with its publication, which fits the
// allocator's class of 384 bytes on a machine of 64 bits. The next is of 416.
func TestEntryOfTheTableIsSmall(t *testing.T) {
	if size := unsafe.Sizeof(struct {
		Key
		Publication
	}{}); size > 384 {
		t.Errorf("an entry takes %d bytes, want at most 384", size)
	}
}
