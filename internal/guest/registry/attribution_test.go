// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/port"
)

// facts are an engine's, and count how often a cgroup is asked for.
type facts struct {
	owners map[AttributionKey]port.Owner
	gone   map[netip.Addr]port.Owner // who stopped
	asked  int
	notify func([]AttributionKey)
}

var _ Facts = (*facts)(nil)

func (f *facts) ByCgroup(id uint64) (port.Owner, bool) {
	f.asked++
	o, ok := f.owners[AttributionKey{Cgroup: id}]
	return o, ok && id != 0
}

func (f *facts) ByCgroupPath(path string) (port.Owner, bool) {
	for p := range cgroup.Ancestors(path) {
		for _, k := range []AttributionKey{{Path: p}, {Path: cgroup.ContainerID(p)}} {
			if o, ok := f.owners[k]; ok && k.Path != "" {
				return o, true
			}
		}
	}
	return port.Owner{}, false
}

func (f *facts) ByAddress(addr netip.Addr) (port.Owner, bool) {
	o, ok := f.owners[AttributionKey{Address: addr.Unmap()}]
	return o, ok
}

func (f *facts) StoppedAt(addr netip.Addr) (port.Owner, bool) {
	o, ok := f.gone[addr]
	return o, ok
}

func (f *facts) Notify(notify func([]AttributionKey)) { f.notify = notify }

func (f *facts) put(k AttributionKey, name string) {
	f.own(port.Owner{Kind: port.OwnerContainer, ID: name + "-id", Name: name}, k)
}

func (f *facts) own(o port.Owner, keys ...AttributionKey) {
	for _, k := range keys {
		f.owners[k] = o
	}
	f.notify(keys)
}

func (f *facts) remove(k AttributionKey) {
	delete(f.owners, k)
	f.notify([]AttributionKey{k})
}

func newFacts(r *Registry, source string) *facts {
	f := &facts{owners: make(map[AttributionKey]port.Owner)}
	r.AddFacts(source, f)
	return f
}

func attributed() (*Registry, *facts) {
	now := time.Unix(1000, 0)
	r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return now }})
	return r, newFacts(r, "docker")
}

// in returns a socket's binding with its cgroup.
func in(b port.Binding, id uint64, paths ...string) port.Binding {
	b.Hints = port.Hints{Cgroup: id, Paths: paths}
	return b
}

// nat returns the binding of a NAT rule.
func nat(id, addr string, targets ...string) port.Binding {
	b := binding(id, addr, 0)
	b.Owner = port.Owner{}
	for _, t := range targets {
		b.Hints.Targets = append(b.Hints.Targets, netip.MustParseAddrPort(t))
	}
	return b
}

func declared(id, addr string, kind port.OwnerKind, name string) port.Binding {
	b := binding(id, addr, 0)
	b.Owner = port.Owner{Kind: kind, ID: name + "-id", Name: name}
	return b
}

func wantOwner(t *testing.T, r *Registry, key, name string) {
	t.Helper()
	for k, p := range r.Publications().View().All() {
		if k.String() == key {
			if p.Owner.Name != name {
				t.Errorf("%s is owned by %q (%s), want %q", key, p.Owner.Name, p.Owner.Kind, name)
			}
			return
		}
	}
	t.Errorf("%s is not there", key)
}

var id1, id2 = strings.Repeat("1", 64), strings.Repeat("2", 64)

