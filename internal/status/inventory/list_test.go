// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead/fairlead/internal/port"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

func tcp(address string, number int, owner string) Port {
	return Port{
		Key:   port.Key{Protocol: port.TCP, Address: netip.MustParseAddr(address), Port: uint16(number)},
		State: port.Active, Owner: Owner{Kind: port.OwnerProcess, Name: owner, ID: "7"}, Sources: []string{"socket"}, Since: noon,
	}
}

func built(t *testing.T, r Report) Status {
	t.Helper()
	s, err := build(r, maxBytes)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestListRoundTrip(t *testing.T) {
	denied := tcp("::", 443, "web")
	denied.State = port.Denied
	withheld := tcp("10.0.0.1", 70, "bound")
	withheld.Withheld = true
	want := []Port{tcp("0.0.0.0", 22, "sshd"), withheld, denied, tcp("127.0.0.1", 8080, "dev\x1b[2J")}
	s := built(t, Report{Agent: "1.0", Ports: []Port{want[3], want[1], want[0], want[2]}})
	got, err := s.Decode()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Errorf("list (-want +got):\n%s", d)
	}
	if want := (Counts{Total: 4, Wide: 2, Active: 3, Denied: 1}); s.Ports != want {
		t.Errorf("counts %+v, want %+v", s.Ports, want)
	}
	wide := []WidePort{{"tcp", "0.0.0.0", 22, "process sshd"}, {"tcp", "::", 443, "process web"}}
	if d := cmp.Diff(wide, s.Wide); d != "" {
		t.Errorf("wide (-want +got):\n%s", d)
	}
}

// Both families of one owner are one port, with the better state.
func TestCountOfBothFamilies(t *testing.T) {
	denied, loopback := tcp("::", 80, "web"), tcp("::1", 81, "web")
	denied.State = port.Denied
	got := count([]Port{tcp("0.0.0.0", 80, "web"), denied, tcp("127.0.0.1", 81, "web"), loopback, tcp("0.0.0.0", 82, "web"), tcp("::", 82, "other")})
	if want := (Counts{Total: 4, Wide: 3, Active: 4}); got != want {
		t.Errorf("counts %+v, want %+v", got, want)
	}
}

func TestHash(t *testing.T) {
	a, b := tcp("0.0.0.0", 22, "sshd"), tcp("0.0.0.0", 80, "web")
	of := func(r Report) string { return built(t, r).Hash }
	base := of(Report{Ports: []Port{a, b}})
	if of(Report{Ports: []Port{b, a}}) != base {
		t.Error("the order of ports changes the hash")
	}
	changed := b
	changed.State = port.Denied
	older := b
	older.Since = noon.Add(-time.Hour)
	for name, r := range map[string]Report{
		"state": {Ports: []Port{a, changed}}, "since": {Ports: []Port{a, older}}, "removal": {Ports: []Port{a}}, "agent": {Agent: "2", Ports: []Port{a, b}},
		"condition": {Ports: []Port{a, b}, Conditions: []Condition{{Type: ConditionReady, Message: "stale"}}},
	} {
		if of(r) == base {
			t.Errorf("%s does not change the hash", name)
		}
	}
}

// However many ports a node has and whatever their owners are called, the object stays
// far below what the API server takes, says what it omits, and keeps the ports that are
// open wider than loopback.
func TestListIsBounded(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	random := func() string {
		b := make([]byte, 400)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return string(b)
	}
	for _, c := range []struct {
		name  string
		ports int
		owner func() string
		full  bool // the list has as many as it may
	}{
		{"as many as fit", maxPorts, func() string { return "web" }, true},
		{"one port more", maxPorts + 1, func() string { return "web" }, true},
		{"all ports", 60_000, func() string { return "web" }, true},
		{"names that do not compress", 4_000, random, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var ports []Port
			for i := range c.ports {
				p := tcp("127.0.0.1", i, "")
				p.Owner = OwnerOf(port.Owner{Kind: port.OwnerProcess, Name: c.owner()})
				ports = append(ports, p)
			}
			ports[len(ports)-1].Address = netip.MustParseAddr("0.0.0.0")
			s := built(t, Report{Ports: ports})
			got, err := s.Decode()
			if err != nil {
				t.Fatal(err)
			}
			if len(s.List) > maxBytes || len(got)+s.ListOmitted != c.ports || s.Ports.Total != c.ports {
				t.Errorf("%d bytes, %d listed, %d omitted, %d counted of %d", len(s.List), len(got), s.ListOmitted, s.Ports.Total, c.ports)
			}
			if c.full && len(got) != min(maxPorts, c.ports) {
				t.Errorf("%d listed, want %d", len(got), maxPorts)
			}
			if len(got) == 0 || got[len(got)-1].Address != netip.MustParseAddr("0.0.0.0") {
				t.Error("the list omits what is open wider than loopback")
			}
		})
	}
	var wide []Port
	for i := range 50 {
		wide = append(wide, tcp("0.0.0.0", i+1, "web"))
	}
	if s := built(t, Report{Ports: wide}); len(s.Wide) != maxWide || s.WideOmitted != 50-maxWide || s.Ports.Wide != 50 {
		t.Errorf("%d wide entries, %d omitted, %d counted", len(s.Wide), s.WideOmitted, s.Ports.Wide)
	}
}

