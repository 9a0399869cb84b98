// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// fixture is a store beside rules of a configuration.
type fixture struct {
	*Store
	t   *testing.T
	set *rules.Set // applied last
}

func newFixture(t *testing.T, configured string) *fixture {
	t.Helper()
	file, err := rules.Parse("config", []byte(configured))
	if err != nil {
		t.Fatal(err)
	}
	base, err := rules.New(file.Expose, file.Rules)
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, set: base}
	f.Store = NewStore(filepath.Join(t.TempDir(), "state", "forwards.json"), base, true, slog.New(slog.DiscardHandler), func(s *rules.Set) { f.set = s })
	return f
}

const configOfTest = `
expose: loopback
rules:
  - {name: no-debug, match: {ports: 9229}, action: deny}
`

func (f *fixture) do(q Request) Result {
	f.t.Helper()
	r, err := f.Do(q)
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

func (f *fixture) refuse(q Request, want string) {
	f.t.Helper()
	before := f.text()
	if r, err := f.Do(q); err == nil || !strings.Contains(err.Error(), want) {
		f.t.Errorf("%+v: %+v, %v; want an error with %q", q, r, err, want)
	}
	if after := f.text(); after != before {
		f.t.Errorf("%+v: refused, but the file is now\n%s", q, after)
	}
}

func (f *fixture) text() string {
	b, err := os.ReadFile(f.path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		f.t.Error(err)
	}
	return string(b)
}

func (f *fixture) write(text string) {
	f.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(f.path), 0o700), os.WriteFile(f.path, []byte(text), 0o600)); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) names() (names []string) {
	f.t.Helper()
	for _, e := range f.List() {
		names = append(names, e.String())
	}
	return names
}

// decision is what the agent decides about a port, as text.
func (f *fixture) decision(n uint16) string {
	d := f.set.Decide(port.Publication{
		Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}, Owner: port.Owner{Kind: port.OwnerContainer, Name: "web"}},
	})
	if !d.Allow {
		return d.Reason.String()
	}
	return d.Host[0].String()
}

func tcp(op Op, n uint16) Request { return Request{Op: op, Protocol: port.TCP, Port: n} }

func forward(n, to uint16) Request { return Request{Op: Forward, Protocol: port.TCP, Port: n, To: to} }

func TestChangesAreAppliedAndUndone(t *testing.T) {
	f := newFixture(t, configOfTest)
	for _, step := range []struct {
		q    Request
		want string // decision about port 8080
	}{
		{forward(8080, 18080), "127.0.0.1:18080"},
		{forward(8080, 18080), "127.0.0.1:18080"}, // again: nothing to do
		{tcp(Deny, 8080), "denied by runtime rule 1 (deny 8080/tcp)"},
		{tcp(Allow, 8080), "127.0.0.1:18080"},
		{Request{Op: Deny, Owner: "w*"}, "denied by runtime rule 1 (deny owner w*)"},
		{Request{Op: Allow, Owner: "w*"}, "127.0.0.1:18080"},
		{Request{Op: Deny, All: true}, "denied by runtime rule 1 (deny all)"},
		{Request{Op: Allow, All: true}, "127.0.0.1:18080"},
		{tcp(Remove, 8080), "127.0.0.1:8080"},
	} {
		f.do(step.q)
		if got := f.decision(8080); got != step.want {
			t.Fatalf("%+v: %s, want %s", step.q, got, step.want)
		}
		// As after a restart.
		list, err := Parse(f.path, []byte(f.text()), true)
		if err != nil {
			t.Fatal(err)
		}
		again, err := f.base.WithRuntime(Rules(list))
		if f.set = again; err != nil || f.decision(8080) != step.want {
			t.Fatalf("%+v: after a restart %s, want %s (%v)", step.q, f.decision(8080), step.want, err)
		}
	}
	if names := f.names(); len(names) > 0 {
		t.Errorf("rules remain: %q", names)
	}
}

