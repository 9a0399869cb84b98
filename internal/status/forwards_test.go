// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// noForwards is a store without rules.
const notServed = "nothing serves it yet"

func noForwards(tb testing.TB) *forwards.Store {
	tb.Helper()
	return forwards.NewStore(filepath.Join(tb.TempDir(), "forwards.json"), rules.Empty(rules.Loopback()), true, slog.New(slog.DiscardHandler), func(*rules.Set) {})
}

// A refusal says why and no more; a request with an unknown field is not carried out.
func TestForwardsOverTheControlSocket(t *testing.T) {
	s := servePage(t)
	q := forwards.Request{Op: forwards.Forward, Protocol: port.TCP, Port: 8080, To: 18080}
	v, err := s.client.ChangeForwards(t.Context(), q)
	if err != nil || len(v.Added) != 1 || len(v.Requests) != 1 || v.Requests[0].State != "pending" || v.Requests[0].Reason != notServed {
		t.Errorf("%+v, %v", v, err)
	}
	q.To = 18081
	if _, err := s.client.ChangeForwards(t.Context(), q); err == nil || !strings.HasPrefix(err.Error(), "forward 8080/tcp exists already") {
		t.Errorf("%v", err)
	}
	resp, body := request(t, s.client.http, http.MethodPost, "http://fairlead/v1/forwards", func(r *http.Request) {
		r.Header.Set("Content-Type", "application/json")
		r.Body = io.NopCloser(strings.NewReader(`{"op":"deny","protocol":"tcp","port":1,"until":"2h"}`))
	})
	if resp.StatusCode != http.StatusBadRequest || !strings.Contains(body, "until") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if f, err := s.client.Forwards(t.Context()); err != nil || len(f.Requests) != 1 || f.Requests[0].Request.To != 18080 {
		t.Errorf("%+v, %v", f, err)
	}
}

// A request has the best state of the ports that it names, and says if there are none.
func TestRequested(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:18080")
	ports := []Publication{
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 8080}}, Guest: "dev", State: port.Conflict, Reason: "taken"},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 8080}}, Guest: "dev", State: port.Active, HostAddresses: []netip.AddrPort{at}},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 8080}}, Guest: "build", State: port.Conflict, Reason: "taken"},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 9090}}, Guest: "dev", State: port.Denied, Reason: "denied by rule 1", Code: port.DeniedByRule, Unpublished: true},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 7070}}, Guest: "dev", State: port.Active, Lost: true},
		{
			Fact:          port.Fact{Key: port.Key{Protocol: port.TCP, Port: 6060}},
			Guest:         "dev",
			State:         port.Active,
			HostAddresses: []netip.AddrPort{at},
			Outcomes: []Outcome{
				{HostAddress: "0.0.0.0:6060", State: port.Conflict, Reason: "held"}, {HostAddress: "127.0.0.1:6060", State: port.Active},
			},
		},
	}
	tcp := func(op forwards.Op, n uint16, guest string) forwards.Request {
		return forwards.Request{Op: op, Protocol: port.TCP, Port: n, Guest: guest}
	}
	for _, c := range []struct {
		request       forwards.Request
		state, reason string
		addresses     int
	}{
		{tcp(forwards.Forward, 8080, ""), "active", "", 1},
		{tcp(forwards.Allow, 8080, "build"), "conflict", "taken", 0},
		{forwards.Request{Op: forwards.Forward, Protocol: port.UDP, Port: 8080}, "pending", notServed, 0},
		{tcp(forwards.Allow, 9090, ""), "denied", "denied by rule 1 in guest dev", 0},
		{tcp(forwards.Forward, 7070, ""), "lost", "", 0},
		{tcp(forwards.Deny, 8080, ""), "denied", "", 0},
		{tcp(forwards.Expose, 6060, ""), "conflict", "held", 1},
		{tcp(forwards.Expose, 7070, ""), "lost", "", 0},
	} {
		if f := requested(forwards.Entry{Request: c.request}, slices.Clone(ports)); f.State != c.state || f.Reason != c.reason || len(f.HostAddresses) != c.addresses {
			t.Errorf("%s: %+v", c.request, f)
		}
	}
}

