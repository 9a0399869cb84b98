// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// hostOf is a host's server with two guests and their ports. One guest has no name in the
// configuration and reports "vm"; the other is configured and not connected.
type hostOf struct {
	*Server
	ports []Publication
}

func (h *hostOf) List() List                                       { return List{Publications: h.ports} }
func (h *hostOf) Sources() []Source                                { return nil }
func (h *hostOf) Changes(context.Context, func(Delta) error) error { return errors.ErrUnsupported }

const vmID = "vsock://3:1023"

func newHostOf(t *testing.T, ports ...Publication) *hostOf {
	t.Helper()
	h := &hostOf{ports: ports}
	peers := []Peer{{State: PeerConnected, Guest: vmID, Endpoint: vmID, Name: "vm"}, {State: PeerAway, Guest: "build", Endpoint: "vsock://4:1023"}}
	h.Server = NewServer(Options{Provider: h, Role: "host", Forwards: noForwards(t), Peers: func() []Peer { return peers }})
	for i := range h.ports {
		h.ports[i].GuestName = GuestNames(peers)[h.ports[i].Guest]
	}
	return h
}

// do makes a change as a request over the control socket does, and returns the rule that it
// added, if it added one.
func (h *hostOf) do(t *testing.T, q forwards.Request) (Requested, ForwardChange, error) {
	t.Helper()
	q, err := h.ofGuest(q)
	if err != nil {
		return Requested{}, ForwardChange{}, err
	}
	done, err := h.o.Forwards.Do(q)
	if err != nil {
		return Requested{}, ForwardChange{}, err
	}
	v := ForwardChange{Result: done, Forwards: h.forwards()}
	for _, r := range v.Requests {
		if len(done.Added) > 0 && r.Request == done.Added[0] {
			return r, v, nil
		}
	}
	return Requested{}, v, nil
}

func open(n, at uint16) Publication {
	return Publication{
		Fact:          port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}},
		Guest:         vmID,
		State:         port.Active,
		HostAddresses: []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), at)},
	}
}

func request8080(op forwards.Op, n uint16, guest string) forwards.Request {
	q := forwards.Request{Op: op, Protocol: port.TCP, Port: n, Guest: guest}
	if op == forwards.Expose {
		q.Seconds = 60
	}
	return q
}

// The name by which a guest is shown selects it in changes and in filters.
func TestShownNamesSelectGuests(t *testing.T) {
	h := newHostOf(t, open(9229, 9229))
	for _, guest := range []string{"vm", vmID} {
		r, _, err := h.do(t, request8080(forwards.Deny, 9229, guest))
		if err != nil || r.Request.Guest != vmID || r.Ports != 1 || r.Reason != "" {
			t.Errorf("deny --guest %s: %+v, %v", guest, r, err)
		}
		if _, v, err := h.do(t, request8080(forwards.Allow, 9229, "vm")); err != nil || len(v.Removed) != 1 {
			t.Errorf("allow --guest vm: %+v, %v", v, err)
		}
	}
	for text, want := range map[string]bool{"guest=vm": true, "guest=vsock": true, "vm": true, "guest=build": false} {
		if f, err := ParseFilter([]string{text}); err != nil || f.Match(h.ports[0]) != want {
			t.Errorf("--filter %s: %v, want %v", text, !want, want)
		}
	}
}

// A port that a rule still denies after a request to allow it is said to be closed.
func TestAllowedPortThatIsStillDenied(t *testing.T) { synctest.Test(t, allowedPortThatIsStillDenied) }

func allowedPortThatIsStillDenied(t *testing.T) {
	denied := open(8080, 8080)
	denied.State, denied.HostAddresses = port.Denied, nil
	rule := port.RuleRef{Kind: port.RuleDeny, OnHost: true, Number: 2, Name: "owner web"}
	denied.Because(rule.Because(port.DeniedByRule))
	inGuest := denied
	inGuest.Unpublished = true
	withheld := denied
	withheld.Because(port.Because(port.Unlistened))
	for want, ports := range map[string][]Publication{
		"denied by host runtime rule 2 (deny owner web)":             {denied},
		"denied by host runtime rule 2 (deny owner web) in guest vm": {inGuest},
		"": {denied, open(8080, 8080), withheld},
	} {
		h := newHostOf(t, ports...)
		if _, _, err := h.do(t, request8080(forwards.Deny, 8080, "")); err != nil {
			t.Fatal(err)
		}
		for range 3 { // undo the denial, allow the port, and then there is nothing to change
			w := httptest.NewRecorder()
			h.changeForwards(w, httptest.NewRequest(http.MethodPost, "/v1/forwards", strings.NewReader(`{"op":"allow","protocol":"tcp","port":8080}`)))
			var v ForwardChange
			if err := json.Unmarshal(w.Body.Bytes(), &v); err != nil || len(v.Added) == 0 && v.Closed != want || len(v.Added) > 0 && v.Closed != "" {
				t.Errorf("%s: closed %q, want %q", w.Body, v.Closed, want)
			}
		}
	}
}

