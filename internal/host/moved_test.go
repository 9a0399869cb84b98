// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// onConflict is a policy whose rule allows all and says what to do on a conflict.
func onConflict(t *testing.T, c port.OnConflict) Policy {
	t.Helper()
	return policy(t, rules.Loopback(), rules.Rule{OnConflict: c})
}

// hold listens at a port of the host until the test ends, or until it is closed.
func hold(t *testing.T) (net.Listener, uint16) {
	t.Helper()
	ln, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", ports.Free(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln, ln.Addr().(*net.TCPAddr).AddrPort().Port()
}

// A port that is in use is opened at another one, which its users find again after a
// restart of the host, also if the first one is free then.
func TestMovedPortIsStable(t *testing.T) {
	for _, c := range []port.OnConflict{port.OnConflictNext, port.OnConflictAny} {
		t.Run(c.String(), func(t *testing.T) {
			ln, p := hold(t)
			file := filepath.Join(t.TempDir(), "state", "moved.json")
			k := key(port.TCP, any4, p)
			var first netip.AddrPort
			for i := range 2 {
				a := newAgent(t, "vm")
				a.greeter(k, "hello")
				a.begins(snapshot(1, pub(k)))
				_, stop := start(t, Options{Policy: onConflict(t, c), MovedFile: file}, a)
				o := a.wants(k, port.Active)
				if want := fmt.Sprintf("instead of host port %d, which was in use", p); o.Reason.String() != want {
					t.Errorf("reason %q, want %q", o.Reason, want)
				}
				n := o.HostAddress.Port()
				if c == port.OnConflictNext && n <= p || c == port.OnConflictAny && (n < anyFirst || n > anyLast) {
					t.Errorf("port %d instead of %d", n, p)
				}
				if got := greeting(t, o.HostAddress); got != "hello" {
					t.Errorf("%q at %s", got, o.HostAddress)
				}
				if i == 0 {
					first = o.HostAddress
					_ = ln.Close()
				} else if o.HostAddress != first {
					t.Errorf("after a restart %s, before %s", o.HostAddress, first)
				}
				stop()
			}
		})
	}
}

// What was chosen for a guest that is not configured any more is forgotten with the next choice;
// that for a guest which is away is not.
func TestMovesOfConfiguredGuestsOnlyRemain(t *testing.T) {
	_, p := hold(t)
	file := filepath.Join(t.TempDir(), "moved.json")
	k := key(port.TCP, any4, p)
	away, gone := ID{"away", p80}, ID{"gone", p80}
	if err := writeMoved(file, []remembered{
		{away.Guest, port.TCP, any4, 80, move{80, 20080}}, {gone.Guest, port.TCP, any4, 80, move{80, 20081}},
	}); err != nil {
		t.Fatal(err)
	}
	a, b := newAgent(t, "vm"), newAgent(t, "away")
	b.drop(errors.New("it is off"))
	a.begins(snapshot(1, pub(k)))
	_, stop := start(t, Options{Policy: onConflict(t, port.OnConflictNext), MovedFile: file}, a, b)
	a.wants(k, port.Active)
	stop()
	got := loadMoved(file, slog.New(slog.DiscardHandler))
	if got[away] != (move{80, 20080}) || got[gone] != (move{}) || got[ID{"vm", k}].Wanted != p || len(got) != 2 {
		t.Errorf("remembered: %v", got)
	}
}

// nobody knows no holder of any port.
type nobody struct{}

func (nobody) Holders(context.Context, []Socket) (map[Socket]Holder, error) { return nil, nil }