// What the configuration denies or does not open stays so, also by a file edited by hand.
func TestNeverWiderThanTheConfiguration(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.refuse(forward(9229, 0), "rule 1 (no-debug) of the configuration denies it")
	f.refuse(tcp(Allow, 9229), "rule 1 (no-debug) of the configuration denies it")
	wide := forward(8080, 0)
	wide.Bind = "all"
	f.refuse(wide, "wider than the configuration allows")
	f.write(fileOf(`{"op":"forward","protocol":"tcp","port":8080,"bind":"all"}`, `{"op":"allow","protocol":"tcp","port":9229}`))
	f.Reload(f.base)
	if got := f.decision(9229); got != "denied by rule 1 (no-debug)" {
		t.Errorf("9229: %s", got)
	}
	if got := f.decision(8080); got != "127.0.0.1:8080" {
		t.Errorf("8080: %s", got)
	}
	narrow := forward(7000, 0)
	narrow.Bind = "127.0.0.2"
	if f.do(narrow); f.decision(7000) != "127.0.0.2:7000" {
		t.Errorf("7000: %s", f.decision(7000))
	}
}

func TestAWideConfigurationPermitsAnyAddress(t *testing.T) {
	f := newFixture(t, "expose: all\n")
	q := forward(8080, 18080)
	q.Bind = "192.0.2.1"
	if f.do(q); f.decision(8080) != "192.0.2.1:18080" {
		t.Error(f.decision(8080))
	}
}

func TestRefusedRequests(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.do(forward(8080, 0))
	f.do(forward(9090, 9091))
	f.refuse(forward(7000, 8080), `host port 8080 is taken by "forward 8080/tcp"`)
	f.refuse(forward(9091, 0), `host port 9091 is taken by "forward 9090/tcp"`)
	f.refuse(forward(8080, 1), "exists already")
	f.refuse(tcp(Remove, 1), "nothing was added for 1/tcp")
	f.refuse(Request{Op: Allow, Owner: "web"}, "owner web is not denied")
	f.refuse(Request{Op: Deny}, "want one of a port, a port of a container or Service, an owner, or all")
	f.refuse(Request{Op: "widen", All: true}, "unknown operation")
	for _, c := range []string{"\n", "\t", "\x00", "\x7f", "\u0085", "\u009f", "\u2028", "\u2029", "\xff"} {
		f.refuse(Request{Op: Deny, Owner: "a" + c + "b"}, "control characters")
		f.refuse(Request{Op: Deny, Protocol: port.TCP, Port: 1, Guest: "a" + c + "b"}, "control characters")
	}
	f.refuse(Request{Op: Deny, Port: 80, Protocol: port.TCP, To: 81}, "only a forward has a host port")
	bad := forward(71, 0)
	bad.OnConflict = "nxet"
	f.refuse(bad, `"nxet": want wait, next or any (did you mean "next"?)`)
	f.guests = false
	bad.OnConflict = "next"
	f.refuse(bad, "only a host opens another port")
	q := forward(70, 0)
	q.Guest = "dev"
	f.refuse(q, "an agent has no guests")
	f.do(Request{Op: Deny, All: true})
	f.refuse(Request{Op: Allow, Owner: "web"}, `in effect: "deny all"`)
	f.refuse(tcp(Allow, 8080), "`fairlead allow --all`; in effect: \"deny all\"")
	f.do(tcp(Deny, 8080))
	if r := f.do(tcp(Allow, 8080)); len(r.Removed) != 1 || !strings.Contains(r.Closed, "`fairlead allow --all`; in effect: \"deny all\"") {
		f.t.Errorf("what keeps an allowed port closed is not said: %+v", r)
	}
	f.do(Request{Op: Forward, Protocol: port.UDP, Port: 8080}) // another protocol
	f.path = ""
	f.refuse(tcp(Deny, 1), "forwardsFile")
}

// fileOf is a file with these requests.
func fileOf(requests ...string) string {
	return `{"requests": [` + strings.Join(requests, ", ") + "]}"
}