// A guest that a host does not have is refused, unless something is undone.
func TestUnknownGuests(t *testing.T) {
	h := newHostOf(t, open(8080, 8080))
	for _, op := range []forwards.Op{forwards.Forward, forwards.Deny, forwards.Allow} {
		_, _, err := h.do(t, request8080(op, 8080, "biuld"))
		if err == nil || err.Error() != `no guest is called "biuld" (did you mean "build"?): want vm or build` {
			t.Errorf("%s: %v", op, err)
		}
		if list := h.o.Forwards.List(); len(list) > 0 {
			t.Errorf("%s: %+v", op, list)
		}
	}
	if r, _, err := h.do(t, request8080(forwards.Deny, 8080, "b*")); err != nil || r.Reason != "closes nothing now" {
		t.Errorf("%+v, %v", r, err)
	}
	// The guest was known when these were added.
	for _, q := range []forwards.Request{request8080(forwards.Deny, 1, "old"), request8080(forwards.Forward, 1, "old")} {
		if _, err := h.o.Forwards.Do(q); err != nil {
			t.Fatal(err)
		}
	}
	for _, op := range []forwards.Op{forwards.Allow, forwards.Remove} {
		if _, v, err := h.do(t, request8080(op, 1, "old")); err != nil || len(v.Removed) != 1 {
			t.Errorf("%s: %+v, %v", op, v, err)
		}
	}
}

// A rule that names no port says so.
func TestRulesWithoutPorts(t *testing.T) {
	h := newHostOf(t, open(8080, 18080))
	for _, c := range []struct {
		op     forwards.Op
		port   uint16
		reason string
	}{
		{forwards.Deny, 8080, ""}, {forwards.Deny, 18080, "closes nothing now"},
		{forwards.Allow, 18081, notServed}, {forwards.Forward, 18080, notServed},
	} {
		r, _, err := h.do(t, request8080(c.op, c.port, ""))
		if err != nil || r.Reason != c.reason || (r.Ports > 0) != (c.reason == "") {
			t.Errorf("%s %d: %+v, %v", c.op, c.port, r, err)
		}
	}
	if r, _, err := h.do(t, forwards.Request{Op: forwards.Deny, Owner: "web"}); err != nil || r.Reason != "closes nothing now" {
		t.Errorf("%+v, %v", r, err)
	}
}

// What stays closed although a rule allows it is told with what closes it, and in which guest.
func TestWhatRemainsClosed(t *testing.T) {
	closed := open(8080, 8080)
	closed.State, closed.HostAddresses = port.Denied, nil
	closed.Because(port.RuleRef{Kind: port.RuleDeny, Number: 1, Name: "all", OnHost: true}.Because(port.DeniedByRule))
	h := newHostOf(t, closed)
	r, _, err := h.do(t, request8080(forwards.Allow, 8080, ""))
	if err != nil || r.State != "denied" || r.Reason != closed.Reason || r.Note != "" {
		t.Errorf("%+v, %v", r, err)
	}
	closed = h.ports[0]
	closed.Unpublished = true
	closed.Because(port.RuleRef{Kind: port.RuleConfigured, Number: 1}.Because(port.DeniedByRule))
	h.ports = []Publication{closed, open(8080, 8080)} // the guest has just published it again
	if f := h.forwards(); f.Requests[0].State != "active" || f.Requests[0].Note != "" || f.Requests[0].Ports != 1 {
		t.Errorf("%+v", f)
	}
	h.ports = []Publication{closed}
	if f := h.forwards(); f.Requests[0].State != "denied" || f.Requests[0].Reason != "denied by rule 1 in guest vm" {
		t.Errorf("%+v", f)
	}
}

// A request names the ports that all its fields match.
func TestPortsOfRequests(t *testing.T) {
	web := open(8080, 8080)
	web.Owner, web.Origins = port.Owner{Kind: port.OwnerContainer, Name: "web"}, []Origin{{Source: "docker"}}
	web.SetNamed("", []string{"web:8080/tcp"})
	ports := []Publication{web, open(8080, 8081), DescribeWaiting(port.Demand{Slot: port.Slot{Protocol: port.TCP, Port: 8080}, Name: "db"}, port.Because(port.NotServedYet), web.Since)}
	for q, want := range map[forwards.Request]int{
		{Protocol: port.TCP, Port: 8080}: 2, {Protocol: port.UDP, Port: 8080}: 0, {Owner: "w*"}: 1, {All: true}: 2, {All: true, Guest: "vsock:*"}: 2,
		{All: true, Guest: "vm"}: 0, {Demand: "web:8080/tcp"}: 1, {Demand: "web:8081/tcp"}: 0,
	} {
		q.Op = forwards.Deny
		if f := requested(forwards.Entry{Request: q}, ports); f.Ports != want {
			t.Errorf("%s: %d ports, want %d", q, f.Ports, want)
		}
	}
}

