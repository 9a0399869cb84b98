// SPDX-License-Identifier: Apache-2.0

package status

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/port"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func row(p uint16, state port.State, owner string) Publication {
	return Publication{
		Fact: port.Fact{
			Key:   port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: p},
			Owner: port.Owner{Kind: port.OwnerProcess, Name: owner, ID: "811"},
		},
		State:         state,
		Since:         noon.Add(-3 * time.Minute),
		HostAddresses: []netip.AddrPort{netip.AddrPortFrom(port.Loopback(netip.IPv4Unspecified()), p)},
		Origins:       []Origin{{Source: "socket"}},
	}
}

func TestTableFitsWidth(t *testing.T) {
	long := row(65535, port.Conflict, strings.Repeat("x", 200))
	long.Address = netip.MustParseAddr("2001:db8:1111:2222:3333:4444:5555:6666")
	long.HostAddresses = append(long.HostAddresses, netip.MustParseAddrPort("[2001:db8:1111:2222:3333:4444:5555:6666]:65535"))
	long.Guest = "unix:///a/very/long/path/to/a/link.sock"
	for _, pubs := range [][]Publication{{long}, {row(80, port.Active, "nginx"), long}, {row(80, port.Active, "nginx")}, {}} {
		var b strings.Builder
		if err := WriteTable(&b, List{Publications: pubs}, Style{Width: 80, Now: noon}); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("%d columns: %s", n, line)
			}
		}
	}
}

