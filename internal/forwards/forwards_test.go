// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/yamltree"
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
	f.Store = NewStore(filepath.Join(t.TempDir(), "state", "forwards.yaml"), base, true, slog.New(slog.DiscardHandler), func(s *rules.Set) { f.set = s })
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
	list, err := f.List()
	if err != nil {
		f.t.Fatal(err)
	}
	for _, r := range list {
		names = append(names, r.Name)
	}
	return names
}

// decision is what the agent decides about a port, as text.
func (f *fixture) decision(n uint16) string {
	d := f.set.Decide(port.Publication{
		Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}, Owner: port.Owner{Kind: port.OwnerContainer, Name: "web"},
	})
	if !d.Allow {
		return d.Reason.String()
	}
	return d.Host[0].String()
}

func tcp(op Op, n uint16) Request { return Request{Op: op, Protocol: port.TCP, Port: n} }

func forward(n, to uint16) Request { return Request{Op: Add, Protocol: port.TCP, Port: n, To: to} }

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
		list, err := Parse(f.path, []byte(f.text()))
		if err != nil {
			t.Fatal(err)
		}
		again, err := f.base.WithRuntime(list)
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
	f.write("rules:\n- {match: {ports: [8080, 9229]}, action: allow, hostAddress: all}\n")
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
	f.do(Request{Op: Add, Protocol: port.UDP, Port: 8080}) // another protocol
	f.path = ""
	f.refuse(tcp(Deny, 1), "forwardsFile")
}

// A file that the next start would refuse is not written to, whatever the change is.
func TestRulesOfTheOtherSideAreRefused(t *testing.T) {
	for _, c := range []struct {
		guests     bool
		rule, want string
	}{
		{false, "{match: {guest: dev}, action: deny}", `forwards.yaml: rule 2: guest "dev": only rules of a host name guests`},
		{false, "{action: allow, onConflict: next}", "rule 2: onConflict next: only a host opens another port"},
		{false, "{action: expose, until: '" + time.Now().Add(time.Hour).UTC().Format(time.RFC3339) + "'}", "rule 2: action expose: only a host opens ports"},
		{true, "{match: {protocol: tcp}, action: allow, proxyProtocol: v2}", "rule 2: proxyProtocol v2: only an agent connects to servers"},
	} {
		f := newFixture(t, configOfTest)
		f.guests = c.guests
		f.write("rules:\n- {match: {ports: 80}, action: deny}\n- " + c.rule + "\n")
		f.refuse(tcp(Deny, 8080), c.want)
		if f.set != f.base {
			t.Errorf("%s: applied", c.rule)
		}
		f.guests = !c.guests
		f.do(tcp(Deny, 8080))
	}
}

// A rule that was written by hand is not taken for one that a request made by its name alone.
func TestNamesOfRulesByHand(t *testing.T) {
	f := newFixture(t, "expose: loopback\n")
	const byHand = "rules:\n  - name: deny 9229/tcp\n    match: {protocol: tcp, ports: [9229, 9230]}\n    action: deny\n"
	f.write(byHand)
	if r := f.do(tcp(Allow, 9229)); len(r.Removed) > 0 || !slices.Equal(r.Added, []string{"allow 9229/tcp"}) || f.decision(9230) != "denied by runtime rule 1 (deny 9229/tcp)" {
		t.Errorf("%+v, %s", r, f.decision(9230))
	}
	f.do(tcp(Remove, 9229))
	f.do(tcp(Deny, 9229))
	if r := f.do(tcp(Allow, 9229)); !slices.Equal(r.Removed, []string{"deny 9229/tcp"}) || f.text() != byHand {
		t.Errorf("%+v\n%s", r, f.text())
	}
	f.refuse(tcp(Remove, 9229), "nothing was added for 9229/tcp")
	f.write("rules: [{name: deny all, match: {owner: container}, action: deny}]\n")
	f.refuse(Request{Op: Allow, All: true}, "all is not denied")
}

