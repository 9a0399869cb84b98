// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// wanted is a table of publications that a book follows.
type wanted struct {
	*table.Table[port.Key, port.Publication]
	book *Book
}

func newWanted() *wanted {
	return &wanted{table.New[port.Key, port.Publication](port.Key.Compare), NewBook()}
}

// put wants a publication, or no longer if it asks for no host address.
func (w *wanted) put(p port.Publication) {
	was := w.View().Generation()
	w.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		if len(p.Decision.Host) == 0 {
			tx.Delete(p.Key)
			return
		}
		tx.Put(p.Key, p)
	})
	w.book.Update(w.View(), reconcile.Change{Base: max(was, 1), Keys: []port.Key{p.Key}})
}

// settle reports every winner active.
func (w *wanted) settle() port.Outcomes {
	for slot := range w.book.Dirty() {
		for h, k := range w.book.Decide(slot) {
			w.book.Report(Claim{k, netip.AddrPortFrom(h, slot.Port)}, port.Active, port.Reason{})
		}
		delete(w.book.Dirty(), slot)
	}
	return w.book.Outcomes()
}

func key(addr string) port.Key {
	a := netip.MustParseAddrPort(addr)
	return port.Key{Protocol: port.TCP, Address: a.Addr(), Port: a.Port()}
}

func pub(owner port.Owner, addr string, hosts ...string) port.Publication {
	p := port.Publication{Fact: port.Fact{Key: key(addr), Owner: owner}}
	for _, h := range hosts {
		p.Decision.Host = append(p.Decision.Host, netip.MustParseAddrPort(h))
	}
	return p
}

func TestPublicationsOfOneServiceAreNoConflict(t *testing.T) {
	web := port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web"}
	other := port.Owner{Kind: port.OwnerProcess, ID: "811", Name: "nginx"}
	w := newWanted()
	for _, addr := range []string{"0.0.0.0:30080", "127.0.0.1:30080", "10.0.0.2:30080"} {
		w.put(pub(web, addr, "127.0.0.1:30080"))
	}
	w.put(pub(other, "10.0.0.3:30080", "127.0.0.1:30080"))
	out := w.settle()
	if len(out) != 4 {
		t.Errorf("outcomes of %d publications", len(out))
	}
	for k, o := range out {
		state, reason := port.Active, ""
		if k.Address.String() == "10.0.0.3" {
			state, reason = port.Conflict, `127.0.0.1:30080 is held by tcp 127.0.0.1:30080 ("web")`
		}
		if len(o) != 1 || o[0].State != state || o[0].Reason.String() != reason || o[0].HostAddress.String() != "127.0.0.1:30080" {
			t.Errorf("%s: %+v", k, o)
		}
	}
	// They fail together, too.
	w.put(pub(web, "0.0.0.0:30080", "127.0.0.1:30080"))
	slot := port.Slot{Protocol: port.TCP, Port: 30080}
	for h, k := range w.book.Decide(slot) {
		w.book.Report(Claim{k, netip.AddrPortFrom(h, slot.Port)}, port.Failed, port.Because(port.SystemFailed, "no"))
	}
	for k, o := range w.book.Outcomes() {
		if want := k.Address.String() != "10.0.0.3"; (o[0].State == port.Failed) != want {
			t.Errorf("%s: %+v", k, o)
		}
	}
}

// Whatever comes and goes: each address that is asked for has an outcome, what
// changed is dirty, and nothing is left of what went.
func TestBookUnderRandomChanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	guests := []string{"0.0.0.0:80", "127.0.0.1:80", "10.0.0.1:80", "[::]:80", "[::1]:80"}
	addrs := []string{"127.0.0.1:80", "0.0.0.0:80", "[::1]:80", "[::]:80", "127.0.0.1:81"}
	owners := []port.Owner{{}, {Kind: port.OwnerService, ID: "a"}, {Kind: port.OwnerService, ID: "b"}}
	w := newWanted()
	for range 2000 {
		var ask []string
		for _, a := range addrs {
			if rng.IntN(3) == 0 {
				ask = append(ask, a)
			}
		}
		p := pub(owners[rng.IntN(len(owners))], guests[rng.IntN(len(guests))], ask...)
		before := w.book.Publication(p.Key)
		w.put(p)
		for _, h := range append(before.Decision.Host, p.Decision.Host...) {
			if _, ok := w.book.Dirty()[Claim{p.Key, h}.slot()]; !ok {
				t.Fatalf("%s of %s changed and is not dirty", h, p.Key)
			}
		}
		if rng.IntN(2) == 0 {
			continue
		}
		w.settle()
		w.book.MarkAll()
		out := w.settle()
		for k, p := range w.View().All() {
			if len(out[k]) != len(p.Decision.Host) {
				t.Fatalf("%s asks for %v and has the outcomes %+v", k, p.Decision.Host, out[k])
			}
		}
		if len(out) != w.View().Len() {
			t.Fatalf("outcomes of %d publications, want %d", len(out), w.View().Len())
		}
	}
	for k := range w.View().All() {
		w.put(port.Publication{Fact: port.Fact{Key: k}})
	}
	w.settle()
	if b := w.book; len(b.pubs)+len(b.slots)+len(b.served)+len(b.dirty)+len(b.reported) > 0 {
		t.Errorf("left: %+v", b)
	}
}