func TestDecodeRefuses(t *testing.T) {
	zip := func(text string) []byte {
		b, err := compress([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	for range maxPlain>>20 + 1 {
		_, _ = z.Write(make([]byte, 1<<20))
	}
	_ = z.Close()
	const entry = `{"protocol":"tcp","address":"::","port":1,"state":"active"}`
	many := func(n int, entry string) []byte { return zip("[" + strings.Repeat(entry+",", n-1) + entry + "]") }
	if got, err := (Status{List: many(maxPorts, entry)}).Decode(); err != nil || len(got) != maxPorts {
		t.Errorf("as many ports as an agent lists: decoded %d, %v", len(got), err)
	}
	for name, list := range map[string][]byte{
		"no gzip": []byte("x"), "no JSON": zip("{"), "no address": zip(`[{"protocol":"tcp","port":1,"state":"active"}]`),
		"cut": zip("[]")[:12], "bomb": bomb.Bytes(), "no array": zip("1"), "two arrays": zip("[][]"),
		"one port more than an agent lists": many(maxPorts+1, entry), "empty entries": many(1<<20, "{}"),
		"many sources":  zip(`[` + strings.TrimSuffix(entry, "}") + `,"sources":[` + strings.Repeat(`"",`, maxSources) + `""]}]`),
		"a large entry": zip(`[` + strings.TrimSuffix(entry, "}") + `,"owner":{"name":"` + strings.Repeat("x", maxEntry) + `"}}]`),
	} {
		if got, err := (Status{List: list}).Decode(); err == nil {
			t.Errorf("%s: decoded %d ports", name, len(got))
		}
	}
}

// A few kilobytes that any agent can write must not cost a reader, or the agent whose
// node's object it is, hundreds of megabytes.
func TestRefusalTakesLittleMemory(t *testing.T) {
	list, err := compress([]byte("[" + strings.Repeat("{},", 1<<20) + "{}]"))
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := (Status{List: list}).Decode(); err == nil {
		t.Error("decoded entries without addresses")
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > maxPlain {
		t.Errorf("%d bytes of list take %d MB", len(list), n>>20)
	}
}

// White space, of which a few kilobytes can be 16 MiB, costs a reader in proportion to its length.
func TestWhiteSpaceTakesLittleTime(t *testing.T) {
	took := func(n int) time.Duration {
		list, err := compress([]byte("[" + strings.Repeat(" ", n) + "]"))
		if err != nil {
			t.Fatal(err)
		}
		least := time.Hour
		for range 5 {
			start := time.Now()
			if _, err := (Status{List: list}).Decode(); err != nil {
				t.Fatal(err)
			}
			least = min(least, time.Since(start))
		}
		return least
	}
	const times = 16
	if short, long := took(maxPlain/times-2), took(maxPlain-2); long > 6*times*short {
		t.Errorf("%d times as much takes %s, and not %s", times, long, short)
	}
}

func TestWithheld(t *testing.T) {
	for reason, want := range map[port.Reason]bool{
		{}: false, port.Because(port.FromSources, "10.0.0.0/8"): false, port.Because(port.FromList, "@clients"): false,
		port.Because(port.OnInterface, "cni0"): false, port.Because(port.WithoutUplink, "eth0"): false,
		port.Because(port.MulticastAddress): false, port.Because(port.InterfaceBare, "eth0"): false,
		port.Join(port.Because(port.Unlistened), port.Because(port.FromSources, "10.0.0.0/8")): false,

		port.Because(port.Unlistened): true, port.Because(port.AddressNowhere): true, port.Because(port.FromHere): true,
		port.Because(port.AddressElsewhere): true, port.Because(port.LeftBehind, "web"): true,
		port.Because(port.NoAddress): true, port.Because(port.LeavesOutReached): true, port.Because(port.ForTheGuest): true,
	} {
		origins := []port.OriginInfo{{Withheld: reason}}
		if got := Withheld(origins); got != want {
			t.Errorf("%q: withheld %v, want %v", reason, got, want)
		}
		if Withheld(append(origins, port.OriginInfo{})) {
			t.Errorf("%q beside an origin that others reach: withheld", reason)
		}
	}
}

func TestTruncate(t *testing.T) {
	for in, want := range map[string]string{"abc": "abc", "abcdef": "abcde", "abcdé": "abcd", "a\xff": "a?", strings.Repeat("\xff", 9): "?"} {
		if got := truncate(in, 5); got != want {
			t.Errorf("truncate(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	s, err := build(Report{Ports: []Port{tcp("0.0.0.0", 22, "sshd")}}, maxBytes)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(s.List)
	spaces, err := compress([]byte("[" + strings.Repeat(" ", 1<<20) + "]"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(spaces)
	f.Fuzz(func(_ *testing.T, list []byte) {
		ports, err := (Status{List: list}).Decode()
		if err == nil {
			_ = fmt.Sprint(ports)
		}
	})
}
