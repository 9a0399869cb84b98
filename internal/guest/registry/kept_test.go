// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/fairlead/fairlead/internal/port"
)

// What is kept of a binding fits the allocator's class of 208 bytes on a machine of 64 bits,
// where a port.Binding takes 352, and its place in a slot that of 64.
func TestKeptIsSmall(t *testing.T) {
	if size := unsafe.Sizeof(kept{}); size > 208 {
		t.Errorf("what is kept of a binding takes %d bytes, want at most 208", size)
	}
	if size := unsafe.Sizeof(member{}); size > 64 {
		t.Errorf("its place takes %d bytes, want at most 64", size)
	}
}

// All that a binding has is kept, but for when its event was. A change of it is noticed, but
// for times and the handle.
func TestAllOfABindingIsKept(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:80")
	b := port.Binding{
		Key: port.Key{Protocol: port.TCP, Address: at.Addr(), Port: at.Port()}, Origin: port.Origin{Source: "nat", ID: "1"},
		Mapped: true, Inner: true, Paused: true, Searching: true, Maker: port.MakerCNI, Withheld: port.Because(port.Unlistened), Target: 1, Dial: []netip.AddrPort{at},
		Doubt: "d", Owner: port.Owner{ID: "7"}, Hints: port.Hints{Cgroup: 3}, Detail: port.NewDetail("line"), Since: time.Unix(1, 0), Observed: 4,
	}
	k := (&source{name: "nat"}).keep(&b)
	if !k.same(&b) {
		t.Error("an equal binding is not the same")
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[port.Binding]()) {
		other := b
		field := reflect.ValueOf(&other).Elem().FieldByIndex(f.Index)
		if field.IsZero() {
			t.Errorf("the test has no %s", f.Name)
		}
		v := reflect.ValueOf(k).Elem().FieldByName(f.Name)
		if f.Name != "Observed" && (!v.IsValid() || !reflect.DeepEqual(reflect.Indirect(v).Interface(), field.Interface())) {
			t.Errorf("%s is not kept: %v", f.Name, v)
		}
		field.SetZero()
		if same := k.same(&other); same != slices.Contains([]string{"Since", "Observed"}, f.Name) {
			t.Errorf("without its %s it is the same: %v", f.Name, same)
		}
	}
}

// What is equal in bindings that follow each other is kept once, as is where a port appears
// if it is dialled there.
func TestEqualPartsAreShared(t *testing.T) {
	r := New(Options{Rules: loopback{}, Logger: slog.New(slog.DiscardHandler)})
	f := r.Feed("socket")
	one, two, other := in(binding("1", "0.0.0.0:80", 7), 9), in(binding("2", "0.0.0.0:81", 7), 9), in(binding("3", "0.0.0.0:82", 8), 9)
	f.Replace([]port.Binding{one, two, other})
	of := func(b port.Binding) *kept { return r.slots[b.Slot()][0].binding }
	a, b, c := of(one), of(two), of(other)
	if a.Owner != b.Owner || a.Hints != b.Hints || a.Hints != c.Hints {
		t.Error("equal parts are kept twice")
	}
	if a.Owner == c.Owner || c.Owner.ID != "8" || a.Owner.ID != "7" {
		t.Errorf("owned by %+v and %+v, want 7 and 8", a.Owner, c.Owner)
	}
	for _, p := range r.Publications().View().All() {
		if &p.Dial[0] != &p.Decision.Host[0] {
			t.Errorf("%s: its address is kept twice", p.Key)
		}
	}
}