// A file that the next start would refuse is not written to, whatever the change is.
func TestRequestsOfTheOtherSideAreRefused(t *testing.T) {
	for request, want := range map[string]string{
		`{"op":"deny","all":true,"guest":"dev"}`:                                                "forwards.json: requests[1]: deny: an agent has no guests",
		`{"op":"forward","protocol":"tcp","port":1,"onConflict":"next"}`:                        "requests[1]: forward: only a host opens another port",
		`{"op":"expose","protocol":"tcp","port":1,"seconds":60,"until":"2030-01-01T00:00:00Z"}`: "requests[1]: expose: only a host opens ports to other machines",
	} {
		f := newFixture(t, configOfTest)
		f.guests = false
		f.write(fileOf(`{"op":"deny","protocol":"tcp","port":80}`, request))
		f.refuse(tcp(Deny, 8080), want)
		if f.set != f.base {
			t.Errorf("%s: applied", request)
		}
		f.guests = true
		f.do(tcp(Deny, 8080))
	}
}

// A file that is damaged, or that somebody edited into what fairlead does not write, is refused
// with one line that says where and why, and stays as it is.
func TestDamagedFilesAreRefused(t *testing.T) {
	const deny = `{"op":"deny","protocol":"tcp","port":80}`
	for text, want := range map[string]string{
		"{\n\"requests\": [\n{]}":       "line 3: invalid character ']'",
		fileOf(deny)[:20]:               "unexpected EOF",
		"rules: []\n":                   "line 1: invalid character 'r'",
		"\xff\xfer\x00u\x00":            "invalid character",
		"null":                          "not in the form in which fairlead writes it",
		"{}":                            "not in the form in which fairlead writes it",
		"[]":                            "cannot unmarshal array",
		fileOf(deny) + "{}":             "something behind the end",
		`{"requests": [], "rules": []}`: `unknown field "rules"`,
		fileOf(deny, `{"op":"deny","prot":"tcp"}`):                      `requests[1]: unknown field "prot"`,
		fileOf(`{"op":"deny","op":"allow","protocol":"tcp","port":80}`): "a key is there twice",
		fileOf(`{"Op":"deny","protocol":"tcp","port":80}`):              "not in the form in which",
		fileOf(deny, deny):                                                `"deny 80/tcp" is there twice`,
		fileOf(`{"op":"dney","all":true}`):                                `requests[0]: unknown operation "dney"`,
		fileOf(`{"op":"rm","protocol":"tcp","port":80}`):                  "requests[0]: rm: only undoes",
		fileOf(`{"op":"deny","protocol":"sctp","port":80}`):               `requests[0]: protocol "sctp"`,
		fileOf(`{"op":"deny","protocol":"tcp","port":70000}`):             "requests[0]: cannot unmarshal number 70000",
		fileOf(`{"op":"deny","demand":"web:80"}`):                         `requests[0]: deny: want it as fairlead writes it: "deny web:80/tcp"`,
		fileOf(`{"op":"allow","all":true}`):                               "requests[0]: allow: want a port",
		fileOf(`{"op":"expose","protocol":"tcp","port":80,"seconds":60}`): "requests[0]: expose: an end is given for expose",
		fileOf(`{"op":"deny","all":true,"until":"2030-01-01T00:00:00Z"}`): "requests[0]: deny: an end is given for expose",
		fileOf(`{"op":"deny","all":true,"until":"tomorrow"}`):             "requests[0]: ",
		fileOf(deny) + strings.Repeat(" ", MaxSize):                       "bytes: want at most 262144",
	} {
		f := newFixture(t, configOfTest)
		f.write(text)
		_, err := f.Do(tcp(Deny, 8080))
		if err == nil || !strings.HasPrefix(err.Error(), f.path+": ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.99q: %v", text, err)
		}
		f.refuse(tcp(Deny, 8080), want)
	}
	for _, text := range []string{"", fileOf(), fileOf(deny), " \n" + fileOf(`{"op": "deny",`+"\r\n"+`"owner": "<b>&"}`) + "\n"} {
		f := newFixture(t, configOfTest)
		f.write(text)
		f.Reload(f.base)
		if f.do(forward(8080, 0)); !slices.Contains(f.names(), "forward 8080/tcp") {
			t.Errorf("%q: not added", text)
		}
	}
}

