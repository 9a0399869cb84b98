// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
)

// With a hook, legacy tables need no polling: changes of the watched namespace
// are reported, those of others are not.
func TestLegacyWake(t *testing.T) { legacyWake(t, "") }

func legacyWake(t *testing.T, method string) {
	var methods []string
	if method != "" {
		methods = []string{method}
	}
	w, other := newWorld(t), newWorld(t)
	l := w.legacyHook(methods...)
	t.Logf("method %s", l.Method())
	src, f, _ := w.start(nat.Options{LegacyPoll: time.Hour, Wake: l})
	eventually(t, "a first set", f.ready)
	rule := func(w *world, tool, op string, port int, to string) {
		t.Helper()
		w.run("", tool, "-w", "-t", "nat", op, "PREROUTING", "-p", "tcp", "--dport", fmt.Sprint(port), "-j", "DNAT", "--to-destination", to)
	}
	rule(w, "iptables-legacy", "-A", 80, "10.0.0.1")
	expect(t, f, "append", "tcp 0.0.0.0:80 [legacy ip nat] 10.0.0.1:80")
	rule(w, "ip6tables-legacy", "-A", 80, "[fd00::1]")
	expect(t, f, "append", "tcp 0.0.0.0:80 [legacy ip nat] 10.0.0.1:80", "tcp [::]:80 [legacy ip6 nat] [fd00::1]:80")
	reads := src.Status().LegacyReads
	const others = 20
	for p := range others {
		rule(other, "iptables-legacy", "-A", 81+p, "10.0.0.1")
	}
	rule(w, "iptables-legacy", "-D", 80, "10.0.0.1")
	expect(t, f, "delete", "tcp [::]:80 [legacy ip6 nat] [fd00::1]:80")
	// Both tables, for each of the two calls that a replacement is, and for what was
	// not read yet of the one before.
	if n := src.Status().LegacyReads - reads; n >= others {
		t.Errorf("%d reads for one replacement, and %d elsewhere", n, others)
	}
}
