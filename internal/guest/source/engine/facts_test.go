// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
)

// notified returns a table and the keys of its last notification, sorted by kind.
func notified() (*Table, func() []registry.AttributionKey) {
	var last []registry.AttributionKey
	t := new(Table)
	t.Notify(func(changed []registry.AttributionKey) { last = append(last, changed...) })
	return t, func() (out []registry.AttributionKey) {
		for _, c := range last {
			if !slices.Contains(out, c) {
				out = append(out, c)
			}
		}
		last = nil
		return out
	}
}

func TestFactsNotifyWhatChanged(t *testing.T) {
	table, changed := notified()
	addr := netip.MustParseAddr("10.0.0.2")
	web := Fact{Owner: port.Owner{ID: id1, Name: "web"}, ID: id1, Cgroup: 5, Path: "/docker/" + id1, Addresses: []netip.Addr{addr}}
	all := []registry.AttributionKey{{Cgroup: 5}, {Path: "/docker/" + id1}, {Path: id1}, {Address: addr}}
	want := func(what string, keys ...registry.AttributionKey) {
		t.Helper()
		if got := changed(); !reflect.DeepEqual(got, keys) && len(got)+len(keys) > 0 {
			t.Errorf("%s: notified %v, want %v", what, got, keys)
		}
	}
	table.Put("a", web)
	want("a new fact", all...)
	table.Put("a", web)
	want("the same fact")
	renamed := web
	renamed.Owner.Name = "www"
	table.Put("a", renamed)
	want("another name", all...)
	moved := renamed
	moved.Addresses = []netip.Addr{netip.MustParseAddr("10.0.0.3")}
	table.Put("a", moved)
	want("another address", append(slices.Clone(all), registry.AttributionKey{Address: netip.MustParseAddr("10.0.0.3")})...)
	table.Retain(func(string, Fact) bool { return true })
	want("a list that says the same")
	table.Swap([]string{"a"}, map[string]Fact{"a": moved})
	want("a swap for the same")
	table.Remove("b")
	want("the end of what was not there")
	table.Retain(func(string, Fact) bool { return false })
	if _, ok := table.ByCgroup(5); ok {
		t.Error("a fact that was removed is still known")
	}
	want("the end", registry.AttributionKey{Cgroup: 5}, registry.AttributionKey{Path: "/docker/" + id1}, registry.AttributionKey{Path: id1}, registry.AttributionKey{Address: netip.MustParseAddr("10.0.0.3")})
}

// When facts notify, their answers are the new ones.
func TestFactsAreCurrentWhenNotified(t *testing.T) {
	table := new(Table)
	var seen []string
	table.Notify(func([]registry.AttributionKey) {
		o, _ := table.ByCgroup(5)
		seen = append(seen, o.Name)
	})
	table.Put("a", Fact{Owner: port.Owner{Name: "web"}, Cgroup: 5})
	table.Swap([]string{"a"}, map[string]Fact{"b": {Owner: port.Owner{Name: "db"}, Cgroup: 5}})
	table.Remove("b")
	if want := []string{"web", "db", ""}; !slices.Equal(seen, want) {
		t.Errorf("the answers were %q when notified, want %q", seen, want)
	}
}