// Both wildcards of one owner are one line, with the better state and the whole age.
func TestTableJoinsFamilies(t *testing.T) {
	web := func(addr string, state port.State, change ...func(*Publication)) Publication {
		p := row(80, state, "web")
		p.Address, p.HostAddresses = netip.MustParseAddr(addr), []netip.AddrPort{}
		if state == port.Active {
			p.HostAddresses = append(p.HostAddresses, netip.AddrPortFrom(port.Loopback(p.Address), 80))
		}
		for _, c := range change {
			c(&p)
		}
		return p
	}
	other := func(p *Publication) { p.Owner.ID = "812" }
	old := func(p *Publication) { p.Since = noon.Add(-time.Hour) }
	guest := func(p *Publication) { p.Guest = "vm" }
	for name, c := range map[string]struct {
		rows []Publication
		want []string
	}{
		"both":                   {[]Publication{web("0.0.0.0", port.Active), web("::", port.Active, old)}, []string{"80/tcp  *  active  127.0.0.1:80 +1  web (811)  60m"}},
		"a conflict in one":      {[]Publication{web("0.0.0.0", port.Conflict), web("::", port.Active)}, []string{"80/tcp  *  active  [::1]:80  web (811)  3m"}},
		"one is denied":          {[]Publication{web("0.0.0.0", port.Denied), web("::", port.Active)}, []string{"80/tcp  0.0.0.0  denied  -  web (811)  3m", "80/tcp  ::  active  [::1]:80  web (811)  3m"}},
		"both are denied":        {[]Publication{web("0.0.0.0", port.Denied), web("::", port.Denied)}, []string{"80/tcp  *  denied  -  web (811)  3m"}},
		"two owners":             {[]Publication{web("0.0.0.0", port.Active), web("::", port.Active, other)}, []string{"80/tcp  0.0.0.0  active  127.0.0.1:80  web (811)  3m", "80/tcp  ::  active  [::1]:80  web (812)  3m"}},
		"of localhost":           {[]Publication{web("127.0.0.1", port.Active), web("::1", port.Active)}, []string{"80/tcp  127.0.0.1  active  127.0.0.1:80  web (811)  3m", "80/tcp  ::1  active  [::1]:80  web (811)  3m"}},
		"of two guests":          {[]Publication{web("0.0.0.0", port.Active), web("::", port.Active, guest)}, []string{"80/tcp  0.0.0.0  active  127.0.0.1:80  web (811)  3m", "80/tcp  ::  active  [::1]:80  web (811)  3m  vm"}},
		"with others in between": {[]Publication{web("0.0.0.0", port.Active), web("10.0.0.1", port.Active), web("::", port.Active)}, []string{"80/tcp  *  active  127.0.0.1:80 +1  web (811)  3m", "80/tcp  10.0.0.1  active  127.0.0.1:80  web (811)  3m"}},
	} {
		var b strings.Builder
		if err := WriteTable(&b, List{Publications: c.rows}, Style{Now: noon, Bare: true}); err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(b.String()) {
			got = append(got, strings.Join(regexp.MustCompile("  +").Split(strings.TrimSpace(line), -1), "  "))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// An age that is only a lower bound is shown as one.
func TestAgeIsALowerBound(t *testing.T) {
	p := row(80, port.Active, "nginx")
	for atLeast, want := range map[bool]string{false: " 3m", true: " >3m"} {
		p.SinceAtLeast = atLeast
		var b strings.Builder
		if err := WriteTable(&b, List{Publications: []Publication{p}}, Style{Now: noon, Bare: true}); err != nil {
			t.Fatal(err)
		}
		if err := WriteEvent(&b, Event{Type: Present, Time: noon, Publication: &p}, Painter{}); err != nil {
			t.Fatal(err)
		}
		if strings.Count(b.String(), want) != 2 {
			t.Errorf("want %s twice in:\n%s", want, b.String())
		}
	}
}

func TestReasonIsTruncatedToTheWidthOnly(t *testing.T) {
	p := row(5432, port.Conflict, "postgres")
	p.HostAddresses, p.Reason = nil, `127.0.0.1:5432 is in use by "postgres" (pid 811)`
	for width, whole := range map[int]bool{0: true, 160: true, 80: false} {
		var b strings.Builder
		if err := WriteTable(&b, List{Publications: []Publication{p}}, Style{Width: width, Now: noon}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(b.String(), p.Reason); got != whole {
			t.Errorf("width %d: whole reason %v, want %v:\n%s", width, got, whole, b.String())
		}
		if !whole && !strings.Contains(b.String(), "127.0.0.1:5432 is in us…") { // all that fits
			t.Errorf("width %d: %s", width, b.String())
		}
	}
}

func TestTableWithoutRows(t *testing.T) {
	var b strings.Builder
	l := List{Sources: []Source{{Name: "docker", State: "stale", Error: "gone"}}}
	if err := WriteTable(&b, l, Style{Now: noon, Empty: "No ports."}); err != nil || b.String() != "No ports.\nsource docker is stale: gone\n" {
		t.Errorf("%q, %v", b.String(), err)
	}
}

func TestColoursChangeNothingButColours(t *testing.T) {
	l := List{Publications: []Publication{row(80, port.Active, "nginx"), row(8080, port.Conflict, "x")}}
	var plain, painted strings.Builder
	if err := WriteTable(&plain, l, Style{Now: noon}); err != nil {
		t.Fatal(err)
	}
	if err := WriteTable(&painted, l, Style{Now: noon, Paint: Painter{On: true}}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(painted.String(), "\x1b[32mactive\x1b[0m") || strings.Contains(plain.String(), "\x1b") {
		t.Errorf("%q\n%q", plain.String(), painted.String())
	}
	bare := painted.String()
	for _, c := range []Color{Bold, Red, Green, Yellow} {
		bare = strings.ReplaceAll(bare, "\x1b["+string(c)+"m", "")
	}
	if bare = strings.ReplaceAll(bare, "\x1b[0m", ""); bare != plain.String() {
		t.Errorf("without colours\n%s\nwant\n%s", bare, plain.String())
	}
}

// URLs have a column of the wide table, if there is one.
func TestURLColumn(t *testing.T) {
	named, other := row(80, port.Active, ""), row(81, port.Active, "")
	for _, url := range []string{"", "http://web.localhost:8080"} {
		named.URL = url
		var b strings.Builder
		if err := WriteTable(&b, List{Publications: []Publication{named, other}}, Style{Wide: true, Now: noon}); err != nil {
			t.Fatal(err)
		}
		if has := strings.Contains(b.String(), "URL"); has != (url != "") || !strings.Contains(b.String(), url) {
			t.Errorf("%q: %s", url, b.String())
		}
	}
}

// A watch shows the URL of a port: a change of it alone is no line without a difference.
func TestURLOfAnEvent(t *testing.T) {
	p := row(80, port.Active, "")
	p.URL = "http://web.localhost:8080"
	for kind, want := range map[EventType]bool{Changed: true, Present: true, Gone: false} {
		var b strings.Builder
		if err := WriteEvent(&b, Event{Time: noon, Type: kind, Publication: &p}, Painter{}); err != nil || strings.Contains(b.String(), "  as "+p.URL+"  by ") != want {
			t.Errorf("%s: %s, %v", kind, b.String(), err)
		}
	}
}

func TestHostileNamesAreQuoted(t *testing.T) {
	p := row(80, port.Failed, "\x1b[2J\nactive")
	const hostile = "\x1b]0;title\x07\n"
	p.Reason, p.DialTarget, p.Rule, p.Origins = hostile, hostile, hostile, []Origin{{Source: "socket"}, {Source: hostile}}
	l := List{
		Publications: []Publication{p},
		Sources: []Source{
			{Name: hostile, State: "starting"}, {Name: hostile, State: hostile, Error: hostile},
			{Name: hostile, State: "live", Warnings: []string{hostile}},
		},
		Peers: []Peer{{State: PeerRefused, Name: hostile, Error: hostile, Next: hostile}},
	}
	var b strings.Builder
	if err := WriteTable(&b, l, Style{Wide: true, Now: noon}); err != nil {
		t.Fatal(err)
	}
	if err := WriteEvent(&b, Event{Time: noon, Type: Added, Publication: &p}, Painter{}); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(b.String(), "\x1b\x07") || strings.Count(b.String(), "\n") != 7 {
		t.Errorf("%q", b.String())
	}
	b.Reset()
	p.Node, p.Owner.Name = hostile, hostile
	if err := WriteCluster(&b, List{Publications: []Publication{p}, Sources: l.Sources}, Style{Wide: true, Now: noon}); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(b.String(), "\x1b\x07") {
		t.Errorf("of a cluster: %q", b.String())
	}
}

func TestFilter(t *testing.T) {
	p := row(8080, port.Active, "Nginx")
	for _, tt := range []struct {
		terms string
		want  bool
	}{
		{"", true}, {"nginx", true}, {"apache", false}, {"port=8080", true}, {"port=8080/tcp", true}, {"port=80", false},
		{"state=active", true}, {"state=denied", false}, {"owner=ngi", true}, {"owner=process", true}, {"source=socket", true},
		{"source=nat", false}, {"address=127.0.0", true}, {"protocol=udp", false}, {"nginx,state=denied", false}, {"NGINX,8080", true},
	} {
		var terms []string
		if tt.terms != "" {
			terms = strings.Split(tt.terms, ",")
		}
		f, err := ParseFilter(terms)
		if err != nil {
			t.Fatal(err)
		}
		if f.Match(p) != tt.want || len(f.List(List{Publications: []Publication{p}}).Publications) == 1 != tt.want {
			t.Errorf("%q: got %v", tt.terms, !tt.want)
		}
	}
	for _, bad := range []string{"prot=80", "port=", "", "state=good"} {
		if _, err := ParseFilter([]string{bad}); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// After a restart of the agent, a watch reports the differences only.
func TestResume(t *testing.T) {
	a, b, c := row(1, port.Active, "a"), row(2, port.Active, "b"), row(3, port.Active, "c")
	var r Resume
	var got []string
	feed := func(e EventType, p *Publication) {
		for _, e := range r.Events(Event{Type: e, Publication: p}) {
			s := string(e.Type)
			if e.Publication != nil {
				s += " " + e.Publication.Owner.Name + " " + e.Publication.State.String()
			}
			got = append(got, s)
		}
	}
	r.Lost() // before any event
	feed(Present, &a)
	feed(Present, &b)
	feed(Synced, nil)
	r.Lost()
	changed := b
	changed.State = port.Conflict
	feed(Present, &changed)
	feed(Present, &c)
	feed(Synced, nil)
	feed(Gone, &c)
	r.Lost()
	feed(Present, &changed)
	feed(Synced, nil)
	want := "present a active|present b active|synced|removed a active|changed b conflict|added c active|synced|removed c active|synced"
	if s := strings.Join(got, "|"); s != want {
		t.Errorf("got\n%s\nwant\n%s", s, want)
	}
}

// A restart that changes a row in any way that lasts is reported, and one that has other times is not.
func TestResumeOfWhatLasts(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Publication)
		want   int
	}{
		"time":     {func(p *Publication) { p.Since, p.SinceAtLeast = p.Since.Add(time.Hour), true }, 0},
		"origin":   {func(p *Publication) { p.Origins = []Origin{{Detail: "anew"}} }, 0},
		"source":   {func(p *Publication) { p.Source = "nat" }, 0},
		"target":   {func(p *Publication) { p.Target = 1 }, 0},
		"outcome":  {func(p *Publication) { p.Outcomes = []Outcome{{Reason: "anew"}} }, 0},
		"reason":   {func(p *Publication) { p.Reason = "allowed by rule 2" }, 1},
		"rule":     {func(p *Publication) { p.Rule = "rule 2" }, 1},
		"warnings": {func(p *Publication) { p.Warnings = []string{"a label has no effect"} }, 1},
		"names":    {func(p *Publication) { p.Names = []string{"b.localhost"} }, 1},
		"URL":      {func(p *Publication) { p.URL = "http://b.localhost:8000" }, 1},
		"exposure": {func(p *Publication) { p.ExposedUntil = time.Unix(1e9, 0) }, 1},
	} {
		was := row(2, port.Active, "b")
		var r Resume
		r.Events(Event{Type: Present, Publication: &was})
		r.Events(Event{Type: Synced})
		r.Lost()
		is := was
		c.change(&is)
		r.Events(Event{Type: Present, Publication: &is})
		if es := r.Events(Event{Type: Synced}); len(es)-1 != c.want || c.want == 1 && es[0].Type != Changed {
			t.Errorf("%s: %+v", name, es)
		}
	}
}

// A server that is restarted in one family changes nothing of the other, also over a restart of
// the agent.
func TestWatchOfFamilies(t *testing.T) {
	v4, v6 := row(80, port.Active, "nginx"), row(80, port.Active, "nginx")
	v4.Address, v6.Address = netip.IPv4Unspecified(), netip.IPv6Unspecified()
	check := func(how string, events []Event) {
		t.Helper()
		if len(events) != 1 || events[0].Type != Gone || events[0].Publication.Address != v6.Address {
			t.Errorf("%s: %+v", how, events)
		}
	}
	tr := newTracker()
	tr.events(Delta{Put: []Publication{v4, v6}}, time.Unix(1, 0))
	check("live", tr.events(Delta{Put: []Publication{v4}, Removed: []RowID{{Key: v6.Key}}}, time.Unix(2, 0)))
	var r Resume
	for _, p := range []Publication{v4, v6} {
		r.Events(Event{Type: Present, Publication: &p})
	}
	r.Events(Event{Type: Synced})
	r.Lost()
	r.Events(Event{Type: Present, Publication: &v4})
	events := r.Events(Event{Type: Synced})
	check("over a restart", events[:len(events)-1])
}