// A file that is too large is called that.
func TestTooLargeFile(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.write("rules:\n- {match: {ports: 80}, action: deny}\n#" + strings.Repeat("x", yamltree.MaxSize-50) + "\n")
	f.refuse(tcp(Deny, 8080), "bytes, and may have 262144: remove rules or comments")
}

// What is in the file is not what is in effect while the configuration is refused.
func TestEntriesNotInEffect(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.do(tcp(Deny, 80))
	f.do(tcp(Deny, 81))
	entries := func() (text []string) {
		t.Helper()
		list, err := f.Entries()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			text = append(text, strings.TrimSuffix(e.Name+": "+e.Differ, ": "))
			if e.Off != strings.HasPrefix(e.Differ, "not in effect") {
				t.Errorf("%+v", e)
			}
		}
		return text
	}
	if got := entries(); !slices.Equal(got, []string{"deny 80/tcp", "deny 81/tcp"}) {
		t.Errorf("%q", got)
	}
	f.write("rules:\n- {name: deny 80/tcp, match: {protocol: tcp, ports: 80}, action: deny}\n- {name: mine, match: {ports: 82}, action: deny}\n")
	if got := entries(); len(got) != 3 || got[0] != "deny 80/tcp" || got[1] != "mine: not in effect, until the configuration is read again" {
		t.Errorf("%q", got)
	}
	f.Refuse(errors.New("agent.yaml:1:1: wrong\nand more"))
	const why = "because the configuration was refused: agent.yaml:1:1: wrong; and more"
	if got := entries(); !slices.Equal(got, []string{"deny 80/tcp", "mine: not in effect, " + why, "deny 81/tcp: not in the file any more, but in effect, " + why}) {
		t.Errorf("%q", got)
	}
	f.Reload(f.base)
	if got := entries(); !slices.Equal(got, []string{"deny 80/tcp", "mine"}) {
		t.Errorf("%q", got)
	}
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
		d := f.set.Host("vm", port.Publication{Key: k}, []netip.AddrPort{netip.AddrPortFrom(port.Loopback(k.Address), c.port)})
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
	p := port.Publication{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8080}}
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
	if names := f.names(); !slices.Equal(names, []string{"forward 8080/tcp of guest dev", "forward 8080/tcp of guest build", "forward 8080/tcp"}) {
		t.Errorf("order %q", names)
	}
	for guest, want := range map[string]string{"dev": "127.0.0.1:8080", "build": "127.0.0.1:18080", "other": "127.0.0.1:8080"} {
		if d := f.set.Host(guest, p, asked); !d.Allow || d.Host[0].String() != want {
			t.Errorf("%s: %+v, want %s", guest, d, want)
		}
	}
}

const byHand = `# mine
rules: # as I want them

  # keep this
  - name: hand   # and this
    match: {ports: 5000-5010}
    action: allow
    hostPort: "+100"

  # about the next
  - name: "forward 9000/tcp"
    match: {protocol: tcp, ports: 9000}
    action: allow
  # the end
`

// Edits keep each line that a user wrote, and an undone edit leaves the text as it was.
func TestEditsByHandAreKept(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.write(byHand)
	f.do(tcp(Deny, 9000))
	f.do(forward(8080, 18080))
	for line := range strings.Lines(byHand) {
		if !strings.Contains(f.text(), line) {
			t.Errorf("line lost: %q", line)
		}
	}
	want := []string{"hand", "deny 9000/tcp", "forward 9000/tcp", "forward 8080/tcp"}
	if names := f.names(); !slices.Equal(names, want) {
		t.Errorf("order %q, want %q", names, want)
	}
	f.do(tcp(Allow, 9000))
	f.do(tcp(Remove, 8080))
	if f.text() != byHand {
		t.Errorf("not restored:\n%s", f.text())
	}
}

