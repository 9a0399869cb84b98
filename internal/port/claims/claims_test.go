// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

var (
	web   = port.Owner{Kind: port.OwnerService, Namespace: "default", ID: "default/web", Name: "web"}
	nginx = port.Owner{Kind: port.OwnerProcess, ID: "811", Name: "nginx"}
	// What is known of a process in another pid namespace.
	nameless = port.Owner{Kind: port.OwnerProcess, Name: "nginx"}
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func claim(guest string, owner port.Owner, host string) Claim {
	a := ap(guest)
	return Claim{Key: port.Key{Protocol: port.TCP, Address: a.Addr(), Port: a.Port()}, Owner: owner, Host: ap(host), Standing: Own}
}

func inCluster(o port.Owner, name string) port.Owner { o.Cluster = name; return o }

func of(guest int, c Claim) Claim   { c.Guest = guest; return c }
func by(rule uint64, c Claim) Claim { c.Target = rule; return c }
func unavailable(c Claim) Claim     { c.Unavailable = true; return c }
func kept(c Claim) Claim            { c.Kept = true; return c }
func asked(c Claim) Claim           { c.Standing = StandingOf(c.Key, c.Host, false); return c }
func byName(c Claim) Claim          { c.Standing = StandingOf(c.Key, c.Host, true); return c }
func moved(c Claim) Claim           { c.Standing = Moved; return c }
func udp(c Claim) Claim             { c.Key.Protocol = port.UDP; return c }

// show writes verdicts as "+" for a winner, "=N" for a claim that N serves and
// "!N" for one in conflict with N.
func show(vs []Verdict) (out []string) {
	for i, v := range vs {
		switch {
		case v.Winner == i && !v.Conflict:
			out = append(out, "+")
		case v.Conflict:
			out = append(out, fmt.Sprintf("!%d", v.Winner))
		default:
			out = append(out, fmt.Sprintf("=%d", v.Winner))
		}
	}
	return out
}

func TestDecide(t *testing.T) {
	none, owner := port.Owner{}, port.Owner{Kind: port.OwnerContainer, ID: "c"}
	const lo = "127.0.0.1:80"
	for _, tt := range []struct {
		name   string
		claims []Claim
		want   []string
	}{
		{"Services of one name in two clusters", []Claim{
			claim("10.0.0.1:80", inCluster(web, "k3s"), lo), claim("10.0.0.2:80", inCluster(web, "k3s"), lo), claim("0.0.0.0:80", inCluster(web, "kubeadm"), lo),
		}, []string{"!2", "!2", "+"}},
		{"loopback, wildcard, specific", []Claim{
			claim("10.0.0.1:80", none, lo), claim("0.0.0.0:80", none, lo), claim(lo, none, lo),
		}, []string{"!2", "!2", "+"}},
		{"another loopback address is a specific one", []Claim{
			claim("127.0.0.53:80", none, lo), claim(lo, none, lo),
		}, []string{"!1", "+"}},
		{"a wildcard precedes another loopback address", []Claim{
			claim("127.0.0.53:80", none, lo), claim("0.0.0.0:80", none, lo),
		}, []string{"!1", "+"}},
		{"another loopback address alone", []Claim{claim("127.0.0.53:80", none, lo)}, []string{"+"}},
		{"specific addresses in the order of their keys", []Claim{
			claim("10.0.0.2:80", none, lo), claim("10.0.0.1:80", none, lo),
		}, []string{"!1", "+"}},
		{"a host wildcard takes its family", []Claim{
			claim("0.0.0.0:80", none, "0.0.0.0:80"), claim("10.0.0.1:80", none, lo), claim("[::1]:80", none, "[::1]:80"),
		}, []string{"+", "!0", "+"}},
		{"but not what was accepted before it", []Claim{
			claim("0.0.0.0:80", none, "0.0.0.0:80"), claim(lo, none, lo),
		}, []string{"!1", "+"}},
		{"what is published precedes what is kept", []Claim{
			kept(claim(lo, none, lo)), claim("0.0.0.0:80", none, lo), of(1, claim(lo, none, lo)),
		}, []string{"!1", "+", "!1"}},
		{"what is kept serves what is kept alone", []Claim{
			kept(claim("0.0.0.0:80", owner, "0.0.0.0:80")), kept(claim(lo, owner, lo)), of(1, claim(lo, none, lo)),
		}, []string{"+", "=0", "!0"}},
		{"what is kept serves nothing that is published", []Claim{
			kept(claim("0.0.0.0:80", owner, "0.0.0.0:80")), claim(lo, owner, lo),
		}, []string{"!1", "+"}},
		{"another port, another protocol, any free port", []Claim{
			claim(lo, none, lo), claim("127.0.0.1:81", none, "127.0.0.1:81"), udp(claim(lo, none, lo)),
			claim("10.0.0.1:80", none, "127.0.0.1:0"), claim("10.0.0.2:80", none, "127.0.0.1:0"),
		}, []string{"+", "+", "+", "+", "+"}},
		{"three publications of one Service", []Claim{
			claim("0.0.0.0:80", web, lo), claim(lo, web, lo), claim("10.0.0.1:80", web, lo),
		}, []string{"=1", "+", "=1"}},
		{"two addresses of one process", []Claim{
			claim("10.0.0.1:80", nginx, lo), claim("10.0.0.2:80", nginx, lo),
		}, []string{"+", "=0"}},
		{"two ports of one process, by a rule", []Claim{
			claim("10.0.0.1:80", nginx, lo), claim("10.0.0.1:81", nginx, lo),
		}, []string{"+", "!0"}},
		{"processes without an id are not known to be one", []Claim{
			claim("10.0.0.1:80", nameless, lo), claim("10.0.0.2:80", nameless, lo),
		}, []string{"+", "!0"}},
		{"one NAT rule without an owner", []Claim{
			by(7, claim("10.0.0.1:80", none, lo)), by(7, claim("10.0.0.2:80", none, lo)), by(8, claim("10.0.0.3:80", none, lo)),
		}, []string{"+", "=0", "!0"}},
		{"an owner is not the same as none", []Claim{
			by(7, claim("10.0.0.1:80", web, lo)), by(7, claim("10.0.0.2:80", none, lo)),
		}, []string{"+", "!0"}},
		{"one publication at two overlapping addresses", []Claim{
			claim("0.0.0.0:80", none, lo), claim("0.0.0.0:80", none, "0.0.0.0:80"),
		}, []string{"=1", "+"}},
		{"the widest address of a server serves the narrower ones", []Claim{
			claim(lo, web, lo), claim("0.0.0.0:80", web, "0.0.0.0:80"), claim("10.0.0.1:80", web, lo), claim("10.0.0.2:80", nginx, lo),
		}, []string{"=1", "+", "=1", "!1"}},
		{"a wildcard that cannot be opened serves nobody", []Claim{
			claim(lo, web, lo), unavailable(claim("0.0.0.0:80", web, "0.0.0.0:80")), claim("10.0.0.1:80", web, lo), claim("10.0.0.2:80", nginx, lo),
			claim("10.0.0.3:80", web, "10.0.0.9:80"), claim("10.0.0.4:80", web, "0.0.0.0:80"), claim("10.0.0.5:80", nginx, "10.0.0.8:80"),
		}, []string{"+", "+", "=0", "!1", "+", "=1", "!1"}},
		{"not where another server is in between", []Claim{
			claim(lo, web, lo), by(1, claim("127.0.0.1:79", none, "10.9.9.9:80")), claim("0.0.0.0:80", web, "0.0.0.0:80"),
		}, []string{"+", "+", "!1"}},
		{"a rule that names the host port, whatever the numbers", []Claim{
			claim("0.0.0.0:80", none, lo), asked(claim("0.0.0.0:8080", none, lo)),
			claim("127.0.0.1:9090", none, "127.0.0.1:9090"), asked(claim("10.0.0.1:8080", none, "127.0.0.1:9090")),
		}, []string{"!1", "+", "!3", "+"}},
		{"a rule that names the port itself changes no order", []Claim{
			asked(claim("0.0.0.0:80", none, lo)), claim(lo, none, lo),
		}, []string{"!1", "+"}},
		{"two rules that name one host port", []Claim{
			asked(claim("0.0.0.0:82", none, lo)), asked(claim("0.0.0.0:81", none, lo)), claim(lo, none, lo),
		}, []string{"!1", "+", "!1"}},
		{"two rules that exchange ports", []Claim{
			asked(claim("0.0.0.0:80", none, "127.0.0.1:81")), asked(claim("0.0.0.0:81", none, lo)),
		}, []string{"+", "+"}},
		{"by name", []Claim{
			claim("0.0.0.0:80", nginx, lo), byName(claim("172.17.0.2:80", owner, lo)),
		}, []string{"!1", "+"}},
		{"another guest that came first keeps what it has", []Claim{
			of(1, asked(claim("0.0.0.0:8080", none, lo))), claim("0.0.0.0:80", none, lo),
		}, []string{"!1", "+"}},
		{"what was moved has no right by that", []Claim{
			moved(claim("0.0.0.0:79", none, lo)), claim("10.0.0.1:80", none, lo),
		}, []string{"!1", "+"}},
		{"the guest that came first keeps what it has", []Claim{
			of(1, claim(lo, web, lo)), of(0, claim("10.0.0.1:80", web, lo)), of(0, claim("10.0.0.2:80", web, lo)),
		}, []string{"!1", "+", "=1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := show(Decide(tt.claims)); !slices.Equal(got, tt.want) {
				t.Errorf("verdicts %q, want %q", got, tt.want)
			}
		})
	}
}