// A wildcard is open at the system's addresses of its family, the loopback nowhere.
func TestOpenToOtherMachines(t *testing.T) {
	at := func(list ...string) (out []netip.AddrPort) {
		for _, s := range list {
			out = append(out, netip.MustParseAddrPort(s))
		}
		return out
	}
	local := []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}
	until := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	ports := []Publication{
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 8080}}, Guest: "dev", State: port.Active, ExposedUntil: until, HostAddresses: at("0.0.0.0:18080", "[::1]:18080")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 8080}}, Guest: "build", State: port.Active, ExposedUntil: until, HostAddresses: at("127.0.0.1:8080", "192.0.2.11:8080")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 8080}}, Guest: "asks", State: port.Active, HostAddresses: at("[::]:28080")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.UDP, Port: 8080}}, Guest: "dev", State: port.Active, HostAddresses: at("0.0.0.0:8080")},
	}
	for guest, want := range map[string][2][]netip.AddrPort{
		"":    {at("192.0.2.10:18080", "192.0.2.11:8080"), at("[2001:db8::10]:28080")},
		"dev": {at("192.0.2.10:18080"), nil}, "build": {at("192.0.2.11:8080"), nil}, "asks": {nil, at("[2001:db8::10]:28080")},
		"d*": {at("192.0.2.10:18080"), nil}, "x": {nil, nil},
	} {
		match := rules.Match{Protocol: port.TCP, Ports: []rules.PortRange{{First: 8080, Last: 8080}}, Guest: guest}
		if open, always := openTo(ports, match, local); !slices.Equal(open, want[0]) || !slices.Equal(always, want[1]) {
			t.Errorf("%q: %v and always %v, want %v", guest, open, always, want)
		}
	}
}

// What other machines can reach for a time is in red, and has a line of its own.
func TestExposedPortsAreRed(t *testing.T) {
	until := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	p := Publication{
		Fact:          port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8080}},
		State:         port.Active,
		ExposedUntil:  until,
		Reason:        "open to other machines until 2026-11-21 12:00:00 UTC",
		HostAddresses: []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:8080")},
	}
	var out strings.Builder
	if err := WriteTable(&out, List{Publications: []Publication{p}}, Style{Paint: Painter{On: true}, Now: until}); err != nil {
		t.Fatal(err)
	}
	if err := WriteEvent(&out, Event{Type: Changed, Publication: &p, Time: until}, Painter{On: true}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"  \x1b[31m0.0.0.0:8080\x1b[0m  ", "\x1b[31mport 8080/tcp: " + p.Reason + "\x1b[0m\n",
		"  on \x1b[31m0.0.0.0:8080\x1b[0m",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q lacks %q", out.String(), want)
		}
	}
	if n := strings.Count(out.String(), "port 8080/tcp: "); n != 1 {
		t.Errorf("%d notes in %q", n, out.String())
	}
}

