// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// Whatever a file contains, a change is refused or keeps all of its rules and lines, and
// undoing it restores the rules.
func FuzzEdit(f *testing.F) {
	for _, text := range []string{
		"", "rules:", "rules: []\n", byHand, "rules:\r\n- action: deny\r\n", "# c\nrules:\n    - {action: deny}\n    # d\n",
		"\ufeffrules:\n- action: deny\n", "\ufeff",
		"rules:\n- name: 'a\n\n    # b'\n  action: deny\n", "rules:\n- name: |\n    x\n  action: deny", "---\nrules:\n- action: deny\n...\n", "rules :\n- action: deny",
	} {
		f.Add(text)
	}
	for _, lineBreak := range []string{"\r", "\u0085", "\u2028", "\u2029"} {
		f.Add(strings.Repeat(lineBreak, 6) + "#")
		f.Add("# c" + lineBreak + "rules:\n- action: deny\n")
	}
	permitted := func(rules.Match, rules.HostAddress) error { return nil }
	f.Fuzz(func(t *testing.T, text string) {
		d, err := parse("file", text)
		if err != nil || d.index("forward 8080/tcp") >= 0 || d.index("allow 8080/tcp") >= 0 {
			return
		}
		text = strings.TrimPrefix(text, yamltree.ByteOrderMark)
		next, _, added, err := forward(8080, 18080).change(d, time.Now(), permitted)
		if err != nil {
			return
		}
		i := next.index(added[0])
		if got := slices.Delete(slices.Clone(next.rules), i, i+1); !slices.EqualFunc(got, d.rules, equal) {
			t.Fatalf("%q becomes %q: other rules", text, next.text)
		}
		for line := range strings.Lines(text) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "rules:") && !strings.Contains(next.text, line) {
				t.Fatalf("%q becomes %q: line %q is lost", text, next.text, line)
			}
		}
		back, removed, _, err := tcp(Remove, 8080).change(next, time.Now(), permitted)
		if err == nil && (len(removed) == 0 || !slices.EqualFunc(back.rules, slices.DeleteFunc(slices.Clone(d.rules), func(r rules.Rule) bool {
			return slices.Contains(removed, r.Name)
		}), equal)) {
			t.Fatalf("%q becomes %q: rules differ", next.text, back.text)
		}
	})
}