func TestSocketOwnerByCgroup(t *testing.T) {
	for _, c := range []struct {
		name  string
		hints port.Hints
		key   AttributionKey
	}{
		{"by id", port.Hints{Cgroup: 77}, AttributionKey{Cgroup: 77}},
		{"by path", port.Hints{Paths: []string{"/default/web"}}, AttributionKey{Path: "/default/web"}},
		{"by a path above", port.Hints{Cgroup: 78, Paths: []string{"/default/web/init.scope"}}, AttributionKey{Path: "/default/web"}},
		{"by container id", port.Hints{Paths: []string{"/system.slice/docker-" + id1 + ".scope"}}, AttributionKey{Path: id1}},
		{"by container id above", port.Hints{Cgroup: 79, Paths: []string{"/docker/" + id1 + "/a/b"}}, AttributionKey{Path: id1}},
		{"by one hierarchy of several", port.Hints{Cgroup: 1, Paths: []string{"/user.slice", "/docker/" + id1}}, AttributionKey{Path: id1}},
	} {
		for _, factFirst := range []bool{true, false} {
			r, f := attributed()
			feed := r.Feed("socket")
			if factFirst {
				f.put(c.key, "web")
			}
			b := binding("1", "0.0.0.0:80", 7)
			b.Owner.Name, b.Hints = "nginx", c.hints
			feed.Replace([]port.Binding{b})
			if !factFirst {
				wantOwner(t, r, "tcp 0.0.0.0:80", "nginx")
				f.put(c.key, "web")
			}
			wantOwner(t, r, "tcp 0.0.0.0:80", "web")
			// The container goes and the socket stays: no stale name.
			f.remove(c.key)
			wantOwner(t, r, "tcp 0.0.0.0:80", "nginx")
			if t.Failed() {
				t.Fatalf("%s, fact first: %v", c.name, factFirst)
			}
		}
	}
}

func TestNATRuleOwnerByTarget(t *testing.T) {
	r, f := attributed()
	feed := r.Feed("nat")
	feed.Replace([]port.Binding{nat("1", "0.0.0.0:80", "172.17.0.2:80"), nat("2", "0.0.0.0:81", "172.17.0.3:80")})
	wantOwner(t, r, "tcp 0.0.0.0:80", "")
	f.put(AttributionKey{Address: netip.MustParseAddr("172.17.0.2")}, "web")
	wantOwner(t, r, "tcp 0.0.0.0:80", "web")
	wantOwner(t, r, "tcp 0.0.0.0:81", "")
	// The address goes to another container.
	f.put(AttributionKey{Address: netip.MustParseAddr("172.17.0.2")}, "db")
	wantOwner(t, r, "tcp 0.0.0.0:80", "db")
	feed.Apply(port.Change{Put: []port.Binding{nat("1", "0.0.0.0:80", "172.17.0.3:80")}})
	wantOwner(t, r, "tcp 0.0.0.0:80", "")
}

func TestOwnerPrecedence(t *testing.T) {
	pod := AttributionKey{Address: netip.MustParseAddr("10.42.0.5")}
	cgroup := AttributionKey{Cgroup: 5}
	socket := in(binding("1", "0.0.0.0:80", 7), 5)
	rule := nat("2", "0.0.0.0:80", "10.42.0.5:8080")
	claim := declared("3", "0.0.0.0:80", port.OwnerService, "service")
	published := declared("4", "0.0.0.0:80", port.OwnerContainer, "declared")
	for _, c := range []struct {
		name string
		set  []port.Binding
		know []AttributionKey
		want string
	}{
		{"a process alone", []port.Binding{socket}, nil, "web"},
		{"the container of a socket before its process", []port.Binding{socket}, []AttributionKey{cgroup}, "fact"},
		{"a NAT rule's pod before a process", []port.Binding{socket, rule}, []AttributionKey{pod}, "fact"},
		{"a Service before its pods", []port.Binding{rule, claim}, []AttributionKey{pod}, "service"},
		{"a Service before a process", []port.Binding{socket, claim}, nil, "service"},
		{"the container of a socket before a Service", []port.Binding{socket, claim}, []AttributionKey{cgroup}, "fact"},
		{"a container that claims the port before all", []port.Binding{published, rule, claim, socket}, []AttributionKey{pod}, "declared"},
	} {
		for seed := range uint64(3) { // whatever the order of the sources' reports
			rng := rand.New(rand.NewPCG(seed, 5))
			r, f := attributed()
			feeds := []Feed{r.Feed("socket"), r.Feed("nat"), r.Feed("kube"), r.Feed("docker")}
			rng.Shuffle(len(c.set), func(i, j int) { c.set[i], c.set[j] = c.set[j], c.set[i] })
			for _, b := range c.set {
				feeds[b.Origin.ID[0]-'1'].Replace([]port.Binding{b})
			}
			for _, k := range c.know {
				f.put(k, "fact")
			}
			t.Run(fmt.Sprintf("%s, seed %d", c.name, seed), func(t *testing.T) { wantOwner(t, r, "tcp 0.0.0.0:80", c.want) })
		}
	}
}

