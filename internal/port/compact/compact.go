// SPDX-License-Identifier: Apache-2.0

// Package compact frees what maps keep: a Go map has room for the most that it ever
// held, until it is made anew.
package compact

import "maps"

const (
	many     = 1024
	mostGone = 8 // 7 of 8
)

// Peak notices when most of many entries have gone. The zero value is ready.
type Peak struct{ most int }

// Reached notes that there are n entries.
func (p *Peak) Reached(n int) { p.most = max(p.most, n) }

// Passed reports whether most of the entries that there were have gone, if there are n
// now. The maps that held them are worth making anew then; counting begins again.
func (p *Peak) Passed(n int) bool {
	if p.most = max(p.most, n); p.most < many || n > p.most/mostGone {
		return false
	}
	p.most = n
	return true
}

// Map returns a map of the size that m needs. maps.Clone would keep its capacity.
func Map[M ~map[K]V, K comparable, V any](m M) M {
	out := make(M, len(m))
	maps.Copy(out, m)
	return out
}

// Clear returns m without its entries, or a new map if there were many.
func Clear[M ~map[K]V, K comparable, V any](m M) M {
	if len(m) >= many {
		return make(M)
	}
	clear(m)
	return m
}
