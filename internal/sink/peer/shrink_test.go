// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testkit/heap"
)

// A book of 10,000 ports that came and went keeps less than a fiftieth of their memory.
func TestMemoryOfManyPortsIsFreed(t *testing.T) {
	const n = 10_000
	w := newWanted()
	keys := make([]port.Key, 0, n)
	for i := range n {
		keys = append(keys, key(fmt.Sprintf("0.0.0.0:%d", 1+i)))
	}
	update := func(change func(tx *table.Tx[port.Key, port.Publication], k port.Key)) {
		was := w.View().Generation()
		w.Update(func(tx *table.Tx[port.Key, port.Publication]) {
			for _, k := range keys {
				change(tx, k)
			}
		})
		w.book.Update(w.View(), reconcile.Change{Base: max(was, 1), Keys: keys})
		w.settle()
	}
	before := heap.Used()
	update(func(tx *table.Tx[port.Key, port.Publication], k port.Key) {
		host := netip.AddrPortFrom(port.Loopback(k.Address), k.Port)
		tx.Put(k, port.Publication{Key: k, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{host}}})
	})
	full := heap.Used() - before
	update(func(tx *table.Tx[port.Key, port.Publication], k port.Key) { tx.Delete(k) })
	left := heap.Used() - before
	t.Logf("%d KiB with %d ports, %d KiB after them", full>>10, n, left>>10)
	if left > full/50 {
		t.Errorf("%d of %d bytes are left", left, full)
	}
	runtime.KeepAlive(w)
}