// random returns claims of few guests, owners and addresses, so that many meet.
func random(rng *rand.Rand) []Claim {
	guests := []string{"0.0.0.0", "127.0.0.1", "127.0.0.53", "10.0.0.1", "10.0.0.2", "[::]", "[::1]", "[fd00::1]"}
	hosts := []string{"0.0.0.0", "127.0.0.1", "127.0.0.2", "10.9.9.9", "[::]", "[::1]"}
	owners := []port.Owner{{}, {}, nameless, nginx, web}
	owner := make(map[string]port.Owner) // one for each publication
	seen := make(map[string]bool)
	var out []Claim
	for range 1 + rng.IntN(12) {
		guest, number := rng.IntN(2), 80+rng.IntN(2)
		from := fmt.Sprintf("%s:%d", guests[rng.IntN(len(guests))], number)
		pub := fmt.Sprint(guest, from)
		if _, ok := owner[pub]; !ok {
			owner[pub] = owners[rng.IntN(len(owners))]
		}
		to := fmt.Sprintf("%s:%d", hosts[rng.IntN(len(hosts))], 80+80*rng.IntN(2)*rng.IntN(2))
		if seen[pub+to] {
			continue
		}
		seen[pub+to] = true
		c := of(guest, claim(from, owner[pub], to))
		if len(pub)%2 == 0 { // a rule of two publications
			c.Target = 7
		}
		// What was asked for by name, moved or kept is so of a publication, at all its addresses.
		if c.Standing = StandingOf(c.Key, c.Host, len(from)%3 == 0); c.Standing == Asked && from[0] == '[' {
			c.Standing = Moved
		}
		c.Kept = guest == 1 && from[0] == '1'
		out = append(out, c)
	}
	return out
}