// A rule that asks for a port by name has the state of what is there because of it, and the
// reason of whoever looks for it.
func TestDescribeDemand(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:18080")
	ports := []Publication{
		{Fact: port.Fact{
			Key: port.Key{Protocol: port.TCP, Port: 80}, Named: &port.Named{Demands: []string{"web:80/tcp"}},
		}, State: port.Active, HostAddresses: []netip.AddrPort{at}},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 80}, Named: &port.Named{Demands: []string{"api:80/tcp"}}}, State: port.Conflict, Reason: "taken"},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 80}}, State: port.Conflict, Reason: "taken"},
	}
	s := &Server{o: Options{Demands: func(d port.Demand) port.Reason {
		if d.Name == "new" {
			return port.Reason{}
		}
		return port.Because(port.SystemFailed, "no container "+d.Name)
	}}}
	for name, want := range map[string][2]string{
		"web": {"active", ""}, "api": {"conflict", "taken"}, "db": {"pending", "no container db"}, "new": {"pending", "it is being looked for"},
		"host": {"pending", "the guest publishes nothing as host:80/tcp: run `fairlead forward add host:80/tcp` in the guest"},
	} {
		s := s
		if name == "host" { // which asks for none
			s = &Server{}
		}
		f := requested(forwards.Entry{Request: forwards.Request{Op: forwards.Forward, Demand: name + ":80/tcp"}}, ports)
		if s.explainDemand(&f); f.State != want[0] || f.Reason != want[1] {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// Whoever asks about the port, or about the host port, is told what waits.
func TestExplainNamesDemand(t *testing.T) {
	store := noForwards(t)
	if _, err := store.Do(forwards.Request{Op: forwards.Forward, Demand: "web:80", To: 8080}); err != nil {
		t.Fatal(err)
	}
	s := &Server{o: Options{
		Forwards: store, Provider: &fakeProvider{}, Demands: func(port.Demand) port.Reason { return port.Because(port.SystemFailed, "no container") },
	}}
	for n, want := range map[uint16]int{80: 1, 8080: 1, 81: 0} {
		list := s.waiting(explain.Query{Port: n})
		if len(list) != want || want > 0 && list[0].Text != "web:80/tcp is asked for by name, and waits: no container" {
			t.Errorf("%d: %+v", n, list)
		}
	}
	if list := s.waiting(explain.Query{Port: 80, Protocol: port.UDP}); len(list) != 0 {
		t.Errorf("%+v", list)
	}
}

// What waits is the answer where no port is known, and else beside it.
func TestAddWaiting(t *testing.T) {
	waits := []explain.Related{{Kind: port.VerdictPending, Text: "web waits"}, {Kind: port.VerdictPending, Text: "own waits"}}
	for name, c := range map[string]struct {
		report  explain.Report
		verdict port.Verdict
		related string
	}{
		"nothing":   {explain.Report{Verdict: port.VerdictNothingHere, Summary: "nothing", Next: "?"}, port.VerdictPending, "own waits"},
		"elsewhere": {explain.Report{Verdict: port.VerdictNetNS, Summary: "elsewhere"}, port.VerdictPending, "elsewhere, own waits"},
		"there":     {explain.Report{Verdict: port.VerdictActive, Chains: make([]explain.Chain, 1)}, port.VerdictActive, "web waits, own waits"},
	} {
		addWaiting(&c.report, waits)
		var related []string
		for _, r := range c.report.Related {
			related = append(related, r.Text)
		}
		if got := strings.Join(related, ", "); c.report.Verdict != c.verdict || got != c.related || c.report.Next != "" {
			t.Errorf("%s: %+v", name, c.report)
		}
	}
}

// Several wait for one port, and are rows of their own, which other rules do not name.
func TestRowsThatWait(t *testing.T) {
	row := func(s, reason string) Publication {
		d, err := port.ParseDemand(s)
		if err != nil {
			t.Fatal(err)
		}
		return DescribeWaiting(d, port.Because(port.PeerFailed, reason), time.Time{})
	}
	tr := newTracker()
	tr.events(Delta{}, time.Time{})
	web, svc := row("web:80", "no container"), row("svc/default/web:80", "no Service")
	if es := tr.events(Delta{Put: []Publication{web, svc}}, time.Time{}); len(es) != 2 || es[0].Type != Added || es[1].Type != Added {
		t.Errorf("%+v", es)
	}
	if es := tr.events(Delta{Removed: []RowID{{Key: web.Key, Waits: web.Waits}}}, time.Time{}); len(es) != 1 || es[0].Type != Gone || es[0].Publication.Waits != web.Waits {
		t.Errorf("%+v", es)
	}
	if f := requested(forwards.Entry{Request: forwards.Request{Op: forwards.Forward, Protocol: port.TCP, Port: 80}}, []Publication{web, svc}); f.Reason != notServed {
		t.Errorf("a rule about the port takes what waits for its own: %+v", f)
	}
	var b strings.Builder
	if err := WriteTable(&b, List{Publications: []Publication{svc}}, Style{}); err != nil || !strings.Contains(b.String(), "svc/default/web  pending") {
		t.Errorf("%s%v", b.String(), err)
	}
	for text, want := range map[string]bool{"address=default/web": true, "state=pending": true, "source=demand": true, "port=80": true, "address=invalid": false} {
		if f, err := ParseFilter([]string{text}); err != nil || f.Match(svc) != want {
			t.Errorf("--filter %s: %v, want %v", text, !want, want)
		}
	}
	again, err := json.Marshal(svc)
	if err != nil {
		t.Fatal(err)
	}
	var read Publication
	if err := json.Unmarshal(again, &read); err != nil || read.Waits != svc.Waits || read.Address.IsValid() {
		t.Errorf("%s: %+v, %v", again, read, err)
	}
}