// kube-proxy in nftables mode opens a node port on the node's own addresses only.
func TestServiceOwnsNodePortRules(t *testing.T) {
	r, f := attributed()
	rules, services, sockets := r.Feed("nat"), r.Feed("kube"), r.Feed("socket")
	pod := AttributionKey{Address: netip.MustParseAddr("10.42.0.5")}
	rules.Replace([]port.Binding{
		nat("1", "192.168.1.9:30080", "10.42.0.5:80", "10.42.0.6:80"),
		nat("2", "192.168.1.9:30081", "10.42.0.5:80"),
		nat("3", "[fd00::9]:30080", "[fd00:42::5]:80"),
	})
	sockets.Replace([]port.Binding{binding("7", "192.168.1.8:30080", 7)})
	f.put(pod, "pod")
	wantOwner(t, r, "tcp 192.168.1.9:30080", "") // one of two pods is no owner
	wantOwner(t, r, "tcp 192.168.1.9:30081", "pod")
	services.Replace([]port.Binding{
		declared("web", "0.0.0.0:30080", port.OwnerService, "front"),
		declared("db", "0.0.0.0:30081", port.OwnerService, "db"),
	})
	wantOwner(t, r, "tcp 192.168.1.9:30080", "front")
	wantOwner(t, r, "tcp 192.168.1.9:30081", "db")
	wantOwner(t, r, "tcp [fd00::9]:30080", "")      // the claim is for IPv4
	wantOwner(t, r, "tcp 192.168.1.8:30080", "web") // a server of its own
	services.Replace(nil)
	wantOwner(t, r, "tcp 192.168.1.9:30081", "pod")
}

