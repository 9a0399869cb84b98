// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"hash/fnv"
	"io"
	"net/netip"
	"slices"
)

// leadsTo returns Binding.Target of a draft: 0 if not all of its targets are kept. An own
// address may be another server's at each rule, and of a range only the beginning is
// known, so such targets are compared within one rule only, for which any own address
// is the loopback.
func (c *Compiler) leadsTo(d *draft) uint64 {
	if d.more || len(d.targets) == 0 {
		return 0
	}
	sum := fnv.New64a()
	if d.ranged || slices.ContainsFunc(d.targets, func(t netip.AddrPort) bool { return c.isOwn(t.Addr()) }) {
		r := d.first.rule
		writeField(sum, []byte(r.chain.table.id.String()))
		writeField(sum, r.raw)
	}
	targets := c.served(d.targets)
	slices.SortFunc(targets, netip.AddrPort.Compare)
	for _, t := range targets {
		text, _ := t.AppendBinary(nil) // it never fails
		writeField(sum, text)
	}
	return sum.Sum64()
}

func (c *Compiler) isOwn(a netip.Addr) bool {
	_, node := c.host.node[a]
	return node || a.IsLoopback()
}

// writeField writes b with its length in front, so that fields do not run together.
func writeField(w io.Writer, b []byte) {
	n := len(b)
	_, _ = w.Write([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
	_, _ = w.Write(b)
}
