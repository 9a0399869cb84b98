// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

const hostile = "a\x1b[31m\tb\n\u202e"

func published(n uint16, o port.Owner) Publication {
	return Publication{
		Fact:          port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}, Owner: o},
		State:         port.Active,
		HostAddresses: []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), n)},
	}
}

func TestGuestNamesAreEscaped(t *testing.T) {
	l := List{
		Publications: []Publication{
			published(80, port.Owner{Kind: port.OwnerContainer, Name: hostile, ID: hostile}),
			published(81, port.Owner{Kind: port.OwnerProcess, Name: hostile, ID: hostile}),
			published(82, port.Owner{Kind: port.OwnerService, ID: hostile}),
		},
		Sources: []Source{{Name: "docker", State: "stale", Error: hostile, Warnings: []string{hostile}}},
	}
	l.Publications[0].Reason = hostile
	l.Publications[1].Guest = hostile
	l.Publications[2].Address = netip.MustParseAddr("fe80::1").WithZone("e\x1b[0m")
	for _, wide := range []bool{false, true} {
		var b strings.Builder
		if err := WriteTable(&b, l, Style{Wide: wide, Now: time.Now()}); err != nil {
			t.Fatal(err)
		}
		if strings.ContainsAny(b.String(), "\x1b\t\u202e") || strings.Count(b.String(), "\n") != 7 {
			t.Errorf("wide %v: %q", wide, b.String())
		}
	}
	var b strings.Builder
	for i := range l.Publications {
		if err := WriteEvent(&b, Event{Type: Added, Publication: &l.Publications[i]}, Painter{}); err != nil {
			t.Fatal(err)
		}
	}
	if strings.ContainsAny(b.String(), "\x1b\t\u202e") || strings.Count(b.String(), "\n") != 3 {
		t.Errorf("events: %q", b.String())
	}
}

func TestNotesBelowTheTable(t *testing.T) {
	l := List{Publications: []Publication{published(30080, port.Owner{Kind: port.OwnerService, Name: "web"})}, Sources: []Source{{Name: "docker"}}}
	l.Publications[0].Reason = "nothing is known to serve it"
	for i := range 8 {
		l.Sources[0].Warnings = append(l.Sources[0].Warnings, fmt.Sprint("container ", i, ": port 0"))
	}
	var b strings.Builder
	if err := WriteTable(&b, l, Style{Now: time.Now()}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"port 30080/tcp: nothing is known", "source docker: container 4: port 0\n", "source docker: and 3 more: ls -o json\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "container 5") {
		t.Errorf("all warnings are shown:\n%s", b.String())
	}
}

func TestOwnerColumn(t *testing.T) {
	for want, o := range map[string]port.Owner{
		"-":         {},
		"nginx (7)": {Kind: port.OwnerProcess, Name: "nginx", ID: "7"},
		"nginx":     {Kind: port.OwnerProcess, Name: "nginx"}, // of another pid namespace
		"web":       {Kind: port.OwnerContainer, Name: "web", ID: "x"},
		"x":         {Kind: port.OwnerContainer, ID: "x"},
	} {
		if got := ownerColumn(o, false); got != want {
			t.Errorf("ownerColumn(%+v) = %q, want %q", o, got, want)
		}
	}
	pod, nginx := port.OtherOwner{Owner: port.Owner{Kind: port.OwnerContainer, Name: "web-0", Labels: map[string]string{"a": "b"}}}, port.OtherOwner{Owner: port.Owner{Kind: port.OwnerProcess, Name: "nginx"}}
	for _, c := range []struct {
		own         port.OwnerKind
		others      []port.OtherOwner
		short, wide string
	}{
		{port.OwnerProcess, []port.OtherOwner{nginx, {}}, "x +2", "x, nginx, -"},
		{port.OwnerUnknown, []port.OtherOwner{pod, nginx}, "web-0 +1", "web-0, nginx"},
		{port.OwnerUnknown, []port.OtherOwner{pod}, "web-0", "web-0"},
		{port.OwnerService, []port.OtherOwner{pod}, "x", "x"}, // its pods are not named
	} {
		row := Describe(port.Publication{Fact: port.Fact{Owner: port.Owner{Kind: c.own, Name: "x"}, Others: c.others}}, nil)
		if short, wide := ownersColumn(row, false), ownersColumn(row, true); short != c.short || wide != c.wide {
			t.Errorf("%v and %+v: %q, and wide %q; want %q and %q", c.own, c.others, short, wide, c.short, c.wide)
		}
		if f, err := ParseFilter([]string{"owner=nginx"}); err != nil || f.Match(row) != slices.ContainsFunc(row.Others, func(o port.OtherOwner) bool { return o.Name == "nginx" || o.Labels != nil }) {
			t.Errorf("owner=nginx: %v of %+v, %v", f.Match(row), row.Others, err)
		}
	}
	service := port.Owner{Kind: port.OwnerService, Name: "web", ID: "default/web", Cluster: "k3s"}
	if short, wide := ownerColumn(service, false), ownerColumn(service, true); short != "web" || wide != "web in k3s" {
		t.Errorf("of a cluster: %q, and wide %q; want %q and %q", short, wide, "web", "web in k3s")
	}
}