// kube-proxy may serve node ports on the loopback itself: these are the Service's, whatever
// else has the name, or a port of that number.
func TestServiceOwnsNodePortsOfKubeProxy(t *testing.T) {
	pod := func(namespace, name string) port.Owner {
		return port.Owner{Kind: port.OwnerContainer, ID: name + "-id", Namespace: namespace, Name: name}
	}
	as := func(addr, process string) port.Binding { return in(socket("1", addr, process), 5, "/x") }
	unnamed := in(socket("1", "127.0.0.1:30080", "kube-proxy"), 5, "/x", strings.Repeat("ab", 32))
	users := as("127.0.0.1:30080", "kube-proxy")
	users.Hints.User = 1000
	second := socket("2", "127.0.0.1:30080", "web")
	bound := second
	bound.Withheld = port.Because(port.Unlistened)
	for _, c := range []struct {
		name    string
		sockets []port.Binding
		inside  port.Owner
		source  string
		want    string
	}{
		{"IPv4", []port.Binding{as("127.0.0.1:30080", "kube-proxy")}, port.Owner{}, "kube", "front"},
		{"IPv6", []port.Binding{as("[::1]:30080", "kube-proxy")}, port.Owner{}, "kube", "front"},
		{"in its pod", []port.Binding{as("127.0.0.1:30080", "kube-proxy")}, pod("kube-system", "kube-proxy-x/kube-proxy"), "kube", "front"},
		{"of a cluster", []port.Binding{as("127.0.0.1:30080", "kube-proxy")}, port.Owner{}, "kube:k3s", "front"},
		{"beside a bound one", []port.Binding{as("127.0.0.1:30080", "kube-proxy"), bound}, port.Owner{}, "kube", "front"},
		{"beside another", []port.Binding{as("127.0.0.1:30080", "kube-proxy"), second}, port.Owner{}, "kube", "kube-proxy"},
		{"no node port", []port.Binding{as("127.0.0.1:10249", "kube-proxy")}, port.Owner{}, "kube", "kube-proxy"},
		{"not the loopback", []port.Binding{as("192.168.1.9:30080", "kube-proxy")}, port.Owner{}, "kube", "kube-proxy"},
		{"another program", []port.Binding{as("127.0.0.1:30080", "web")}, port.Owner{}, "kube", "web"},
		{"a user's", []port.Binding{users}, port.Owner{}, "kube", "kube-proxy"},
		{"in another container", []port.Binding{as("127.0.0.1:30080", "kube-proxy")}, pod("shop", "kube-proxy"), "kube", "kube-proxy"},
		{"in a container that nobody named", []port.Binding{unnamed}, port.Owner{}, "kube", "kube-proxy"},
		{"in its pod, by id", []port.Binding{unnamed}, pod("kube-system", "kube-proxy-x/kube-proxy"), "kube", "front"},
		{"no Service of Kubernetes", []port.Binding{as("127.0.0.1:30080", "kube-proxy")}, port.Owner{}, "docker", "kube-proxy"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, f := attributed()
			if c.inside.Name != "" {
				f.own(c.inside, AttributionKey{Path: "/x"})
			}
			sockets, rules, services := r.Feed("socket"), r.Feed("nat"), r.Feed(c.source)
			sockets.Replace(c.sockets)
			rules.Replace([]port.Binding{nat("r", "0.0.0.0:80", c.sockets[0].AddrPort().String())})
			services.Replace([]port.Binding{
				declared("4", "0.0.0.0:30080", port.OwnerService, "front"), declared("6", "[::]:30080", port.OwnerService, "front"),
				declared("lb", "127.0.0.9:10249", port.OwnerService, "front"),
			})
			name := c.want
			if c.inside.Name != "" && name != "front" {
				name = c.inside.Name
			}
			wantOwner(t, r, c.sockets[0].Key.String(), name)
			if p, _ := r.Publications().View().Get(c.sockets[0].Key); name == "front" && len(p.Others) > 0 {
				t.Errorf("kube-proxy counts beside the Service: %+v", p.Others)
			}
			if c.sockets[0].Address.Is4() {
				if !c.sockets[0].Address.IsLoopback() {
					name = ""
				}
				wantOwner(t, r, "tcp 0.0.0.0:80", name) // a rule that leads there
			}
		})
	}
}

