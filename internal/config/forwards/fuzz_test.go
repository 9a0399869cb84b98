// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
)

// Whatever a file contains, it is refused, or its requests make valid rules, a change keeps all
// of them, and undoing it restores the list.
func FuzzEdit(f *testing.F) {
	for _, text := range []string{
		"", "null", "{}", fileOf(), fileOf(`{"op":"deny","all":true}`), fileOf(`{"op":"forward","demand":"web:80/tcp","to":8080,"guest":"d*"}`),
		fileOf(`{"op":"allow","protocol":"udp","port":53}`, `{"op":"deny","owner":"it's \u00fc"}`), fileOf(`{"op":"deny","op":"deny","all":true}`),
		fileOf(`{"op":"expose","protocol":"tcp","port":80,"bind":"192.0.2.1","seconds":60,"until":"2030-01-01T00:00:00Z"}`),
		fileOf(`{"op":"forward","protocol":"tcp","port":80,"onConflict":"next","bind":"all"}`) + "\n",
	} {
		f.Add([]byte(text))
	}
	permitted := func(rules.Match, rules.HostAddress) error { return nil }
	f.Fuzz(func(t *testing.T, text []byte) {
		list, err := Parse("file", text, true)
		if err != nil {
			return
		}
		if _, err := rules.Empty(rules.Asked()).WithRuntime(Rules(list)); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if again, err := Parse("file", format(list), true); err != nil || !slices.Equal(again, list) {
			t.Fatalf("%s is read again as %v, %v", text, again, err)
		}
		e := edit{list: slices.Clone(list)}
		if err := e.do(forward(8080, 18080), time.Now(), permitted); err != nil || len(e.Added) == 0 {
			return
		}
		if left := slices.DeleteFunc(slices.Clone(list), func(o Entry) bool { return slices.Contains(e.Removed, o.Request) }); len(e.list) != len(left)+1 {
			t.Fatalf("%s becomes %s", text, format(e.list))
		}
		back := edit{list: e.list}
		if err := back.do(e.Added[0].Undo(), time.Now(), permitted); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if want := slices.DeleteFunc(slices.Clone(list), func(o Entry) bool { return slices.Contains(append(e.Removed, back.Removed...), o.Request) }); !slices.Equal(back.list, want) {
			t.Fatalf("%s becomes %s", text, format(back.list))
		}
	})
}
