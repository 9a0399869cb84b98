// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package watch

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
	"github.com/fairlead/fairlead/test/kit/kernels"
	"github.com/fairlead/fairlead/test/kit/netns"
	"github.com/fairlead/fairlead/test/kit/wait"
)

// describe returns the types of messages and what they are about.
func describe(msgs []*ruleset.Message) string {
	var out []string
	for _, m := range msgs {
		name := m.Chain
		if m.Set != nil {
			name = m.Set.Name
		}
		if m.Type == ruleset.MsgNewGen {
			name = "end"
		}
		out = append(out, strings.TrimSpace(fmt.Sprintf("%d %s %s", m.Type, m.Table.Name, name)))
	}
	return strings.Join(out, "; ")
}

// Hooks report commits to tables with a nat chain and no others, and say of which
// commits there is nothing to report.
func TestHooksReportTablesWithNATChains(t *testing.T) {
	for _, method := range []string{MethodFentry, MethodKprobe} {
		t.Run(method, func(t *testing.T) { testHooks(t, method) })
	}
}

func testHooks(t *testing.T, method string) {
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = space.Close() })
	nft := func(script string) {
		t.Helper()
		cmd := exec.Command("nft", "-f", "-")
		var out strings.Builder
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(script), &out, &out
		if err := space.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out.String())
		}
	}
	// Made before the hooks are attached; also loads the module.
	nft("table ip old { chain pre { type nat hook prerouting priority 0; }; }\ntable ip filter { chain f { }; }\n" +
		"table ip less { chain pre { type nat hook prerouting priority 0; }; chain c { }; }")
	k, err := Open(slog.New(slog.DiscardHandler), fmt.Sprintf("/proc/self/fd/%d", space.FD()), nil, 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	s, err := k.Watch(method)
	if err != nil && !kernels.Must(method) {
		t.Logf("this kernel does not take the method: %v", err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	type commit struct {
		msgs []*ruleset.Message
		err  error
	}
	commits := make(chan commit)
	go func() {
		defer close(commits)
		for {
			msgs, err := s.Next()
			if errors.Is(err, os.ErrClosed) {
				return
			}
			commits <- commit{msgs, err}
		}
	}()
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		for range commits { // until it ends
		}
	}()
	var many strings.Builder
	for i := range 300 {
		fmt.Fprintf(&many, "add chain ip many c%d\n", i)
	}
	// Few changes, each of which takes several records.
	long := func(c string) string { return strings.Repeat(c, 250) }
	var large strings.Builder
	fmt.Fprintf(&large, "add table ip %s\nadd chain ip %[1]s pre { type nat hook prerouting priority 0; }\nadd chain ip %[1]s %s\n", long("t"), long("c"))
	fmt.Fprintf(&large, "add map ip %s %s { type ipv4_addr : verdict; }\n", long("t"), long("m"))
	for i := range 250 {
		fmt.Fprintf(&large, "add element ip %s %s { 10.0.0.%d : goto %s }\n", long("t"), long("m"), i, long("c"))
	}
	last := uint32(0) // generation that was reported
	for _, step := range []struct{ script, want string }{
		{"add rule ip filter f counter", ""},
		{"add rule ip old pre counter", "6 old pre; 15  end"},
		// The first change of a table may be that its only nat chain is deleted.
		{"delete chain ip less pre", "5 less pre; 15  end"},
		{"table ip t { chain c { counter; }; chain post { type nat hook postrouting priority 0; }; }", ""},
		{"add rule ip t c counter\ndelete table ip filter", ""},
		{"add set ip t s { type inet_service; }\nadd element ip t s { 80 }\nadd counter ip t n", ""},
		{"table inet filter { chain in { type filter hook input priority 0; }; }", ""},
		{"table netdev n { chain c { counter; }; }", ""},
		// What comes before the first nat chain is not reported: the agent dumps.
		{"add rule ip t c counter\nadd chain ip t pre { type nat hook prerouting priority 0; }\nadd rule ip t c counter", "3 t pre; 6 t c; 15  end"},
		{"add element ip t s { 81 }", "12 t s; 15  end"},
		{"add counter ip t n2", ""},
		{"add chain ip t late", "3 t late; 15  end"},
		// In a new table all of it is reported, also what is made before the nat chain.
		{"table ip6 u { chain c { counter; }; chain out { type nat hook output priority 0; }; }", "0 u; 3 u c; 3 u out; 6 u c; 15  end"},
		{"delete table ip6 u\ntable ip6 u { chain c { counter; }; }", "8 u c; 5 u c; 5 u out; 2 u; 15  end"},
		{"add rule ip6 u c counter", ""},
		// One with very many chains is not looked at in full.
		{"add table ip many\n" + many.String(), "many"},
		{large.String(), "many"},
		{"delete table ip t", "8 t c; 8 t c; 8 t c; 8 t c; 5 t c; 5 t post; 5 t pre; 5 t late; 2 t; 15  end"},
		{"add table ip t", ""},
		{"delete table ip old", "8 old pre; 5 old pre; 2 old; 15  end"},
	} {
		before, err := k.Generation()
		if err != nil {
			t.Fatal(err)
		}
		nft(step.script)
		if step.want == "" {
			now, err := k.Generation()
			reported, _, sparse, err2 := s.Reported()
			if err != nil || err2 != nil || !sparse || reported != last || now == before {
				t.Errorf("%s: generation %d after %d, reported %d, want %d, %v", step.script, now, before, reported, last, errors.Join(err, err2))
			}
			continue
		}
		got := wait.For(t, step.script, commits)
		if step.want == "many" {
			if !errors.Is(got.err, ErrMany) {
				t.Errorf("%.60s: %q, %v, want %v", step.script, describe(got.msgs), got.err, ErrMany)
			}
			last, _, _, _ = s.Reported()
			continue
		}
		if d := describe(got.msgs); got.err != nil || d != step.want {
			t.Errorf("%s: reported %q, %v, want %q", step.script, d, got.err, step.want)
			continue
		}
		end := got.msgs[len(got.msgs)-1]
		if end.Since != last || end.Generation != before+1 {
			t.Errorf("%s: generation %d since %d, want %d since %d", step.script, end.Generation, end.Since, before+1, last)
		}
		last = end.Generation
	}
}