// A denial of a Service holds where kube-proxy serves its node port, also as a part of another
// program, which its NAT rules tell.
func TestDenialOfServiceOnTheLoopback(t *testing.T) {
	rule := nat("r", "192.168.1.9:30080", "10.42.0.5:80")
	rule.Maker = port.MakerKubeProxy
	users := socket("1", "127.0.0.1:30080", "k3s-server")
	users.Hints.User = 1000
	for _, c := range []struct {
		name          string
		socket        port.Binding
		rules         []port.Binding
		first, denied string // without a Service, and with one that is denied
	}{
		{"kube-proxy", socket("1", "127.0.0.1:30080", "kube-proxy"), nil, "pending", "deny"},
		{"k3s", socket("1", "127.0.0.1:30080", "k3s-server"), []port.Binding{rule}, "pending", "deny"},
		{"k3s, IPv6", socket("1", "[::1]:30080", "k3s-server"), []port.Binding{rule}, "pending", "deny"},
		{"MicroK8s", socket("1", "127.0.0.1:30080", "kubelite"), []port.Binding{rule}, "pending", "deny"},
		{"no rule of kube-proxy", socket("1", "127.0.0.1:30080", "web"), []port.Binding{nat("r", "192.168.1.9:30080", "10.42.0.5:80")}, "allow", "allow"},
		{"a rule of another port", socket("1", "127.0.0.1:30081", "web"), []port.Binding{rule}, "allow", "allow"},
		{"a user's", users, []port.Binding{rule}, "allow", "allow"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGuarded(t)
				services, at := g.Feed("kube"), c.socket.AddrPort().String()
				g.docker.Replace(nil)
				services.Replace(nil)
				g.nat.Replace(c.rules)
				g.sockets.Apply(put([]port.Binding{c.socket}))
				g.wantPort(t, "no Service yet", at, c.first)
				claim := func(name string) {
					services.Replace([]port.Binding{declared("4", "0.0.0.0:30080", port.OwnerService, name), declared("6", "[::]:30080", port.OwnerService, name)})
				}
				claim("secret")
				time.Sleep(2 * ownerWait)
				g.wantPort(t, "the Service's", at, c.denied)
				claim("front")
				g.wantPort(t, "another Service's", at, "allow")
				if p, _ := g.Publications().View().Get(c.socket.Key); c.denied == "deny" && len(p.Others) > 0 {
					t.Errorf("the program counts beside the Service: %+v", p.Others)
				}
			})
		})
	}
}

func TestServedPortOutlivesItsEngine(t *testing.T) {
	r, f := attributed()
	sockets, docker := r.Feed("socket"), r.Feed("docker")
	sockets.Replace([]port.Binding{in(binding("1", "0.0.0.0:80", 7), 5)})
	docker.Replace([]port.Binding{
		declared("a", "0.0.0.0:80", port.OwnerContainer, "a"),
		declared("b", "0.0.0.0:81", port.OwnerContainer, "b"),
	})
	f.put(AttributionKey{Cgroup: 5}, "a")
	docker.Stale(fmt.Errorf("engine gone"))
	expect(t, r, "tcp 0.0.0.0:80", "tcp 0.0.0.0:81")
	wantOwner(t, r, "tcp 0.0.0.0:81", "b")
	// The grace period ends: the source takes everything back, its facts too.
	docker.Apply(port.Change{Drop: []port.Origin{{ID: "a"}, {ID: "b"}}})
	f.remove(AttributionKey{Cgroup: 5})
	expect(t, r, "tcp 0.0.0.0:80")
	wantOwner(t, r, "tcp 0.0.0.0:80", "web")
}

func TestFactCostsWhatItNames(t *testing.T) {
	r, f := attributed()
	feed := r.Feed("socket")
	var set []port.Binding
	for i := range 10_000 {
		group := uint64(2 + i%100)
		set = append(set, in(binding(fmt.Sprint(i), fmt.Sprintf("0.0.0.0:%d", 1+i), 7), group, fmt.Sprintf("/system.slice/unit%d.service", group)))
	}
	feed.Replace(set)
	if f.asked != 100 {
		t.Errorf("10,000 sockets in 100 cgroups were asked for %d times", f.asked)
	}
	sub := r.Publications().Subscribe()
	defer sub.Close()
	sub.Take()
	f.asked = 0
	f.put(AttributionKey{Cgroup: 50}, "web")
	_, c := sub.Take()
	if f.asked != 1 || len(c.Keys) != 100 || c.Generation != c.Base+1 {
		t.Errorf("asked %d times, %d ports changed in %d steps, want 1, 100, 1", f.asked, len(c.Keys), c.Generation-c.Base)
	}
	f.put(AttributionKey{Cgroup: 50}, "web")
	f.put(AttributionKey{Cgroup: 5000}, "elsewhere")
	if _, c = sub.Take(); len(c.Keys) != 0 {
		t.Errorf("facts that change nothing changed %d ports", len(c.Keys))
	}
}

