// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// diff is what a decision changes of a publication.
type diff struct {
	claims  []planned   // that it has from now on
	ended   []*claim    // that it had
	hide    bool        // flows from outside are reset: an address closes that was exposed
	denied  port.Reason // why it has no claim, zero if it has one
	pending bool        // the denial is provisional: no flow is reset
}

// planned is a claim that a publication is to have.
type planned struct {
	addr  netip.AddrPort
	stays *claim // nil if it is new
}

// plan returns what a decision changes of a publication with these claims and names, which
// is exposed or not. want are the addresses that the decision gives it.
func plan(old []*claim, names []string, exposed bool, want []netip.AddrPort, d port.Decision) (out diff) {
	stays := make(map[*claim]bool, len(old))
	for _, a := range want {
		p := planned{addr: a}
		if i := slices.IndexFunc(old, func(c *claim) bool { return c.addr == a && c.isOf(names) }); i >= 0 {
			p.stays, stays[old[i]] = old[i], true
		}
		out.claims = append(out.claims, p)
	}
	for _, c := range old {
		if !stays[c] {
			out.ended = append(out.ended, c)
			out.hide = out.hide || exposed && !c.addr.Addr().IsLoopback()
		}
	}
	if len(want) == 0 {
		out.denied, out.pending = d.Reason, d.Pending()
		if out.denied.IsZero() {
			out.denied = d.Rule.Because(port.NoHostAddress)
		}
	}
	return out
}