// A forward that is open at narrower addresses than --bind says so.
func TestNarrowerThanBind(t *testing.T) {
	for _, c := range []struct {
		at, bind string
		narrower bool
	}{
		{"127.0.0.1:8080", "all", true}, {"[::1]:8080", "all", true}, {"0.0.0.0:8080", "all", false}, {"192.0.2.10:8080", "all", true},
		{"127.0.0.1:8080", "192.0.2.10", true}, {"0.0.0.0:8080", "192.0.2.10", false}, {"192.0.2.10:8080", "192.0.2.10", false}, {"[::]:8080", "192.0.2.10", true},
		{"127.0.0.1:8080", "loopback", false}, {"127.0.0.1:8080", "127.0.0.2", false}, {"127.0.0.1:8080", "", false},
	} {
		p := open(8080, 8080)
		p.HostAddresses = []netip.AddrPort{netip.MustParseAddrPort(c.at)}
		h := newHostOf(t, p)
		h.o.Forwards = forwards.NewStore(filepath.Join(t.TempDir(), "forwards.json"), rules.Empty(rules.Asked()), true, slog.New(slog.DiscardHandler), func(*rules.Set) {})
		q := request8080(forwards.Forward, 8080, "vm")
		q.Bind = c.bind
		want := ""
		if c.narrower {
			want = "narrower than --bind " + c.bind + ", as neither the configuration nor the agent opens more"
		}
		if r, _, err := h.do(t, q); err != nil || r.State != "active" || r.Note != want {
			t.Errorf("--bind %q at %s: %+v, %v; want %q", c.bind, c.at, r, err, want)
		}
	}
}

// Where several rules expose a port, it is open until the last one ends.
func TestSeveralExposures(t *testing.T) {
	first, last := time.Unix(60, 0), time.Unix(3600, 0)
	ports := []Publication{open(8080, 8080), open(8080, 8081), open(8080, 8082), open(9090, 9090)}
	ports[0].ExposedUntil, ports[1].ExposedUntil, ports[3].ExposedUntil = last, first, last.Add(time.Hour)
	if until := exposedUntil(ports, request8080(forwards.Expose, 8080, "").Match()); !until.Equal(last) {
		t.Errorf("exposed until %s, want %s", until, last)
	}
}

// opensLater is a provider with a port that is another one from a time on, never if it is zero.
type opensLater struct {
	hostOf
	at   time.Time
	then Publication
}

func (o *opensLater) List() List {
	l := o.hostOf.List()
	if !o.at.IsZero() && !time.Now().Before(o.at) {
		l.Publications = []Publication{o.then}
	}
	return l
}

// The answer to a change that opens a port is given when the port is open, and after a second
// if it remains closed. What the guest denies no host waits for.
func TestAwaitOpened(t *testing.T) {
	closed := open(8080, 8080)
	closed.State = port.Denied
	elsewhere := closed
	elsewhere.Unpublished = true
	for name, c := range map[string]struct {
		port            Publication
		after, from, to time.Duration
	}{
		"opened":       {closed, 200 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond},
		"never opened": {closed, 0, time.Second, 2 * time.Second},
		"the guest's":  {elsewhere, 0, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := &opensLater{hostOf: hostOf{ports: []Publication{c.port}}, then: open(8080, 8080)}
				if c.after > 0 {
					o.at = time.Now().Add(c.after)
				}
				begun := time.Now()
				(&Server{o: Options{Provider: o}}).awaitOpened(t.Context(), request8080(forwards.Allow, 8080, ""))
				if took := time.Since(begun); took < c.from || took > c.to {
					t.Errorf("took %s, want %s to %s", took, c.from, c.to)
				}
			})
		})
	}
}

// The answer to an exposure is given when its own rule has opened the port, also if another rule
// exposes the port for longer.
func TestAwaitExposedByItsOwnRule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := forwards.NewStore(filepath.Join(t.TempDir(), "forwards.json"), rules.Empty(rules.Asked()), true, slog.New(slog.DiscardHandler), func(*rules.Set) {})
		first, second := request8080(forwards.Expose, 8080, ""), request8080(forwards.Expose, 8080, vmID)
		first.Bind, first.Seconds = "192.0.2.1", 3600
		for _, q := range []forwards.Request{first, second} {
			if _, err := store.Do(q); err != nil {
				t.Fatal(err)
			}
		}
		list := store.List()
		if len(list) != 2 || list[0].Request != first {
			t.Fatalf("%+v", list)
		}
		begun, narrow, wide := time.Now(), open(8080, 8080), open(8080, 8080)
		narrow.HostAddresses = append(narrow.HostAddresses, netip.MustParseAddrPort("192.0.2.1:8080"))
		wide.HostAddresses = []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:8080")}
		narrow.ExposedUntil, wide.ExposedUntil = list[0].Until, list[0].Until
		o := &opensLater{hostOf: hostOf{ports: []Publication{narrow}}, at: begun.Add(200 * time.Millisecond), then: wide}
		(&Server{o: Options{Provider: o, Forwards: store}}).awaitExposed(t.Context(), second)
		if took := time.Since(begun); took < 200*time.Millisecond || took > 300*time.Millisecond {
			t.Errorf("took %s, want 200 ms", took)
		}
	})
}