// A change that would make the file too large is refused.
func TestTooLargeFile(t *testing.T) {
	f := newFixture(t, configOfTest)
	owner := func(i int) Request { return Request{Op: Deny, Owner: fmt.Sprintf("%0250d", i)} }
	first, second := Entry{Request: owner(0)}, Entry{Request: owner(1)}
	size := len(format([]Entry{first}))
	one := len(format([]Entry{first, second})) - size
	var list []Entry
	for i := range 1 + (MaxSize-size)/one {
		list = append(list, Entry{Request: owner(i)})
	}
	f.write(string(format(list)))
	f.Reload(f.base)
	f.refuse(Request{Op: Deny, Owner: strings.Repeat("x", 256), Guest: strings.Repeat("y", 256)}, "and may have 262144: remove requests")
	f.do(Request{Op: Allow, Owner: owner(0).Owner})
}

// Where the file cannot be read, what is in effect remains.
func TestReloadOfADamagedFile(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.do(tcp(Deny, 8080))
	f.write("{")
	f.Reload(f.base)
	if got := f.decision(8080); got != "denied by runtime rule 1 (deny 8080/tcp)" {
		t.Error(got)
	}
	f.refuse(tcp(Deny, 8081), "unexpected EOF")
}

// What a forward says about conflicts is its own, or else that of the configuration's rule.
func TestOnConflictOfForwards(t *testing.T) {
	f := newFixture(t, "rules: [{match: {ports: 8000-8999}, action: allow, onConflict: any}]")
	for _, c := range []struct {
		port       uint16
		onConflict string
		want       port.OnConflict
	}{{8080, "", port.OnConflictAny}, {8081, "wait", port.OnConflictWait}, {9090, "", port.OnConflictUnset}, {9091, "next", port.OnConflictNext}} {
		q := forward(c.port, 0)
		q.OnConflict = c.onConflict
		f.do(q)
		k := port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: c.port}
		d := f.set.Host("vm", port.Publication{Fact: port.Fact{Key: k}}, []netip.AddrPort{netip.AddrPortFrom(port.Loopback(k.Address), c.port)})
		if !d.Allow || d.OnConflict != c.want {
			t.Errorf("%d %q: %+v, want %s", c.port, c.onConflict, d, c.want)
		}
	}
}

// Two guests may share a host port only if their rules name the guests and the ports differ,
// or if the rule that is added says what to do on a conflict.
func TestGuestsOfOneHostPort(t *testing.T) {
	f := newFixture(t, configOfTest)
	dev, build := forward(8080, 0), forward(8080, 0)
	dev.Guest, build.Guest = "dev", "build"
	asked := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")}
	p := port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8080}}}
	f.do(dev)
	f.refuse(build, `host port 8080 is taken by "forward 8080/tcp of guest dev"`)
	build.OnConflict = port.OnConflictNext.String()
	f.do(build) // it says what to do
	if d := f.set.Host("build", p, asked); !d.Allow || d.Host[0] != asked[0] || d.OnConflict != port.OnConflictNext {
		t.Errorf("build: %+v", d)
	}
	remove := func(guest string) {
		q := tcp(Remove, 8080)
		q.Guest = guest
		f.do(q)
	}
	remove("dev")
	f.refuse(dev, `host port 8080 is taken by "forward 8080/tcp of guest build"`) // which is there first
	remove("build")
	f.do(dev)
	build.OnConflict, build.To = "", 18080
	f.do(build)
	f.do(forward(8080, 0)) // of the other guests
	if names := f.names(); !slices.Equal(names, []string{"forward 8080/tcp of guest build", "forward 8080/tcp of guest dev", "forward 8080/tcp"}) {
		t.Errorf("order %q", names)
	}
	for guest, want := range map[string]string{"dev": "127.0.0.1:8080", "build": "127.0.0.1:18080", "other": "127.0.0.1:8080"} {
		if d := f.set.Host(guest, p, asked); !d.Allow || d.Host[0].String() != want {
			t.Errorf("%s: %+v, want %s", guest, d, want)
		}
	}
}