// Text in a form that single lines do not change is left alone.
func TestOtherFormsAreRefusedUnchanged(t *testing.T) {
	for _, text := range []string{
		"rules: [{name: a, match: {ports: 1}, action: deny}]\n",
		"{rules: [{name: a, match: {ports: 1}, action: deny}]}\n",
		"rules:\n-\n  name: deny 7/tcp\n  match: {protocol: tcp, ports: 7}\n  action: deny\n- {name: b, action: deny}\n",
	} {
		f := newFixture(t, configOfTest)
		f.write(text)
		if strings.Contains(text, "7/tcp") {
			f.refuse(tcp(Remove, 7), "was edited by hand")
			continue
		}
		f.refuse(forward(8080, 0), "was edited by hand")
	}
	f := newFixture(t, configOfTest)
	f.write("# made elsewhere\rrules:\r- name: deny 7/tcp\r  match: {ports: 7, protocol: tcp}\r  action: deny\r")
	f.refuse(tcp(Remove, 7), "line breaks other than LF and CRLF")
	f.refuse(forward(8080, 0), "line breaks other than LF and CRLF")
	f.write("rules:\n- {name: a, action: dney}\n")
	f.refuse(forward(8080, 0), "dney")
	for _, text := range []string{"", "rules:\n", "rules: []\n", "# nothing\n", "rules: # none\n", "\r\n", "rules:\r\n- {name: a, action: deny}\r\n"} {
		f.write(text)
		f.Reload(f.base)
		if f.do(forward(8080, 0)); !slices.Contains(f.names(), "forward 8080/tcp") {
			t.Errorf("%q: not added", text)
		}
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
	f.write(byHand)
	if changed, err := f.replace(before, []byte("rules:")); !changed || err != nil || f.text() != byHand {
		t.Errorf("changed %v, %v; the file is\n%s", changed, err, f.text())
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
	for _, name := range []string{`a"}, action: allow #`, "{*}", "- x", "ü: é", `\`, "yes", "<b>&"} {
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
		if n := f.set.RuntimeLen(); n != 1 {
			t.Errorf("%s: %d rules in effect", name, n)
		}
	}
	f.Reload(f.base) // confirmed
	f.do(tcp(Deny, 9090))
	if n := f.set.RuntimeLen(); n != 1 {
		t.Errorf("%d rules in effect", n)
	}
}

// Each rule that a request made is undone by the request that Undo gives, whatever it names;
// rules that were written by hand have none.
func TestUndo(t *testing.T) {
	for _, q := range []Request{
		{Op: Add, Protocol: port.TCP, Port: 8080, To: 18080}, {Op: Add, Protocol: port.UDP, Port: 53, Guest: "dev"},
		{Op: Deny, Protocol: port.TCP, Port: 8080, Guest: "d*"}, {Op: Deny, Owner: `we"b of guest x`}, {Op: Deny, Owner: "web-*", Guest: "dev"},
		{Op: Deny, All: true}, {Op: Deny, Protocol: port.TCP, Port: 8080}, {Op: Allow, Protocol: port.UDP, Port: 5353},
		{Op: Add, Demand: "web:80", To: 8080}, {Op: Add, Demand: "svc/default/dns:53/udp", Guest: "dev"}, {Op: Deny, Demand: "shop/web:80/tcp"},
	} {
		f := newFixture(t, configOfTest)
		before := f.Generation()
		made := f.do(q)
		list, err := f.List()
		if err != nil || len(list) != 1 || f.Generation() == before {
			t.Fatalf("%v: %v, %v, generation %d", q, list, err, f.Generation())
		}
		undo, ok := Undo(list[0])
		if !ok {
			t.Fatalf("%v cannot be undone", q)
		}
		if r := f.do(undo); !slices.Equal(r.Removed, made.Added) || len(r.Added) > 0 {
			t.Errorf("%v: %v undid %v, want %v", q, undo, r, made.Added)
		}
	}
	f := newFixture(t, configOfTest)
	f.write("rules:\n" +
		"  - {name: mine, match: {ports: 8080}, action: deny}\n" +
		"  - {name: deny 8080/tcp, match: {protocol: tcp, ports: 8081}, action: deny}\n" +
		"  - {match: {ports: 8082}, action: deny}\n" +
		"  - {name: 'forward web:80/tcp', match: {protocol: tcp, ports: 80, demand: 'api:80/tcp'}, action: allow}\n" +
		"  - {name: forward 80/tcp, match: {protocol: tcp, ports: 80, demand: 'web:80/tcp'}, action: allow}\n" +
		"  - {name: forward 8080/tcp, match: {protocol: tcp, ports: 8080, address: 127.0.0.1}, action: allow}\n" +
		"  - {name: deny 8084/tcp, match: {protocol: tcp, ports: 8084-8090}, action: deny}\n" +
		"  - {name: forward 8083/tcp, match: {protocol: tcp, ports: 8083}, action: deny}\n")
	list, err := f.List()
	if err != nil || len(list) != 8 {
		t.Fatal(list, err)
	}
	for _, r := range list {
		if q, ok := Undo(r); ok {
			t.Errorf("%q is undone by %v", r.Name, q)
		}
	}
}

func demandOf(op Op, text string, to uint16) Request { return Request{Op: op, Demand: text, To: to} }

// A forward of a container's port is kept, before those of ports, and each spelling is one.
func TestDemandIsKept(t *testing.T) {
	f := newFixture(t, configOfTest)
	f.do(forward(80, 8081))
	f.do(demandOf(Add, "web:80", 8080))
	if r := f.do(demandOf(Add, "web:80/tcp", 8080)); len(r.Added)+len(r.Removed) != 0 {
		t.Errorf("the same again: %+v", r)
	}
	f.do(Request{Op: Add, Demand: "svc/default/dns:53/udp", Guest: "dev"})
	f.do(demandOf(Deny, "web:80", 0))
	want := []string{"deny web:80/tcp", "forward svc/default/dns:53/udp of guest dev", "forward web:80/tcp", "forward 80/tcp"}
	if got := f.names(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	// As after a restart.
	list, err := Parse(f.path, []byte(f.text()))
	if err != nil {
		t.Fatal(err)
	}
	set, err := f.base.WithRuntime(list)
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
	f.do(demandOf(Add, "web:80", 8080))
	f.do(forward(9000, 9001))
	f.refuse(demandOf(Add, "web:80", 8090), "exists already with another host port")
	f.refuse(demandOf(Add, "api:80", 8080), `host port 8080 is taken by "forward web:80/tcp"`)
	f.refuse(demandOf(Add, "api:9001", 0), `host port 9001 is taken by "forward 9000/tcp"`)
	f.refuse(forward(8080, 0), `host port 8080 is taken by "forward web:80/tcp"`)
	f.refuse(demandOf(Add, "web:81", 0), "rule 2 of the configuration denies it")
	f.refuse(demandOf(Add, "web", 0), "no port")
	f.refuse(Request{Op: Expose, Demand: "web:80", Seconds: 60}, "expose: want a port")
	f.refuse(Request{Op: Add, Demand: "web:80", Port: 80, Protocol: port.TCP}, "want one of")
	f.refuse(demandOf(Remove, "gone:80", 0), "nothing was added for gone:80/tcp")
	f.refuse(demandOf(Allow, "web:80", 0), "web:80/tcp is not denied")
}

// A file that an editor of Windows saved can be changed, and keeps all that is in it.
func TestFileWithByteOrderMark(t *testing.T) {
	for _, text := range []string{"", "rules:\r\n", "# mine\r\nrules:\r\n  - {name: mine, match: {ports: 22}, action: deny}\r\n"} {
		f := newFixture(t, configOfTest)
		f.write("\ufeff" + text)
		f.do(Request{Op: Deny, Protocol: port.TCP, Port: 8080})
		f.do(Request{Op: Add, Protocol: port.TCP, Port: 80, To: 8081})
		f.do(Request{Op: Allow, Protocol: port.TCP, Port: 8080})
		list, err := f.List()
		if err != nil || list[len(list)-1].Name != "forward 80/tcp" || len(list) != 1+strings.Count(text, "mine,") || strings.Count(f.text(), "# mine") != strings.Count(text, "# mine") {
			t.Errorf("%q becomes %q: %v", text, f.text(), err)
		}
	}
	f := newFixture(t, configOfTest)
	f.write("\xff\xfer\x00u\x00")
	f.refuse(Request{Op: Deny, Protocol: port.TCP, Port: 8080}, "UTF-16")
}
