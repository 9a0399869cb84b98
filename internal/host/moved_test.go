// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/wire"
	"github.com/fairlead/fairlead/test/kit/ports"
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
				if want := fmt.Sprintf("instead of host port %d, which was in use", p); o.Reason != want {
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

// A rule that does not move any more gives the port back, and the choice is forgotten.
func TestMoveEndsWithItsRule(t *testing.T) {
	ln, p := hold(t)
	k := key(port.TCP, any4, p)
	a := newAgent(t, "vm")
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{Policy: onConflict(t, port.OnConflictNext)}, a)
	a.wants(k, port.Active)
	h.SetPolicy(onConflict(t, port.OnConflictWait))
	if o := a.wants(k, port.Conflict); o.HostAddress.Port() != p {
		t.Errorf("%+v", o)
	}
	_ = ln.Close()
	eventually(t, "the port is opened when it is free", func() bool {
		o := a.heard(k)
		return len(o) == 1 && o[0].State == port.Active && o[0].HostAddress.Port() == p && o[0].Reason == ""
	})
}

// A rule that moves ports is applied to what has had a conflict for a while.
func TestConflictMovesByLaterRule(t *testing.T) {
	_, p := hold(t)
	k := key(port.TCP, any4, p)
	a := newAgent(t, "vm")
	a.begins(snapshot(1, pub(k)))
	h, _ := start(t, Options{Policy: onConflict(t, port.OnConflictWait), Holders: nobody{}}, a)
	a.wants(k, port.Conflict)
	h.SetPolicy(onConflict(t, port.OnConflictNext))
	if o := a.wants(k, port.Active); o.HostAddress.Port() <= p {
		t.Errorf("%+v", o)
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
		return len(o) == 1 && o[0].State == port.Active && (o[0].HostAddress.Port() == p+1 || o[0].Reason != "") &&
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

// Where no other port is free, the wanted one is waited for.
func TestNoOtherPort(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:65535")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	k := key(port.TCP, any4, 65535)
	a := newAgent(t, "vm")
	a.begins(snapshot(1, pub(k)))
	start(t, Options{Policy: onConflict(t, port.OnConflictNext)}, a)
	if o := a.wants(k, port.Conflict); o.HostAddress.Port() != 65535 {
		t.Errorf("%+v", o)
	}
}

// A guest whose conflicts had many ports tried waits for the wanted ones.
func TestMovesOfAGuestAreLimited(t *testing.T) {
	p := ports.Free(t)
	h, err := New(Options{Policy: onConflict(t, port.OnConflictNext), Guests: []Guest{{
		Name: "vm", Dial: func(context.Context) (link.Session, error) { return nil, errors.New("not dialled") },
	}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.guests[0].withdraw()
		h.commit(context.Background())
	})
	g, k := h.guests[0], key(port.TCP, lan, p)
	var first []wire.Publication
	for i := range uint16(3) { // they take precedence
		first = append(first, pub(key(port.TCP, any4, p+i)))
	}
	tried := func(limit int) move {
		t.Helper()
		g.limits.moves = rate.NewLimiter(0, limit)
		g.h.mu.Lock()
		g.put(wire.Publication{Key: k, Host: []netip.AddrPort{at(lo4, p)}, Source: fmt.Sprint(limit)})
		g.h.commit(t.Context())
		g.h.mu.Unlock()
		return h.moved[ID{"vm", k}]
	}
	if err := g.applySnapshot(t.Context(), &wire.Snapshot{Generation: 1, Publications: first}); err != nil {
		t.Fatal(err)
	}
	if m := tried(2); m != (move{}) {
		t.Errorf("moved to %d by two tries", m.Port)
	}
	if o := g.pubs[k].outcomes(); len(o) != 1 || o[0].State != port.Conflict || o[0].HostAddress.Port() != p {
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