// model says the same as Decide by the definition in the package's comment,
// without any index.
func model(claims []Claim) []Verdict {
	order := slices.Clone(claims)
	slices.SortFunc(order, func(a, b Claim) int { return compare(&a, &b) })
	refused := make(map[int]int) // by position in order: who is in the way
	for i, c := range order {
		for j := range i {
			_, no := refused[j]
			if !no && c.Key.Protocol == order[j].Key.Protocol && Overlap(c.Host, order[j].Host) && c.serverOf() != order[j].serverOf() {
				refused[i] = j
				break
			}
		}
	}
	// serves returns who serves an accepted claim.
	serves := func(i int) int {
		exact := -1
		for j, o := range order {
			if _, no := refused[j]; no || o.Key.Protocol != order[i].Key.Protocol || !Overlap(o.Host, order[i].Host) || o.serverOf() != order[i].serverOf() {
				continue
			}
			if port.IsWildcard(o.Host.Addr()) {
				return j
			}
			if exact < 0 && o.Host == order[i].Host {
				exact = j
			}
		}
		return max(exact, 0)
	}
	out := make([]Verdict, len(claims))
	for n, c := range claims {
		i := slices.Index(stringsOf(order), stringOf(c))
		v := Verdict{}
		at := i
		if j, no := refused[i]; no {
			v.Conflict, at = true, j
		}
		if order[at].Host.Port() != 0 {
			at = serves(at)
		}
		v.Winner = slices.Index(stringsOf(claims), stringOf(order[at]))
		out[n] = v
	}
	return out
}

