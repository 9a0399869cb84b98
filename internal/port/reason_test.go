// SPDX-License-Identifier: Apache-2.0

package port

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestCodesAreComplete(t *testing.T) {
	names := make(map[string]bool)
	for c := Unstated + 1; c < codes; c++ {
		info := c.info()
		if info.name == "" || info.text == "" || names[info.name] {
			t.Errorf("code %d: %+v: want a name of its own, and a text", c, info)
		}
		names[info.name] = true
		if info.kind == 0 || info.kind != Notes && Because(c).Verdict() == "" || info.kind != Notes && Because(c).Advice() == "" {
			t.Errorf("%s: %+v: want a kind, and what to say and to do", c, info)
		}
		if n := strings.Count(strings.ReplaceAll(info.text, rulePlace, ""), "{"); n != c.Places() || n > MaxArgs {
			t.Errorf("%s: %d places in %q, want {0} to {%d}, each once", c, n, info.text, MaxArgs-1)
		}
	}
}

var update = flag.Bool("update", false, "write the golden file")

// The codes are the interface for programs, and their texts for people: a change shows here.
func TestCodesAreThoseOfTheGoldenFile(t *testing.T) {
	const golden = "testdata/codes.golden"
	var b strings.Builder
	for c := Unstated + 1; c < codes; c++ {
		r := Because(c, "{0}", "{1}", "{2}")
		fmt.Fprintf(&b, "%s: %s (%s)\n", c, c.info().text, r.Verdict())
	}
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || string(want) != b.String() {
		t.Errorf("%v; got\n%s", err, b.String())
	}
}

// Everything of a reason but its text decides whether it is the same.
func TestReasonsNameRules(t *testing.T) {
	rule := RuleRef{Kind: RuleDeny, Number: 2, Name: "all"}
	guest, host := rule.Because(DeniedByRule), rule.Here(true).Because(DeniedByRule)
	if guest == host || guest.Rule() != rule || guest.String() != "denied by runtime rule 2 (deny all)" || host.String() != "denied by host runtime rule 2 (deny all)" {
		t.Errorf("%q, %q", guest, host)
	}
	if guest.Verdict() != VerdictDenied || host.Verdict() != VerdictHostDenied || guest.Kind() != Denies || !guest.Code().NamesRule() {
		t.Errorf("verdicts %s, %s", guest.Verdict(), host.Verdict())
	}
	d := Decision{Rule: rule, Reason: Because(OwnerAwaited)}
	if !d.Pending() || d.Withheld() || (Decision{Allow: true, Reason: Because(OwnerAwaited)}).Pending() || !(Decision{Reason: Because(Unlistened)}).Withheld() {
		t.Error("the kind of the reason does not decide")
	}
}

func TestReasonText(t *testing.T) {
	limited, bound := Because(FromSources, "10.0.0.0/8"), Because(Unlistened)
	for _, c := range []struct {
		reason Reason
		text   string
		code   Code
		reach  Reach
	}{
		{Reason{}, "", Unstated, Everybody},
		{bound, "bound, not listening", Unlistened, Nobody},
		{limited, "limited to source 10.0.0.0/8", FromSources, Some},
		{Join(bound, limited, bound), "bound, not listening; limited to source 10.0.0.0/8", Unlistened, Some},
		{Join(), "", Unstated, Everybody},
		{Because(FromSources, "{1}"), "limited to source {1}", FromSources, Some},
	} {
		if got := c.reason.String(); got != c.text || c.reason.Code() != c.code || c.reason.Reach() != c.reach {
			t.Errorf("%q, code %s, reach %d; want %q, %s, %d", got, c.reason.Code(), c.reason.Reach(), c.text, c.code, c.reach)
		}
	}
	if Because(FromSources, "10.0.0.0/8") != limited || Join(limited) != limited || Join(bound, limited) == Join(limited, bound) {
		t.Error("reasons do not compare by what they say")
	}
	if got := limited.Args(); !slices.Equal(got, []string{"10.0.0.0/8"}) {
		t.Error("arguments: " + strconv.Quote(strings.Join(got, ",")))
	}
}
