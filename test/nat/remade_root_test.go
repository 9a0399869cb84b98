// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
)

// A table that is made anew in one commit has the handles of the former one for other
// objects: nothing that was known of these is used.
func TestTableMadeAnewInOneCommit(t *testing.T) {
	w := newWorld(t)
	all := w.startMethods(nat.Options{Audit: time.Hour})
	nft := func(format string, args ...any) { t.Helper(); w.run(fmt.Sprintf(format, args...), "nft", "-f", "-") }
	table := func(port, server int) string {
		return fmt.Sprintf(`add table ip t
add set ip t ports { type inet_service; elements = { %d }; }
add map ip t verdicts { type inet_service : verdict; }
add chain ip t svc
add chain ip t pre { type nat hook prerouting priority -100; }
add rule ip t svc meta l4proto tcp dnat to 10.0.0.%d:1
add element ip t verdicts { %d : goto svc }
add rule ip t pre tcp dport @ports dnat to 10.0.0.%d:2
add rule ip t pre tcp dport vmap @verdicts
`, port, server, port+100, server)
	}
	want := func(port, server int) []string {
		return []string{
			fmt.Sprintf("tcp 0.0.0.0:%d [ip t] 10.0.0.%d:2", port, server),
			fmt.Sprintf("tcp 0.0.0.0:%d [ip t] 10.0.0.%d:1", port+100, server),
		}
	}
	nft("%s", table(200, 1))
	expectAll(t, all, "the first table", want(200, 1)...)
	for i := 2; i < 6; i++ {
		nft("delete table ip t\n%s", table(200+i, i))
		expectAll(t, all, "a table made anew", want(200+i, i)...)
	}
	// Several commits that are applied together.
	var b strings.Builder
	for i := range 20 {
		b.Reset()
		b.WriteString("delete table ip t\n" + table(300+i, 1+i))
		nft("%s", b.String())
	}
	expectAll(t, all, "tables made anew quickly", want(319, 20)...)
	// Without a nat chain, and with one again.
	nft("delete table ip t\nadd table ip t\nadd chain ip t svc\nadd rule ip t svc tcp dport 90 dnat to 10.0.0.1")
	expectAll(t, all, "without a nat chain")
	nft("delete table ip t\nadd table ip t\nadd chain ip t svc\nadd rule ip t svc tcp dport 91 dnat to 10.0.0.1\n" +
		"add chain ip t pre { type nat hook prerouting priority -100; }\nadd rule ip t pre jump svc")
	expectAll(t, all, "with a nat chain again", "tcp 0.0.0.0:91 [ip t] 10.0.0.1:91")
	// What nothing here concerns is followed, though it is not reported.
	for i := range 20 {
		nft("add table inet f%d\nadd chain inet f%d c\nadd rule inet f%d c counter", i, i, i)
	}
	nft("add rule ip t svc tcp dport 92 dnat to 10.0.0.1")
	expectAll(t, all, "after other commits", "tcp 0.0.0.0:91 [ip t] 10.0.0.1:91", "tcp 0.0.0.0:92 [ip t] 10.0.0.1:92")
	for _, x := range all {
		if st := x.src.Status(); st.Drift != 0 {
			t.Errorf("%s: drift %d", x.method, st.Drift)
		}
	}
}

// Audits take place though commits that are not reported raise the generation.
func TestAuditBetweenOtherCommits(t *testing.T) {
	w := newWorld(t)
	all := w.startMethods(nat.Options{Audit: time.Second})
	w.run(pre+"add rule ip t pre tcp dport 80 dnat to 10.0.0.1\nadd table ip f\nadd chain ip f c\n", "nft", "-f", "-")
	expectAll(t, all, "a rule", "tcp 0.0.0.0:80 [ip t] 10.0.0.1:80")
	dumps := func(x running) uint64 { return x.src.Status().Dumps }
	before := make([]uint64, len(all))
	for i, x := range all {
		before[i] = dumps(x)
	}
	w.run("add rule ip f c counter\n", "nft", "-f", "-")
	for i, x := range all {
		eventually(t, "two audits on "+x.method, func() bool { return dumps(x) >= before[i]+2 })
		if st := x.src.Status(); st.Drift != 0 || !strings.HasPrefix(x.method, nat.MethodGeneration) && st.Lost != 0 {
			t.Errorf("%s: drift %d, lost %d", x.method, st.Drift, st.Lost)
		}
	}
}