func stringOf(c Claim) string { return fmt.Sprint(c.Guest, c.Key, c.Host) }

func stringsOf(claims []Claim) (out []string) {
	for _, c := range claims {
		out = append(out, stringOf(c))
	}
	return out
}

func TestDecideAsTheModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 3_000 {
		claims := random(rng)
		if got, want := show(Decide(claims)), show(model(claims)); !slices.Equal(got, want) {
			t.Fatalf("claims %+v\nverdicts %q, want %q", claims, got, want)
		}
	}
}

// Claims are decided alike in any order.
func TestOrderOfClaimsDecidesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 3_000 {
		claims := random(rng)
		verdicts := Decide(claims)
		shuffled := slices.Clone(claims)
		at := rng.Perm(len(claims))
		for i, j := range at {
			shuffled[j] = claims[i]
		}
		for j, v := range Decide(shuffled) {
			i := slices.Index(at, j)
			if got := (Verdict{slices.Index(at, v.Winner), v.Conflict}); got != verdicts[i] {
				t.Fatalf("%+v: claim %d is %+v in one order and %+v in another", claims, i, verdicts[i], got)
			}
		}
	}
}

// A guest may ask for as many addresses as the limit allows; each change decides
// about all of them.
func BenchmarkDecide(b *testing.B) {
	var claims []Claim
	for i := range 4096 {
		host := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(i)}), 80)
		claims = append(claims, Claim{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: uint16(i + 1)}, Host: host})
	}
	b.ReportAllocs()
	for b.Loop() {
		Decide(claims)
	}
}

// What a label asks for yields to everybody, also to guests that came later and to what is
// only kept.
func TestLabelsYield(t *testing.T) {
	label := claim("127.0.0.1:9000", web, "127.0.0.1:80")
	label.Yields = true
	for name, other := range map[string]Claim{
		"another guest":   of(1, claim("0.0.0.0:80", nginx, "127.0.0.1:80")),
		"another address": claim("10.0.0.1:80", nginx, "127.0.0.1:80"),
		"kept":            kept(claim("0.0.0.0:80", nginx, "127.0.0.1:80")),
		"moved":           {Key: port.Key{Protocol: port.TCP, Port: 70}, Owner: nginx, Host: ap("127.0.0.1:80"), Standing: Moved},
	} {
		for _, list := range [][]Claim{{label, other}, {other, label}} {
			for i, v := range Decide(list) {
				if v.Conflict != list[i].Yields {
					t.Errorf("%s: %v", name, show(Decide(list)))
				}
			}
		}
	}
}
