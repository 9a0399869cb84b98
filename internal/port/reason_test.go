// SPDX-License-Identifier: Apache-2.0

package port

import (
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
