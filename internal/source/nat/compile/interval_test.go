// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"math/rand/v2"
	"net/netip"
	"testing"
)

func randomPorts(r *rand.Rand) set[uint16] {
	var in []span[uint16]
	for range r.IntN(5) {
		lo := uint16(r.IntN(40))
		in = append(in, span[uint16]{lo, lo + uint16(r.IntN(8))})
	}
	if r.IntN(4) == 0 {
		in = append(in, span[uint16]{65000, 65535})
	}
	if r.IntN(8) == 0 {
		return nil
	}
	return portOrder.normal(in)
}

// Set arithmetic agrees with membership, value by value.
func TestIntervals(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		a, b := randomPorts(r), randomPorts(r)
		and, not, minus := portOrder.intersect(a, b), portOrder.complement(a), portOrder.subtract(a, b)
		covers := true
		for _, p := range []uint16{0, 1, 2, 3, 5, 8, 10, 11, 12, 20, 30, 39, 40, 46, 47, 48, 49, 100, 64999, 65000, 65534, 65535} {
			inA, inB := portOrder.contains(a, p), portOrder.contains(b, p)
			if portOrder.contains(and, p) != (inA && inB) || portOrder.contains(not, p) == inA || portOrder.contains(minus, p) != (inA && !inB) {
				t.Fatalf("port %d of %v and %v: and %v, not %v, minus %v", p, a, b, and, not, minus)
			}
		}
		for p := range 1 << 16 {
			if portOrder.contains(b, uint16(p)) && !portOrder.contains(a, uint16(p)) {
				covers = false
				break
			}
		}
		if portOrder.covers(a, b) != covers {
			t.Fatalf("%v covers %v: %v", a, b, !covers)
		}
	}
}

func TestAddressSets(t *testing.T) {
	p := func(s string) set[netip.Addr] {
		return addrOrder4.normal([]span[netip.Addr]{prefixSpan(netip.MustParsePrefix(s))})
	}
	if !p("0.0.0.0/0").all() {
		t.Error("0.0.0.0/0 is not everything")
	}
	if !mostAddrs(addrOrder4.complement(p("127.0.0.0/8"))) || mostAddrs(p("10.0.0.0/8")) {
		t.Error("mostAddrs")
	}
	if got := addrsText(addrOrder4.subtract(p("10.0.0.0/8"), p("10.128.0.0/9"))); got != "10.0.0.0/9" {
		t.Errorf("got %s", got)
	}
}

func TestInterfaces(t *testing.T) {
	in, not := func(n ...string) ifaces { return ifaceIn(false, n...) }, func(n ...string) ifaces { return ifaceIn(true, n...) }
	names := []string{"", "lo", "eth0", "veth0", "veth1", "docker0", "d"}
	all := []ifaces{{}, in(), not(), in("lo"), in("eth0", "lo"), in("veth*"), in("veth0"), in("*"), not("docker0"), not("veth*"), not("veth0", "lo"), in("")}
	for _, a := range all {
		for _, b := range all {
			and := a.intersect(b)
			for _, n := range names {
				if a.contains(n) && b.contains(n) && !and.contains(n) {
					t.Errorf("%v and %v misses %q", a, b, n)
				}
				if a.covers(b) && b.contains(n) && !a.contains(n) {
					t.Errorf("%v does not cover %v: %q", a, b, n)
				}
				if a.disjoint(b) && a.contains(n) && b.contains(n) {
					t.Errorf("%v and %v share %q", a, b, n)
				}
				if a.contains(n) == a.invert().contains(n) {
					t.Errorf("%v and its contrary agree on %q", a, n)
				}
			}
		}
	}
}