// Owners have labels in JSON, and sources warnings, only if there are any.
func TestJSONOfOwnersAndWarnings(t *testing.T) {
	p := Describe(port.Publication{
		Fact: port.Fact{
			Key:      port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80},
			Owner:    port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "abc", Namespace: "default", Labels: map[string]string{"a": "b"}},
			Decision: port.Decision{Allow: true},
		},
	}, nil)
	for _, c := range []struct {
		v    any
		want string
	}{
		{p.Owner, `{"kind":"container","name":"web","id":"abc","namespace":"default","labels":{"a":"b"}}`},
		{Describe(port.Publication{}, nil).Owner, `{"kind":"unknown","name":"","id":""}`},
		{Source{Name: "docker", State: "live", Warnings: []string{"port 0"}}, `{"name":"docker","state":"live","method":"","error":"","warnings":["port 0"]}`},
		{Source{Name: "docker", State: "live"}, `{"name":"docker","state":"live","method":"","error":""}`},
	} {
		got, err := json.Marshal(c.v)
		if err != nil || string(got) != c.want {
			t.Errorf("got %s, %v, want %s", got, err, c.want)
		}
	}
}

// A decision that is pending is no denial, whatever the sinks said before.
func TestPublicationPendingUntilOwnerKnown(t *testing.T) {
	row := Describe(port.Publication{Fact: port.Fact{Decision: port.Decision{Reason: port.Because(port.OwnerAwaited)}}}, []port.SinkOutcome{{Outcome: port.Outcome{State: port.Active}}})
	if row.State != port.Pending || row.Reason != "owner not known yet" || len(row.HostAddresses) > 0 {
		t.Errorf("row = %+v", row)
	}
}

// States that only a host has are the same in tables, filters and events.
func TestHostStates(t *testing.T) {
	open := Publication{Fact: port.Fact{Key: port.Key{Address: netip.IPv4Unspecified(), Protocol: port.TCP, Port: 80}}, State: port.Active, Lost: true, Guest: "vsock://3:1023", GuestName: "vm"}
	for filter, want := range map[string]bool{"state=lost": true, "state=active": false, "lost": true, "active": false, "state=denied": false} {
		f, err := ParseFilter([]string{filter})
		if err != nil || f.Match(open) != want {
			t.Errorf("%s: %v, %v", filter, f.Match(open), err)
		}
	}
	var b strings.Builder
	if err := WriteEvent(&b, Event{Type: Changed, Publication: &open}, Painter{}); err != nil || !strings.Contains(b.String(), " lost") || !strings.Contains(b.String(), "  guest vm\n") {
		t.Errorf("%q, %v", b.String(), err)
	}
	b.Reset()
	if err := WriteTable(&b, List{Publications: []Publication{open}}, Style{Bare: true, Now: noon}); err != nil || !strings.HasPrefix(b.String(), "80/tcp  0.0.0.0  lost  ") {
		t.Errorf("%q, %v", b.String(), err)
	}
}

// A port that is denied while it is published has two rows, and events about both.
func TestUnpublishedRowIsAnotherRow(t *testing.T) {
	tr := newTracker()
	open := Publication{Fact: port.Fact{Key: port.Key{Address: netip.IPv4Unspecified(), Protocol: port.TCP, Port: 80}}, State: port.Active, Guest: "vm"}
	denied := open
	denied.State, denied.Unpublished = port.Denied, true
	tr.events(Delta{Put: []Publication{open}}, noon)
	var got []string
	for _, d := range []Delta{
		{Put: []Publication{denied}},
		{Removed: []RowID{{Key: open.Key, Guest: "vm"}}},
		{Put: []Publication{open}, Removed: []RowID{{Key: open.Key, Guest: "vm", Unpublished: true}}},
	} {
		for _, e := range tr.events(d, noon) {
			got = append(got, fmt.Sprint(e.Type, " ", e.Publication.State))
		}
	}
	if want := "added denied removed active removed denied added active"; strings.Join(got, " ") != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestPageTokenSurvivesRestart(t *testing.T) {
	log, file := slog.New(slog.DiscardHandler), filepath.Join(t.TempDir(), "state", "token")
	first := LoadPageTokens(log, file)
	if again := LoadPageTokens(log, file); again != first || len(first.Read) < 40 || len(first.Change) < 40 || first.Read == first.Change {
		t.Errorf("%d and %d bytes, the same: %v", len(first.Read), len(first.Change), again == first)
	}
	if a, b := LoadPageTokens(log, ""), LoadPageTokens(log, ""); a.Read == b.Read || a.Change == b.Change || a.Read == a.Change {
		t.Error("without a file the tokens are always the same")
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(file), "page-token"))
	if err != nil || strings.Contains(string(b), first.Read) || strings.Contains(string(b), first.Change) {
		t.Errorf("the file has a token itself, %v", err)
	}
}
