// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func TestPlan(t *testing.T) {
	claimOf := func(a netip.AddrPort, names ...string) *claim {
		c := new(claim)
		c.addr, c.names = a, names
		return c
	}
	lo, all, moved := at(lo4, 80), at(any4, 80), at(lo4, 81)
	loClaim, allClaim, named := claimOf(lo), claimOf(all), claimOf(lo, "web:80", "web:http")
	allowed := port.Decision{Allow: true}
	denied, pending := port.Because(port.DeniedByRule), port.Because(port.OwnerAwaited)
	type addrs = []netip.AddrPort
	type list = []*claim
	for name, c := range map[string]struct {
		old     list
		names   []string
		exposed bool
		want    addrs
		d       port.Decision
		diff    diff
	}{
		"new":   {want: addrs{lo, all}, d: allowed, diff: diff{claims: []planned{{lo, nil}, {all, nil}}}},
		"same":  {old: list{loClaim}, exposed: true, want: addrs{lo}, d: allowed, diff: diff{claims: []planned{{lo, loClaim}}}},
		"order": {old: list{loClaim, allClaim}, want: addrs{all, lo}, d: allowed, diff: diff{claims: []planned{{all, allClaim}, {lo, loClaim}}}},
		"moved": {old: list{loClaim}, want: addrs{moved}, d: allowed, diff: diff{claims: []planned{{moved, nil}}, ended: list{loClaim}}},
		"another name": {
			old: list{named}, names: []string{"web:http"}, want: addrs{lo}, d: allowed, diff: diff{claims: []planned{{lo, named}}},
		},
		"another server": {
			old: list{named}, names: []string{"db:80"}, want: addrs{lo}, d: allowed, diff: diff{claims: []planned{{lo, nil}}, ended: list{named}},
		},
		"exposed no more": {
			old: list{loClaim, allClaim}, exposed: true, want: addrs{lo}, d: allowed,
			diff: diff{claims: []planned{{lo, loClaim}}, ended: list{allClaim}, hide: true},
		},
		"exposed, and not on the loopback any more": {
			old: list{loClaim, allClaim}, exposed: true, want: addrs{all}, d: allowed,
			diff: diff{claims: []planned{{all, allClaim}}, ended: list{loClaim}},
		},
		"narrower, without an exposure": {
			old: list{loClaim, allClaim}, want: addrs{lo}, d: allowed,
			diff: diff{claims: []planned{{lo, loClaim}}, ended: list{allClaim}},
		},
		"denied":       {old: list{loClaim}, d: port.Decision{Reason: denied}, diff: diff{ended: list{loClaim}, denied: denied}},
		"still denied": {d: port.Decision{Reason: denied}, diff: diff{denied: denied}},
		"pending":      {d: port.Decision{Reason: pending}, diff: diff{denied: pending, pending: true}},
		"nowhere":      {d: allowed, diff: diff{denied: port.RuleRef{}.Because(port.NoHostAddress)}},
	} {
		if got := plan(c.old, c.names, c.exposed, c.want, c.d); !reflect.DeepEqual(got, c.diff) {
			t.Errorf("%s: %+v, want %+v", name, got, c.diff)
		}
	}
}