// The order of evaluation, and the file, depend on the requests alone, not on when each was made.
func TestOrderIsOfTheRequests(t *testing.T) {
	list := []Request{
		tcp(Deny, 9000), {Op: Deny, All: true}, demandOf(Forward, "web:80", 8081), forward(443, 0), forward(8080, 18080),
		{Op: Forward, Protocol: port.TCP, Port: 8080, To: 1, Guest: "d*"}, {Op: Forward, Protocol: port.TCP, Port: 8080, To: 2, Guest: "dev"},
	}
	want := []string{
		"deny all", "deny 9000/tcp", "forward web:80/tcp", "forward 8080/tcp of guest dev", "forward 8080/tcp of guest d*", "forward 443/tcp", "forward 8080/tcp",
	}
	text := ""
	for range list {
		f := newFixture(t, configOfTest)
		for _, q := range list {
			f.do(q)
		}
		if got := f.names(); !slices.Equal(got, want) || text != "" && text != f.text() {
			t.Fatalf("%q, want %q", got, want)
		}
		text = f.text()
		list = append(list[1:], list[0])
	}
}

// A file that was changed after it was read is not replaced, but read again.
func TestChangedFileIsNotReplaced(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.do(forward(8080, 0))
	_, before, err := f.read()
	if err != nil {
		t.Fatal(err)
	}
	other := fileOf(`{"op":"deny","all":true}`)
	f.write(other)
	if err := f.replace(before, nil); !errors.Is(err, errChanging) || f.text() != other {
		t.Errorf("%v; the file is\n%s", err, f.text())
	}
	if left, err := os.ReadDir(filepath.Dir(f.path)); err != nil || len(left) != 1 {
		t.Errorf("left in the directory: %v, %v", left, err)
	}
}