// A moved port never takes the port that another publication asks for, whichever comes
// first; and of two guests that ask for one port, the second is moved.
func TestMovedPortYields(t *testing.T) {
	_, p := hold(t)
	a := newAgent(t, "vm")
	k, next := key(port.TCP, any4, p), key(port.TCP, any4, p+1)
	a.begins(snapshot(1, pub(k)))
	start(t, Options{Policy: onConflict(t, port.OnConflictNext)}, a)
	a.wants(k, port.Active)
	a.say(put(1, pub(next)))
	eventually(t, "the port is its own publication's", func() bool {
		o, m := a.heard(next), a.heard(k)
		return len(o) == 1 && o[0].State == port.Active && (o[0].HostAddress.Port() == p+1 || o[0].Reason.String() != "") &&
			len(m) == 1 && m[0].State == port.Active && m[0].HostAddress != o[0].HostAddress
	})
}

func TestSecondGuestIsMoved(t *testing.T) {
	ln, p := hold(t)
	_ = ln.Close()
	k := key(port.TCP, any4, p)
	first, second := newAgent(t, "first"), newAgent(t, "second")
	first.begins(snapshot(1, pub(k)))
	second.begins(snapshot(1, pub(k)))
	start(t, Options{Policy: onConflict(t, port.OnConflictNext)}, first, second)
	if a, b := first.wants(k, port.Active), second.wants(k, port.Active); a.HostAddress == b.HostAddress {
		t.Errorf("both at %s", a.HostAddress)
	}
}

// Where no other port is free, the wanted one is waited for, and the reason says so while the
// rule lets the port move: whoever has it, and whichever rule comes next.
func TestNoOtherPort(t *testing.T) {
	for _, n := range []uint16{20000, 65535} {
		for _, held := range []string{"by another program", "by another port"} {
			t.Run(fmt.Sprintf("%d is held %s", n, held), func(t *testing.T) {
				network := newMemory()
				for i := range maxTries + 1 {
					network.take(at(lo4, uint16(min(int(n)+i, 65535))).String(), true)
				}
				lost := port.Fact{Key: key(port.TCP, lan, n), Decision: port.Decision{Allow: true, Host: []netip.AddrPort{at(lo4, n)}}}
				pubs := []port.Fact{lost}
				if held == "by another port" {
					network.take(at(lo4, n).String(), false)
					pubs = append(pubs, pub(key(port.TCP, any4, n)))
				}
				h := idle(t, Options{Network: network, Policy: onConflict(t, port.OnConflictNext), Holders: nobody{}}, "vm")
				if err := h.guests[0].applyWanted(t.Context(), whole(1, pubs...)); err != nil {
					t.Fatal(err)
				}
				why := func(c port.OnConflict, want string) {
					t.Helper()
					h.SetPolicy(onConflict(t, c))
					o := h.guests[0].state.pubs[lost.Key].outcomes()
					if len(o) != 1 || o[0].State != port.Conflict || o[0].HostAddress.Port() != n || strings.Contains(o[0].Reason.String(), "; onConflict:") != (want != "") ||
						!strings.HasSuffix(o[0].Reason.String(), want) {
						t.Errorf("onConflict %s: %+v", c, o)
					}
				}
				const gaveUp = "; onConflict: next found none of up to 64 other ports free; any tries 20000 to 32767"
				why(port.OnConflictNext, gaveUp)
				why(port.OnConflictWait, "")
				why(port.OnConflictNext, gaveUp)
			})
		}
	}
}

// Publications that share few free ports get the same ones whatever the order in which they
// come, and no two of them the same.
func TestOrderOfArrivalChoosesNoPort(t *testing.T) {
	const first, publications, busy, orders = 20000, 24, 16, 40
	for _, c := range []port.OnConflict{port.OnConflictNext, port.OnConflictAny} {
		t.Run(c.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, uint64(c)))
			var all []port.Fact
			for i := range uint16(publications) {
				k := key(port.TCP, netip.AddrFrom4([4]byte{10, 0, byte(i), 1}), first+i/3) // three want one port
				all = append(all, port.Fact{Key: k, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{at(lo4, k.Port)}}})
			}
			taken := r.Perm(2 * publications)[:busy]
			var want map[port.Key]netip.AddrPort
			for order := range orders {
				network := newMemory()
				for _, i := range taken {
					network.take(at(lo4, first+uint16(i)).String(), true)
				}
				got := opened(t, Options{Network: network, Policy: onConflict(t, c), Holders: nobody{}}, r, all)
				holds := map[netip.AddrPort]port.Key{}
				for k, a := range got {
					if other, twice := holds[a]; twice {
						t.Errorf("order %d: %s and %s are both at %s", order, k, other, a)
					}
					holds[a] = k
				}
				if want == nil {
					want = got
				}
				if len(got) != publications || !maps.Equal(got, want) {
					t.Fatalf("order %d: opened\n%v\nbefore\n%v", order, got, want)
				}
			}
		})
	}
}

