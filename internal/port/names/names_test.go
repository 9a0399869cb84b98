// SPDX-License-Identifier: Apache-2.0

package names

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/port"
)

var any4 = netip.IPv4Unspecified()

func tcp(guest string, n uint16, o port.Owner) Port {
	return Port{Guest: guest, Key: port.Key{Protocol: port.TCP, Address: any4, Port: n}, Owner: o}
}

func container(id, name string) port.Owner {
	return port.Owner{Kind: port.OwnerContainer, ID: id, Name: name}
}

func composed(id, name, project, service string) port.Owner {
	o := container(id, name)
	o.Labels = map[string]string{composeProject: project, composeService: service}
	return o
}

func service(namespace, name string) port.Owner {
	return port.Owner{Kind: port.OwnerService, ID: namespace + "/" + name, Name: name, Namespace: namespace}
}

func TestLabel(t *testing.T) {
	for name, want := range map[string]string{
		"web": "web", "Web_1": "web-1", "a__b": "a-b", "-a-": "a", "_": "", "": "", "a.b": "a-b", "a--b": "a--b",
		"xn--bcher-kva": "xn--bcher-kva", "bücher": "b-cher", "a\x00\x1b[b": "a-b", "vsock://3:1023": "vsock-3-1023",
		strings.Repeat("a", 62) + "_b": strings.Repeat("a", 62), strings.Repeat("a", 70): strings.Repeat("a", 63),
	} {
		if got := Label(name); got != want {
			t.Errorf("Label(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestFromHost(t *testing.T) {
	for host, want := range map[string]struct {
		name  string
		asked Asked
	}{
		"localhost": {"", Page}, "LOCALHOST:80": {"", Page}, "localhost.": {"", Page}, "127.0.0.1": {"", Page}, "127.0.0.1:8080": {"", Page},
		"[::1]": {"", Page}, "[::1]:80": {"", Page},
		"web.localhost": {"web", Named}, "Web.LocalHost.:8080": {"web", Named}, "8080.web.localhost": {"8080.web", Named},
		"xn--bcher-kva.localhost": {"xn--bcher-kva", Named}, "a.b.c.localhost": {"a.b.c", Named},
		"": {}, ":80": {}, "evil.example": {}, "localhost.evil.example": {}, "weblocalhost": {}, ".localhost": {}, "a..localhost": {},
		"web.localhost..": {}, "-a.localhost": {}, "a_b.localhost": {}, "10.0.0.1": {}, "[::2]": {}, "[127.0.0.1]": {}, "::1": {},
		"web.localhost:http": {}, "web.localhost:99999": {}, "[::1": {}, "[fe80::1%lo]": {}, "a b.localhost": {}, "ü.localhost": {}, "127.1": {},
		strings.Repeat("a", 64) + ".localhost": {}, "web.localhost/x": {}, "user@web.localhost": {}, "0.0.0.0": {}, "127.0.0.1.": {"", Page},
	} {
		if name, asked := FromHost(host, Local); name != want.name || asked != want.asked {
			t.Errorf("FromHost(%q) = %q, %d; want %q, %d", host, name, asked, want.name, want.asked)
		}
	}
	if name, asked := FromHost("web.vm.test", "vm.test"); name != "web" || asked != Named {
		t.Errorf("another domain: %q, %d", name, asked)
	}
	if _, asked := FromHost("web.localhost", "vm.test"); asked != Foreign {
		t.Errorf("a name outside the domain: %d", asked)
	}
}

// find returns what a name leads to: a port with its guest, or the names.
func find(table *Table, name string, usual uint16) string {
	f := table.Find(name, usual)
	switch f.Outcome {
	case Leads:
		return fmt.Sprintf("%s %s %d", f.Port.Guest, f.Port.Owner.ID, f.Port.Key.Port)
	case Unknown:
		return "unknown"
	}
	return fmt.Sprintf("%s: %s", map[Outcome]string{Choice: "choice", Ambiguous: "ambiguous"}[f.Outcome], strings.Join(f.Names, " "))
}

func TestFind(t *testing.T) {
	table := New([]Port{
		tcp("vm", 8080, container("1", "web")),
		tcp("vm", 9000, composed("2", "shop-api-1", "shop", "api")),
		tcp("vm", 9001, composed("3", "shop-db-1", "shop", "db")),
		tcp("vm", 9002, composed("4", "blog-db-1", "blog", "db")),
		tcp("vm", 9003, composed("5", "blog-job-1", "blog", "job")),
		tcp("vm", 9004, composed("6", "blog-job-2", "blog", "job")),
		tcp("vm", 30080, service("default", "front")),
		tcp("vm", 30081, service("a", "cache")),
		tcp("vm", 30082, service("b", "cache")),
		tcp("vm", 30083, port.Owner{Kind: port.OwnerService, ID: "s1", Name: "swarmed"}),
		tcp("vm", 80, container("7", "proxy")),
		tcp("vm", 443, container("7", "proxy")),
		tcp("vm", 7001, container("8", "many")),
		tcp("vm", 7002, container("8", "many")),
		tcp("one", 5000, container("9", "twin")),
		tcp("two", 5000, container("9", "twin")),
		tcp("vm", 6001, container("10", "a_b")),
		tcp("vm", 6002, container("11", "a.b")),
		tcp("vm", 6003, container("12", "7001.x")),
		tcp("vm", 6004, port.Owner{Kind: port.OwnerProcess, ID: "811", Name: "nginx"}),
		tcp("vm", 6005, port.Owner{Kind: port.OwnerContainer, ID: "13", Name: "cut", NameCut: true}),
		{Guest: "vm", Key: port.Key{Protocol: port.UDP, Address: any4, Port: 53}, Owner: container("14", "dns")},
	}, []string{"vm", "one", "two"}, Local)
	for name, want := range map[string]string{
		"web": "vm 1 8080", "web.vm": "vm 1 8080", "8080.web": "vm 1 8080", "8080.web.vm": "vm 1 8080",
		"81.web": "choice: 8080.web.localhost", "08080.web": "unknown", "0.web": "unknown", "70000.web": "unknown",
		"api": "vm 2 9000", "api.shop": "vm 2 9000", "api.shop.vm": "vm 2 9000", "shop-api-1": "vm 2 9000",
		"db": "ambiguous: shop-db-1.localhost blog-db-1.localhost", "db.shop": "vm 3 9001", "db.blog": "vm 4 9002",
		"9001.db": "ambiguous: shop-db-1.localhost blog-db-1.localhost",
		"job":     "ambiguous: blog-job-1.localhost blog-job-2.localhost", "job.blog": "ambiguous: blog-job-1.localhost blog-job-2.localhost",
		"front": "vm default/front 30080", "front.default": "vm default/front 30080", "front.default.vm": "vm default/front 30080",
		"cache": "ambiguous: cache.a.localhost cache.b.localhost", "cache.b": "vm b/cache 30082",
		"swarmed": "vm s1 30083", "swarmed.vm": "vm s1 30083",
		"proxy": "vm 7 80", "443.proxy": "vm 7 443", "many": "choice: 7001.many.localhost 7002.many.localhost", "7002.many": "vm 8 7002",
		"twin": "ambiguous: twin.one.localhost twin.two.localhost", "twin.two": "two 9 5000", "5000.twin.one": "one 9 5000",
		"a-b": "ambiguous: ", "a-b.vm": "ambiguous: ", "7001-x": "vm 12 6003",
		"nginx": "unknown", "cut": "unknown", "dns": "unknown", "": "unknown", "shop": "unknown",
	} {
		if got := find(table, name, 80); got != want {
			t.Errorf("%q leads to %q, want %q", name, got, want)
		}
	}
	if got := find(table, "proxy", 443); got != "vm 7 443" {
		t.Errorf("proxy over TLS leads to %q", got)
	}
}

// A name below that of a guest is that guest's alone, also while it has nobody of that name.
func TestNamesOfGuests(t *testing.T) {
	owned := tcp("vm", 5432, container("1", "db"))
	labelled := tcp("dev", 2, container("3", "labelled"))
	labelled.Alias = "db.vm"
	others := []Port{
		tcp("dev", 1, composed("2", "evil", "vm", "db")), labelled, tcp("dev", 3, service("vm", "db")),
		tcp("dev", 4, composed("4", "deep", "my_vm", "db")), tcp("dev", 5432, container("5", "vm")),
	}
	guests := []string{"vm", "dev", "my-vm"}
	with, without := New(append(others, owned), guests, Local), New(others, guests, Local)
	for name, want := range map[string]string{
		"db.vm": "vm 1 5432", "5432.db.vm": "vm 1 5432", "5432.vm": "unknown", "db.my-vm": "unknown",
		"evil.dev": "dev 2 1", "db-vm": "dev 3 2", "db.vm.dev": "ambiguous: evil.localhost", "vm": "dev 5 5432", "5432.vm.dev": "dev 5 5432",
	} {
		if got := find(with, name, 80); got != want {
			t.Errorf("%q leads to %q, want %q", name, got, want)
		}
	}
	for _, name := range []string{"db.vm", "5432.db.vm", "5432.vm"} {
		if got := find(without, name, 80); got != "unknown" {
			t.Errorf("%q leads to %q without its owner", name, got)
		}
	}
}

// A label gives an owner another name, which leads to it as its own does: two owners with one
// name have none.
func TestAlias(t *testing.T) {
	web, other := tcp("vm", 8080, container("1", "web")), tcp("vm", 81, container("2", "other"))
	web.Alias, other.Alias = "shop", "web"
	table := New([]Port{web, other}, nil, Local)
	for name, want := range map[string]string{
		"shop": "vm 1 8080", "shop.vm": "vm 1 8080", "8080.shop": "vm 1 8080", "other": "vm 2 81",
		"web": "ambiguous: shop.localhost other.localhost",
	} {
		if got := find(table, name, 80); got != want {
			t.Errorf("%q leads to %q, want %q", name, got, want)
		}
	}
}

// Of one port at several addresses the loopback is served, then the wildcard.
func TestNearest(t *testing.T) {
	at := func(s string) Port {
		p := tcp("vm", 80, container("1", "web"))
		p.Key.Address = netip.MustParseAddr(s)
		return p
	}
	list := []Port{at("10.0.0.1"), at("0.0.0.0"), at("127.0.0.1"), at("::")}
	if got := New(list, nil, Local).Find("web", 80).Port.Key.Address.String(); got != "127.0.0.1" {
		t.Errorf("web leads to %s", got)
	}
}

func TestNamesOf(t *testing.T) {
	one, many := tcp("vm", 80, container("1", "web")), tcp("vm", 81, container("2", "many"))
	table := New([]Port{one, many, tcp("vm", 82, container("2", "many"))}, nil, Local)
	if got := strings.Join(table.NamesOf(one), " "); got != "web.localhost web.vm.localhost" {
		t.Errorf("of one port: %s", got)
	}
	if got := strings.Join(table.NamesOf(many), " "); got != "81.many.localhost 81.many.vm.localhost" {
		t.Errorf("of one of several: %s", got)
	}
	other := tcp("vm", 99, container("3", "new"))
	if got := table.NamesOf(other); got != nil {
		t.Errorf("of another: %s", got)
	}
	udp := one
	udp.Key.Protocol = port.UDP
	if list, name := table.NamesOf(udp), table.NameOf(udp); list != nil || name != "" {
		t.Errorf("of UDP: %q and %q, and names lead to no UDP port", list, name)
	}
	for want, p := range map[string]Port{"web.localhost": one, "many.localhost": many, "": other} {
		if got := table.NameOf(p); got != want {
			t.Errorf("without a number: %q, want %q", got, want)
		}
	}
}

// randomGuests have names as projects, namespaces and owners have; not all have ports.
var randomGuests = []string{"a", "b", "Web", "web_1", "80"}

// randomPorts has few names, so that many are ambiguous.
func randomPorts(r *rand.Rand) (list []Port) {
	word := func() string { return []string{"web", "Web", "web_1", "web-1", "80", "a", "b", "_", ""}[r.IntN(9)] }
	for range 1 + r.IntN(12) {
		var o port.Owner
		switch id := fmt.Sprint(r.IntN(6)); r.IntN(3) {
		case 0:
			o = container(id, word())
		case 1:
			o = composed(id, word(), word(), word())
		default:
			o = service(word(), word())
		}
		list = append(list, tcp(randomGuests[r.IntN(3)], uint16(79+r.IntN(4)), o))
	}
	return list
}

// The order in which ports come never matters; each name that is shown leads to its owner
// and, without other ports, stays so when ports come that have none of its labels.
func TestOrderNeverMatters(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		list := randomPorts(r)
		seen := make(map[place]bool) // a key is in a table once
		list = slices.DeleteFunc(list, func(p Port) bool {
			k := place{p.Guest, p.Key}
			was := seen[k]
			seen[k] = true
			return was
		})
		want := New(list, randomGuests, Local)
		other := slices.Clone(list)
		r.Shuffle(len(other), func(i, j int) { other[i], other[j] = other[j], other[i] })
		got := New(other, randomGuests, Local)
		if diff := cmp.Diff(want.Entries(), got.Entries()); diff != "" {
			t.Fatalf("%+v: the order matters (-one +other):\n%s", list, diff)
		}
		for _, p := range list {
			for _, name := range want.NamesOf(p) {
				f := got.Find(strings.TrimSuffix(name, "."+Local), 80)
				if f.Outcome != Leads || f.Port.Guest != p.Guest || !f.Port.Owner.Same(p.Owner) || f.Port.Key.Port != p.Key.Port {
					t.Fatalf("%+v: %s of %+v leads to %+v", list, name, p, f)
				}
			}
			for _, a := range aliasesOf(p) {
				if want.reserved(a, p.Guest) {
					continue
				}
				x, y := want.Find(a, 80), got.Find(a, 80)
				if diff := cmp.Diff(x, y, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" || x.Outcome == Unknown {
					t.Fatalf("%+v: %s leads to %+v or %+v", list, a, x, y)
				}
			}
		}
	}
}

// A name leads to an owner that has it or to nobody, below the name of a guest to that guest's alone.
// The name of a container with its guest is never unknown.
func TestNamesLeadToTheirOwners(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	labels := []string{"web", "web-1", "80", "81", "a", "b"}
	isGuest := func(label string) bool {
		return slices.ContainsFunc(randomGuests, func(g string) bool { return Label(g) == label })
	}
	for range 2000 {
		list := randomPorts(r)
		for i := range list { // an owner has one port, so that each name leads or not
			list[i].Owner.ID = fmt.Sprint(i)
		}
		table := New(list, randomGuests, Local)
		for range 50 {
			parts := make([]string, 1+r.IntN(4))
			for i := range parts {
				parts[i] = labels[r.IntN(len(labels))]
			}
			name, last := strings.Join(parts, "."), parts[len(parts)-1]
			_, rest, _ := strings.Cut(name, ".")
			_, withPort := portLabel(parts[0])
			var meant []Port
			for _, p := range list {
				if len(parts) > 1 && isGuest(last) && last != Label(p.Guest) {
					continue
				}
				if has := aliasesOf(p); slices.Contains(has, name) {
					meant = append(meant, p)
				} else if withPort && slices.Contains(has, rest) {
					meant = append(meant, p)
				}
			}
			f := table.Find(name, 80)
			if ok := f.Outcome == Unknown; ok != (len(meant) == 0) {
				t.Fatalf("%+v: %s leads to %+v, want one of %+v", list, name, f, meant)
			}
			if f.Outcome == Leads && (len(meant) != 1 || meant[0].identity() != f.Port.identity()) {
				t.Fatalf("%+v: %s leads to %+v, want one of %+v", list, name, f.Port, meant)
			}
		}
		for _, p := range list {
			name, guest := Label(p.Owner.Name), Label(p.Guest)
			if p.Owner.Kind == port.OwnerContainer && name != "" && table.Find(name+"."+guest, 80).Outcome == Unknown {
				t.Fatalf("%+v: nobody is %s.%s", list, name, guest)
			}
		}
	}
}

// place is a port without its owner.
type place struct {
	guest string
	key   port.Key
}

func FuzzFromHost(f *testing.F) {
	for _, s := range []string{"web.localhost:80", "[::1]:80", "localhost", "a..b", "127.0.0.1", "%", "xn--.localhost", "[::1%25]"} {
		f.Add(s)
	}
	table := New([]Port{tcp("vm", 80, container("1", "web"))}, nil, Local)
	f.Fuzz(func(t *testing.T, host string) {
		name, asked := FromHost(host, Local)
		if asked != Named && name != "" {
			t.Fatalf("%q: name %q of a host that has none", host, name)
		}
		if asked == Named && !valid(name+"."+Local) {
			t.Fatalf("%q: name %q", host, name)
		}
		if asked == Foreign && (strings.EqualFold(host, Local) || strings.EqualFold(host, "web.localhost")) {
			t.Fatalf("%q is foreign", host)
		}
		_ = table.Find(name, 80)
	})
}

func FuzzLabel(f *testing.F) {
	f.Add("web_1")
	f.Fuzz(func(t *testing.T, name string) {
		if l := Label(name); l != "" && (!valid(l) || Label(l) != l) {
			t.Fatalf("Label(%q) = %q", name, l)
		}
	})
}

// A name leads to both families of a port, of the nearest address.
func TestNameLeadsToBothFamilies(t *testing.T) {
	at := func(addr string) Port {
		p := tcp("vm", 80, container("1", "web"))
		p.Key.Address = netip.MustParseAddr(addr)
		return p
	}
	for _, c := range []struct {
		ports       []string
		first, also string
	}{
		{[]string{"0.0.0.0"}, "0.0.0.0", ""},
		{[]string{"::"}, "::", ""},
		{[]string{"::", "0.0.0.0"}, "0.0.0.0", "::"},
		{[]string{"::", "0.0.0.0", "::1"}, "::1", ""},
		{[]string{"::", "0.0.0.0", "::1", "127.0.0.1"}, "127.0.0.1", "::1"},
	} {
		var list []Port
		for _, a := range c.ports {
			list = append(list, at(a))
		}
		p := New(list, []string{"vm"}, Local).Find("web", 80).Port
		also := ""
		if p.Other != (port.Key{}) {
			also = p.Other.Address.String()
		}
		if p.Key.Address.String() != c.first || also != c.also {
			t.Errorf("%q: leads to %s and %q, want %s and %q", c.ports, p.Key.Address, also, c.first, c.also)
		}
	}
}