// Requests at the same time, and those of another process before, are all kept.
func TestConcurrentChangesLoseNothing(t *testing.T) {
	f := newFixture(t, configOfTest)
	other := NewStore(f.path, f.base, true, slog.New(slog.DiscardHandler), func(*rules.Set) {})
	var wg sync.WaitGroup
	for i := range uint16(20) {
		wg.Go(func() {
			if _, err := f.Do(forward(1000+i, 0)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if _, err := other.Do(forward(3000, 0)); err != nil {
		t.Fatal(err)
	}
	f.do(forward(4000, 0))
	if n := len(f.names()); n != 22 {
		t.Errorf("%d rules, want 22", n)
	}
}

// A name is data, whatever it contains.
func TestNamesAreQuoted(t *testing.T) {
	f := newFixture(t, configOfTest)
	for _, name := range []string{`a"}, {"op":"allow"`, "{*}", "ü: é", `\`, "<b>&", "a\\u0062"} {
		f.do(Request{Op: Deny, Owner: name})
		if !slices.Contains(f.names(), "deny owner "+name) {
			t.Errorf("%q: rules %q", name, f.names())
		}
		f.do(Request{Op: Allow, Owner: name})
	}
}

// While an emptied file is not confirmed, its rules are in effect, and no request drops them.
func TestEmptiedFileKeepsItsRules(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.do(tcp(Deny, 8080))
	for name, empty := range map[string]func() error{
		"emptied": func() error { return os.WriteFile(f.path, nil, 0o600) },
		"removed": func() error { return os.Remove(f.path) },
	} {
		if err := empty(); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Do(tcp(Deny, 9090)); err == nil || !strings.Contains(err.Error(), "empty or removed") {
			t.Errorf("%s: %v", name, err)
		}
		if n := len(f.entries); n != 1 {
			t.Errorf("%s: %d rules in effect", name, n)
		}
	}
	f.Reload(f.base) // confirmed
	f.do(tcp(Deny, 9090))
	if n := len(f.entries); n != 1 {
		t.Errorf("%d rules in effect", n)
	}
}

// Each request is undone by the request that Undo gives, whatever it names.
func TestUndo(t *testing.T) {
	for _, q := range []Request{
		{Op: Forward, Protocol: port.TCP, Port: 8080, To: 18080}, {Op: Forward, Protocol: port.UDP, Port: 53, Guest: "dev"},
		{Op: Deny, Protocol: port.TCP, Port: 8080, Guest: "d*"}, {Op: Deny, Owner: `we"b of guest x`}, {Op: Deny, Owner: "web-*", Guest: "dev"},
		{Op: Deny, All: true}, {Op: Deny, Protocol: port.TCP, Port: 8080}, {Op: Allow, Protocol: port.UDP, Port: 5353},
		{Op: Forward, Demand: "web:80", To: 8080}, {Op: Forward, Demand: "svc/default/dns:53/udp", Guest: "dev"}, {Op: Deny, Demand: "shop/web:80/tcp"},
	} {
		f := newFixture(t, configOfTest)
		before := f.Generation()
		made := f.do(q)
		list := f.List()
		if len(list) != 1 || f.Generation() == before {
			t.Fatalf("%v: %v, generation %d", q, list, f.Generation())
		}
		undo := list[0].Undo()
		if r := f.do(undo); !slices.Equal(r.Removed, made.Added) || len(r.Added) > 0 {
			t.Errorf("%v: %v undid %v, want %v", q, undo, r, made.Added)
		}
	}
}

// Requests are told apart by their fields, not by how they are called.
func TestRequestsOfOneName(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.do(Request{Op: Deny, Owner: "web of guest dev"})
	f.do(Request{Op: Deny, Owner: "web", Guest: "dev"})
	f.do(Request{Op: Allow, Owner: "web", Guest: "dev"})
	if list := f.List(); len(list) != 1 || list[0].Owner != "web of guest dev" {
		t.Errorf("%+v", list)
	}
}

func demandOf(op Op, text string, to uint16) Request { return Request{Op: op, Demand: text, To: to} }

// A forward of a container's port is kept, before those of ports, and each spelling is one.
func TestDemandIsKept(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.do(forward(80, 8081))
	f.do(demandOf(Forward, "web:80", 8080))
	if r := f.do(demandOf(Forward, "web:80/tcp", 8080)); len(r.Added)+len(r.Removed) != 0 {
		t.Errorf("the same again: %+v", r)
	}
	f.do(Request{Op: Forward, Demand: "svc/default/dns:53/udp", Guest: "dev"})
	f.do(demandOf(Deny, "web:80", 0))
	want := []string{"deny web:80/tcp", "forward svc/default/dns:53/udp of guest dev", "forward web:80/tcp", "forward 80/tcp"}
	if got := f.names(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	// As after a restart.
	list, err := Parse(f.path, []byte(f.text()), true)
	if err != nil {
		t.Fatal(err)
	}
	set, err := f.base.WithRuntime(Rules(list))
	if err != nil {
		t.Fatal(err)
	}
	if got := set.Demands(); len(got) != 2 || got[0].String() != "svc/default/dns:53/udp" || got[1].String() != "web:80/tcp" {
		t.Errorf("asked for: %v", got)
	}
	f.do(demandOf(Allow, "web:80", 0))
	f.do(demandOf(Remove, "web:80", 0))
	if got := f.names(); !slices.Equal(got, []string{want[1], want[3]}) {
		t.Errorf("%q", got)
	}
}

func TestDemandIsRefused(t *testing.T) {
	f := newFixture(t, configOfTest+"  - {match: {source: demand, ports: 81}, action: deny}\n")
	f.do(demandOf(Forward, "web:80", 8080))
	f.do(forward(9000, 9001))
	f.refuse(demandOf(Forward, "web:80", 8090), "exists already with another host port")
	f.refuse(demandOf(Forward, "api:80", 8080), `host port 8080 is taken by "forward web:80/tcp"`)
	f.refuse(demandOf(Forward, "api:9001", 0), `host port 9001 is taken by "forward 9000/tcp"`)
	f.refuse(forward(8080, 0), `host port 8080 is taken by "forward web:80/tcp"`)
	f.refuse(demandOf(Forward, "web:81", 0), "rule 2 of the configuration denies it")
	f.refuse(demandOf(Forward, "web", 0), "no port")
	f.refuse(Request{Op: Expose, Demand: "web:80", Seconds: 60}, "expose: want a port")
	f.refuse(Request{Op: Forward, Demand: "web:80", Port: 80, Protocol: port.TCP}, "want one of")
	f.refuse(demandOf(Remove, "gone:80", 0), "nothing was added for gone:80/tcp")
	f.refuse(demandOf(Allow, "web:80", 0), "web:80/tcp is not denied")
}