// An attribution without bindings is kept for a while, not for ever.
func TestAttributionsDoNotLeak(t *testing.T) {
	r, f := attributed()
	feed := r.Feed("socket")
	for i := range uint64(10 * maxIdle) {
		feed.Apply(port.Change{Put: []port.Binding{in(binding("1", "0.0.0.0:80", 7), 2+i, fmt.Sprintf("/user.slice/run-%d.scope", i))}})
	}
	if n := len(r.owners.byHints); n > 2*maxIdle {
		t.Errorf("%d attributions are kept", n)
	}
	if n := len(r.owners.byKey); n > 5*maxIdle {
		t.Errorf("%d keys are kept", n)
	}
	f.put(AttributionKey{Path: "/user.slice"}, "slice")
	wantOwner(t, r, "tcp 0.0.0.0:80", "slice")
}

// Whatever order facts and bindings come in, the table is that of a registry
// that got the final state at once.
func TestAttributionModel(t *testing.T) {
	keys := []AttributionKey{
		{Cgroup: 2}, {Cgroup: 3}, {Path: "/a"}, {Path: "/a/b"}, {Path: id1}, {Path: id2},
		{Address: netip.MustParseAddr("10.0.0.1")}, {Address: netip.MustParseAddr("10.0.0.2")},
	}
	hints := []port.Hints{
		{}, {Cgroup: 2}, {Cgroup: 3, Paths: []string{"/a/b/c"}}, {Cgroup: 4, Paths: []string{"/a"}}, {Paths: []string{"/docker/" + id1 + "/x"}},
		{Cgroup: 1, Paths: []string{"/x", "/docker-" + id2 + ".scope"}},
		{Targets: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80")}},
		{Targets: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80")}},
		{Targets: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:81")}},
		{Targets: []netip.AddrPort{netip.MustParseAddrPort("[::1]:82")}},
		{Targets: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:81"), netip.MustParseAddrPort("127.0.0.1:82")}},
		{Targets: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:81"), netip.MustParseAddrPort("10.0.0.1:80")}},
	}
	addrs := []string{"0.0.0.0", "[::]", "10.9.9.9", "127.0.0.1"}
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 2))
		r, f := attributed()
		names := []string{"socket", "nat", "kube"}
		feeds := make(map[string]Feed)
		truth := make(map[string]map[string]port.Binding)
		for _, n := range names {
			feeds[n], truth[n] = r.Feed(n), make(map[string]port.Binding)
		}
		random := func() port.Binding {
			id := fmt.Sprint(rng.IntN(12))
			b := binding(id, fmt.Sprintf("%s:%d", addrs[rng.IntN(len(addrs))], 80+rng.IntN(3)), rng.IntN(3))
			b.Since = time.Unix(1, 0)
			b.Hints = hints[rng.IntN(len(hints))]
			b.Owner.Kind = port.OwnerKind(rng.IntN(4))
			b.Mapped = b.Address == netip.IPv4Unspecified() && rng.IntN(2) == 0
			if rng.IntN(4) == 0 {
				b.Withheld = port.Because(port.Unlistened)
			}
			return b
		}
		for range 200 {
			n := names[rng.IntN(len(names))]
			c := keys[rng.IntN(len(keys))]
			switch rng.IntN(7) {
			case 0, 1:
				f.put(c, fmt.Sprint("name", rng.IntN(3)))
			case 2:
				f.remove(c)
			case 3:
				truth[n] = make(map[string]port.Binding)
				for range rng.IntN(8) {
					b := random()
					truth[n][b.Origin.ID] = b
				}
				feeds[n].Replace(slices.Collect(maps.Values(truth[n])))
			default:
				b, gone := random(), fmt.Sprint(rng.IntN(12))
				delete(truth[n], gone)
				truth[n][b.Origin.ID] = b
				feeds[n].Apply(port.Change{Put: []port.Binding{b}, Drop: []port.Origin{{ID: gone}}})
			}
		}
		afresh, g := attributed()
		g.owners = f.owners
		var at []Feed
		for _, n := range names {
			at = append(at, afresh.Feed(n))
		}
		for i, n := range names {
			at[i].Replace(slices.Collect(maps.Values(truth[n])))
		}
		if got, want := content(r), content(afresh); !slices.Equal(got, want) {
			t.Fatalf("seed %d: the table is\n%s\nwant\n%s", seed, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		for _, n := range names {
			feeds[n].Replace(nil)
		}
		if n := r.owners.idle; n != len(r.owners.byHints) {
			t.Fatalf("seed %d: %d of %d attributions are counted as idle, with no binding left", seed, n, len(r.owners.byHints))
		}
		if len(r.redirects) > 0 {
			t.Fatalf("seed %d: %d redirects are left, with no binding", seed, len(r.redirects))
		}
	}
}

func content(r *Registry) (out []string) {
	for _, p := range r.Publications().View().All() {
		var ids []string
		for _, o := range p.Origins {
			ids = append(ids, o.Source+"/"+o.ID)
		}
		out = append(out, fmt.Sprint(p.Key, p.Owner, ids, p.Dial))
	}
	return out
}

func TestObservedTimeIsOfTheLatestEvent(t *testing.T) {
	r, f := attributed()
	feed := r.Feed("socket")
	b := in(binding("1", "0.0.0.0:80", 7), 5)
	b.Observed = 1234
	feed.Apply(port.Change{Put: []port.Binding{b}})
	p, _ := r.Publications().View().Get(b.Key)
	if p.Observed != 1234 {
		t.Errorf("observed at %d, want 1234", p.Observed)
	}
	f.put(AttributionKey{Cgroup: 5}, "web")
	if p, _ = r.Publications().View().Get(b.Key); p.Observed != 0 {
		t.Errorf("a name that came later was observed at %d by the kernel", p.Observed)
	}
}

func BenchmarkAttribution(b *testing.B) {
	for _, n := range []int{10, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r, f := attributed()
			feed := r.Feed("socket")
			var set []port.Binding
			for i := range n {
				set = append(set, in(binding(fmt.Sprint(i), fmt.Sprintf("10.%d.%d.1:%d", i>>8&255, i&255, 1+i%60000), 1), uint64(2+i/10)))
			}
			feed.Replace(set)
			x := binding("x", "0.0.0.0:65000", 1)
			path := []string{"/system.slice/x.service"}
			y := in(x, 1<<40, path...)
			for name, change := range map[string]func(){
				"without": func() { feed.Apply(port.Change{Put: []port.Binding{x}}) },
				"with":    func() { feed.Apply(port.Change{Put: []port.Binding{y}}) },
			} {
				b.Run(name, func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						change()
						feed.Apply(port.Change{Drop: []port.Origin{{ID: "x"}}})
						_ = r.Publications().View()
					}
				})
			}
			b.Run("fact", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					f.put(AttributionKey{Cgroup: 3}, "web")
					f.remove(AttributionKey{Cgroup: 3})
				}
			})
		})
	}
}

// An event of a socket that nobody owns allocates for its attribution only once.
func TestHintsAllocateNothingPerEvent(t *testing.T) {
	r, _ := attributed()
	feed := r.Feed("socket")
	x := binding("x", "0.0.0.0:65000", 1)
	y := in(x, 1<<40, "/system.slice/x.service")
	cost := func(b port.Binding) float64 {
		return testing.AllocsPerRun(100, func() {
			feed.Apply(port.Change{Put: []port.Binding{b}})
			feed.Apply(port.Change{Drop: []port.Origin{{ID: "x"}}})
		})
	}
	if without, with := cost(x), cost(y); with > without {
		t.Errorf("an event allocates %v times, without hints %v times", with, without)
	}
}