// Guests that come at the same time, and rules that change meanwhile, give no two publications
// the same port.
func TestGuestsChoosePortsAtTheSameTime(t *testing.T) {
	const publications = 20
	network := newMemory()
	for i := range publications / 2 {
		network.take(at(lo4, uint16(20000+2*i)).String(), true)
	}
	var pubs []port.Fact
	for i := range uint16(publications) {
		pubs = append(pubs, pub(key(port.TCP, any4, 20000+i)))
	}
	agents := []*agent{newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "c")}
	for _, a := range agents {
		a.begins(snapshot(1), put(1, pubs[:publications/2]...), put(2, pubs[publications/2:]...))
	}
	h, _ := start(t, Options{Network: network, Policy: onConflict(t, port.OnConflictNext), Holders: nobody{}}, agents...)
	for range 10 {
		h.SetPolicy(onConflict(t, port.OnConflictNext))
	}
	for _, a := range agents {
		a.settled(3)
	}
	eventually(t, "all are open", func() bool {
		open := 0
		for _, p := range h.View().All() {
			if p.State() == port.Active {
				open++
			}
		}
		return open == len(agents)*publications
	})
	holds := map[netip.AddrPort]ID{}
	for id, p := range h.View().All() {
		for _, o := range p.Outcomes {
			if other, twice := holds[o.HostAddress]; twice {
				t.Errorf("%v and %v are both at %s", id, other, o.HostAddress)
			}
			holds[o.HostAddress] = id
			if !network.isOpen(o.HostAddress) {
				t.Errorf("%v: %s is not open", id, o.HostAddress)
			}
		}
	}
	if n := h.Stats().Listeners; n != len(agents)*publications {
		t.Errorf("%d listeners are open", n)
	}
}

// A port that was chosen for a publication that is away, or of another guest, is not chosen
// for another one: whoever comes first after a restart, each finds its own.
func TestChosenPortIsKeptForItsPublication(t *testing.T) {
	for _, c := range []port.OnConflict{port.OnConflictNext, port.OnConflictAny} {
		t.Run(c.String(), func(t *testing.T) {
			network := newMemory()
			network.take("127.0.0.1:80", true)
			h := idle(t, Options{Network: network, Policy: onConflict(t, c), Holders: nobody{}}, "a", "b")
			a, b := h.guests[0], h.guests[1]
			k, other := key(port.TCP, any4, 80), key(port.TCP, any4, 90)
			set := func(g *guest, generation uint64, pubs ...port.Fact) {
				t.Helper()
				if err := g.applyWanted(t.Context(), whole(generation, pubs...)); err != nil {
					t.Fatal(err)
				}
			}
			chosen := func(g *guest, k port.Key) uint16 {
				t.Helper()
				o := g.state.pubs[k].outcomes()
				if len(o) != 1 || o[0].State != port.Active {
					t.Fatalf("%+v", o)
				}
				return o[0].HostAddress.Port()
			}
			set(a, 1, pub(k))
			first := chosen(a, k)
			set(a, 2)

			// Of another guest, and another one of this guest, that would try it first.
			h.state.moved[ID{"b", other}] = move{80, first}
			delete(h.state.moved, ID{"a", k})
			set(a, 3, pub(k))
			second := chosen(a, k)
			set(b, 1, pub(other, at(lo4, 80)))
			if got := chosen(b, other); got != first || second == first {
				t.Errorf("%s has %d instead of its %d, and the other guest %d", other, got, first, second)
			}
			set(a, 4)
			h.state.moved[ID{"a", other}] = move{80, second} // not here
			delete(h.state.moved, ID{"a", k})
			set(a, 5, pub(k))
			if got := chosen(a, k); got == second || got == first {
				t.Errorf("%s has %d, which is another's", k, got)
			}
			set(a, 6, pub(other, at(lo4, 80)))
			if got := chosen(a, other); got != second {
				t.Errorf("%s has %d instead of its %d", other, got, second)
			}
		})
	}
}

// opened returns where the publications of a guest are open that come in a random order.
func opened(t *testing.T, opt Options, r *rand.Rand, all []port.Fact) map[port.Key]netip.AddrPort {
	t.Helper()
	h := idle(t, opt, "vm")
	defer h.withdraw()
	g := h.guests[0]
	if err := g.applyWanted(t.Context(), whole(1)); err != nil {
		t.Fatal(err)
	}
	all = slices.Clone(all)
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for generation := uint64(1); len(all) > 0; generation++ {
		n := 1 + r.IntN(min(3, len(all)))
		if err := g.applyWanted(t.Context(), change(generation+1, all[:n]...)); err != nil {
			t.Fatal(err)
		}
		all = all[n:]
	}
	got := map[port.Key]netip.AddrPort{}
	for k, p := range g.state.pubs {
		for _, o := range p.outcomes() {
			if o.State == port.Active {
				got[k] = o.HostAddress
			}
		}
	}
	return got
}

// A guest whose conflicts had many ports tried waits for the wanted ones.
func TestMovesOfAGuestAreLimited(t *testing.T) {
	p := ports.Free(t)
	h := idle(t, Options{Policy: onConflict(t, port.OnConflictNext)}, "vm")
	g, k := h.guests[0], key(port.TCP, lan, p)
	var first []port.Fact
	for i := range uint16(3) { // they take precedence
		first = append(first, pub(key(port.TCP, any4, p+i)))
	}
	tried := func(limit int) move {
		t.Helper()
		g.limits.moves = rate.NewLimiter(0, limit)
		if err := g.applyWanted(t.Context(), change(2, port.Fact{Key: k, Source: fmt.Sprint(limit), Decision: port.Decision{Allow: true, Host: []netip.AddrPort{at(lo4, p)}}})); err != nil {
			t.Fatal(err)
		}
		return h.state.moved[ID{"vm", k}]
	}
	if err := g.applyWanted(t.Context(), whole(1, first...)); err != nil {
		t.Fatal(err)
	}
	if m := tried(2); m != (move{}) {
		t.Errorf("moved to %d by two tries", m.Port)
	}
	if o := g.state.pubs[k].outcomes(); len(o) != 1 || o[0].State != port.Conflict || o[0].HostAddress.Port() != p {
		t.Errorf("%+v", o)
	}
	if m := tried(maxTries); m.Wanted != p || m.Port < p+3 {
		t.Errorf("%+v with enough tries", m)
	}
}

// A file that cannot be read costs the choices, not the start.
func TestDamagedMovedFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "moved.json")
	if err := os.WriteFile(file, []byte(`[{"guest":"vm"`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, p := hold(t)
	k := key(port.TCP, any4, p)
	a := newAgent(t, "vm")
	a.begins(snapshot(1, pub(k)))
	start(t, Options{Policy: onConflict(t, port.OnConflictAny), MovedFile: file}, a)
	a.wants(k, port.Active)
	eventually(t, "the file is written anew", func() bool {
		b, err := os.ReadFile(file)
		return err == nil && strings.Contains(string(b), fmt.Sprintf(`"wanted": %d`, p))
	})
}
