// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

type allowAll struct{}

func (allowAll) Decide(port.Publication) port.Ruling {
	return port.Ruling{Decision: port.Decision{Allow: true}}
}

func newRegistry() *Registry {
	start := time.Unix(1000, 0)
	return New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler), Now: func() time.Time {
		start = start.Add(time.Second)
		return start
	}})
}

func binding(id, addr string, pid int) port.Binding {
	ap := netip.MustParseAddrPort(addr)
	return port.Binding{
		Key:    port.Key{Protocol: port.TCP, Address: ap.Addr(), Port: ap.Port()},
		Origin: port.Origin{ID: id},
		Dial:   []netip.AddrPort{netip.AddrPortFrom(port.Loopback(ap.Addr()), ap.Port())},
		Owner:  port.Owner{Kind: port.OwnerProcess, ID: fmt.Sprint(pid), Name: "web"},
	}
}

func keys(r *Registry) (out []string) {
	for k := range r.Publications().View().All() {
		out = append(out, k.String())
	}
	return out
}

func expect(t *testing.T, r *Registry, want ...string) {
	t.Helper()
	if got := keys(r); !slices.Equal(got, want) {
		t.Errorf("publications = %q, want %q", got, want)
	}
}

func TestPublicationLivesAsLongAsAnOrigin(t *testing.T) {
	r := newRegistry()
	socket, docker := r.Feed("socket"), r.Feed("docker")
	socket.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7)})
	docker.Replace([]port.Binding{binding("web/80", "0.0.0.0:80", 7)})
	expect(t, r, "tcp 0.0.0.0:80")
	socket.Apply(port.Change{Drop: []port.Origin{{ID: "1"}}})
	expect(t, r, "tcp 0.0.0.0:80")
	docker.Replace(nil)
	expect(t, r)
}

func TestStaleSourceKeepsItsSet(t *testing.T) {
	r := newRegistry()
	socket, docker := r.Feed("socket"), r.Feed("docker")
	socket.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7)})
	docker.Replace([]port.Binding{binding("a", "0.0.0.0:81", 8)})
	docker.Stale(errors.New("engine gone"))
	expect(t, r, "tcp 0.0.0.0:80", "tcp 0.0.0.0:81")
	st, _ := r.Sources().View().Get("docker")
	if st.State != Stale || st.Error != "engine gone" {
		t.Errorf("status = %+v", st)
	}
	docker.Replace(nil)
	expect(t, r, "tcp 0.0.0.0:80")
	if st, _ = r.Sources().View().Get("docker"); st.State != Live {
		t.Errorf("status after Replace = %+v", st)
	}
}

// half returns the IPv4 half of a socket at ::, by whatever owner.
func half(of port.Binding) port.Binding {
	b := of
	b.Address, b.Mapped = netip.IPv4Unspecified(), true
	b.Origin.ID += "/4"
	b.Dial = []netip.AddrPort{netip.AddrPortFrom(port.Loopback(b.Address), b.Port)}
	return b
}

// A server of both families is a publication in each, whoever else has the other.
func TestFamiliesStayApart(t *testing.T) {
	r := newRegistry()
	f := r.Feed("socket")
	v6 := binding("2", "[::]:80", 7)
	f.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7), v6})
	expect(t, r, "tcp 0.0.0.0:80", "tcp [::]:80")
	for _, p := range r.Publications().View().All() {
		if len(p.Origins) != 1 || len(p.Dial) != 1 || p.Dial[0].Addr().Is4() != p.Address.Is4() {
			t.Errorf("%v has origins %v and is dialled at %v", p.Key, p.Origins, p.Dial)
		}
	}
	before, _ := r.Publications().View().Get(v6.Key)
	f.Apply(port.Change{Put: []port.Binding{binding("1", "0.0.0.0:80", 8)}})
	if p, _ := r.Publications().View().Get(v6.Key); !p.Equal(before) {
		t.Errorf("another owner of IPv4 turned %+v into %+v", before, p)
	}
	f.Apply(port.Change{Drop: []port.Origin{{ID: "1"}}})
	expect(t, r, "tcp [::]:80")
}

// The kernel prefers a socket of IPv4 to one at :: that takes both families.
func TestMappedHalfIsHiddenBySocketOfIPv4(t *testing.T) {
	bound := func(b port.Binding) port.Binding {
		b.Withheld = port.Because(port.Unlistened)
		return b
	}
	elsewhere := func(b port.Binding) port.Binding {
		b.Dial = []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80")} // of an interface
		return b
	}
	v6, v4 := binding("2", "[::]:80", 7), binding("1", "0.0.0.0:80", 8)
	for name, c := range map[string]struct {
		v4     port.Binding
		owner  string
		hidden bool
	}{
		"a listener":             {v4, "8", true},
		"one of the same owner":  {binding("1", "0.0.0.0:80", 7), "7", true},
		"a socket that is bound": {bound(v4), "7", false},
		"one of an interface":    {elsewhere(v4), "8", false},
		"another mapped half":    {half(binding("1", "[::]:80", 8)), "8", false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRegistry()
			r.Feed("socket").Replace([]port.Binding{v6, half(v6), c.v4})
			expect(t, r, "tcp 0.0.0.0:80", "tcp [::]:80")
			p, _ := r.Publications().View().Get(v4.Key)
			i := slices.IndexFunc(p.Origins, func(o port.OriginInfo) bool { return o.ID == "2/4" })
			if hidden := p.Origins[i].Withheld == port.Because(port.Hidden, "a socket of IPv4"); hidden != c.hidden || p.Owner.ID != c.owner {
				t.Errorf("owner %s, the half is withheld: %q", p.Owner.ID, p.Origins[i].Withheld)
			}
			if p, _ := r.Publications().View().Get(v6.Key); p.Owner.ID != "7" || !p.Origins[0].Withheld.IsZero() {
				t.Errorf("IPv6 is %+v", p)
			}
		})
	}
}

// What is withheld is dialled only if all of the key is, as a rule may allow that.
func TestWithheldLendsNoServer(t *testing.T) {
	r := newRegistry()
	free, other := binding("1", "0.0.0.0:80", 7), binding("2", "0.0.0.0:80", 7)
	free.Dial, other.Dial = []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80")}, []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:80")}
	other.Withheld = port.Because(port.FromSources, "10.0.0.0/8")
	f := r.Feed("nat")
	f.Replace([]port.Binding{other, free})
	if p, _ := r.Publications().View().Get(free.Key); !slices.Equal(p.Dial, free.Dial) {
		t.Errorf("dials %v, want %v", p.Dial, free.Dial)
	}
	f.Replace([]port.Binding{other})
	if p, _ := r.Publications().View().Get(free.Key); !slices.Equal(p.Dial, other.Dial) {
		t.Errorf("withheld, it dials %v, want %v", p.Dial, other.Dial)
	}
}

// What is withheld lends a port nothing that comes with a server: no owner, labels
// or rule.
func TestWithheldLendsNothing(t *testing.T) {
	at := func(id, addr, process string) port.Binding { return socket(id, addr, process) }
	withheld := func(b port.Binding) port.Binding {
		b.Withheld = port.Because(port.Unlistened)
		return b
	}
	limited := nat("2", "0.0.0.0:80", "10.0.0.5:80")
	free := nat("1", "0.0.0.0:80", "10.0.0.6:80")
	free.Target, limited.Target = 3, 4
	unknown := at("1", "0.0.0.0:80", "")
	unknown.Owner = port.Owner{}
	for _, c := range []struct {
		name      string
		free      port.Binding
		withheld  port.Binding
		owner     string
		contained bool
		rule      uint64
	}{
		{"the half of a socket", at("1", "0.0.0.0:80", "web"), half(at("2", "[::]:80", "other")), "web", false, 0},
		{"a socket in a container", at("1", "0.0.0.0:80", "web"), in(at("2", "0.0.0.0:80", "x"), 5, "/docker/"+strings.Repeat("a", 64)), "web", false, 0},
		{"a socket in a container, of no known server", unknown, in(at("2", "0.0.0.0:80", "x"), 5, "/docker/"+strings.Repeat("a", 64)), "", false, 0},
		{"a rule beside a socket", at("1", "0.0.0.0:80", "web"), limited, "web", false, 0},
		{"a rule beside a rule", free, limited, "second", false, 3},
		{"a socket beside a rule", free, at("2", "0.0.0.0:80", "x"), "second", false, 3},
		{"who holds the port of an unknown one", nat("1", "0.0.0.0:80", "10.9.9.9:80"), at("2", "0.0.0.0:80", "x"), "x", false, 0},
		{"what an engine declares", at("1", "0.0.0.0:80", "web"), declared("2", "0.0.0.0:80", port.OwnerContainer, "claim"), "claim", false, 0},
		{"what an engine declares beside a Service", declared("1", "0.0.0.0:80", port.OwnerService, "front"), declared("2", "0.0.0.0:80", port.OwnerContainer, "claim"), "front", false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, f := attributed()
			f.put(AttributionKey{Path: "/docker/" + strings.Repeat("a", 64)}, "first")
			f.put(AttributionKey{Address: netip.MustParseAddr("10.0.0.5")}, "first")
			f.put(AttributionKey{Address: netip.MustParseAddr("10.0.0.6")}, "second")
			a, b := r.Feed("a"), r.Feed("b")
			a.Replace([]port.Binding{c.free})
			b.Replace([]port.Binding{withheld(c.withheld)})
			p, _ := r.Publications().View().Get(c.free.Key)
			if p.Owner.Name != c.owner || p.Contained != c.contained || p.Target != c.rule {
				t.Errorf("owner %q, in a container %v, rule %d; want %q, %v, %d", p.Owner.Name, p.Contained, p.Target, c.owner, c.contained, c.rule)
			}
			if slices.ContainsFunc(p.Others, func(o port.OtherOwner) bool { return o.Rival }) {
				t.Errorf("other owners are %+v, want no rival", p.Others)
			}
		})
	}
}

// A NAT rule with several addresses makes several publications, which a sink must
// know to be one rule's.
func TestPublicationsOfOneRuleNameIt(t *testing.T) {
	r := newRegistry()
	nat := r.Feed("nat")
	rule := func(id, addr string, identity uint64) port.Binding {
		b := binding(id, addr, 7)
		b.Owner, b.Target = port.Owner{}, identity
		return b
	}
	nat.Replace([]port.Binding{
		rule("1", "192.0.2.1:80", 1), rule("2", "192.0.2.2:80", 1), rule("3", "192.0.2.3:80", 2),
		rule("4", "192.0.2.4:80", 1), rule("5", "192.0.2.4:80", 2), rule("6", "192.0.2.5:80", 0),
	})
	of := func(addr string) uint64 {
		p, _ := r.Publications().View().Get(binding("", addr, 0).Key)
		return p.Target
	}
	one, other := of("192.0.2.1:80"), of("192.0.2.3:80")
	if one == 0 || other == 0 || one == other || of("192.0.2.2:80") != one || of("192.0.2.4:80") != 0 || of("192.0.2.5:80") != 0 {
		t.Errorf("rules = %d, %d, %d, %d, %d", one, of("192.0.2.2:80"), other, of("192.0.2.4:80"), of("192.0.2.5:80"))
	}
	nat.Apply(port.Change{Put: []port.Binding{rule("2", "192.0.2.2:80", 2)}})
	if of("192.0.2.2:80") != other {
		t.Error("the rule leads elsewhere and has its old identity")
	}
}

func TestReadyWhenEverySourceReported(t *testing.T) {
	r := newRegistry()
	a, b := r.Feed("socket"), r.Feed("docker")
	ready := func() bool {
		select {
		case <-r.Ready():
			return true
		default:
			return false
		}
	}
	if got := r.Incomplete(); !slices.Equal(got, []string{"socket", "docker"}) {
		t.Errorf("incomplete: %q", got)
	}
	a.Replace(nil)
	b.Stale(errors.New("no engine"))
	if ready() {
		t.Error("ready before the second source reported")
	}
	if got := r.Incomplete(); !slices.Equal(got, []string{"docker"}) {
		t.Errorf("incomplete: %q", got)
	}
	b.Replace(nil)
	if !ready() {
		t.Error("not ready though both have reported")
	}
	if got := r.Incomplete(); got != nil {
		t.Errorf("incomplete: %q", got)
	}
	a.Replace(nil) // and it stays so
}

func TestTCPAndUDPNeverMerge(t *testing.T) {
	r := newRegistry()
	u := binding("2", "0.0.0.0:53", 7)
	u.Protocol = port.UDP
	r.Feed("kube").Replace([]port.Binding{binding("1", "0.0.0.0:53", 7), u})
	expect(t, r, "tcp 0.0.0.0:53", "udp 0.0.0.0:53")
}

func TestAttributionPrefersContainer(t *testing.T) {
	r := newRegistry()
	socket, docker := r.Feed("socket"), r.Feed("docker")
	socket.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7)})
	b := binding("c", "0.0.0.0:80", 0)
	b.Owner = port.Owner{Kind: port.OwnerContainer, ID: "abc", Name: "nginx"}
	docker.Replace([]port.Binding{b})
	p, _ := r.Publications().View().Get(b.Key)
	if p.Owner.Name != "nginx" {
		t.Errorf("owner = %+v", p.Owner)
	}
}

func TestReplaceWithEqualSetIsNoChange(t *testing.T) {
	r := newRegistry()
	f := r.Feed("kube")
	set := []port.Binding{binding("1", "0.0.0.0:80", 7), binding("2", "[::1]:81", 7)}
	f.Replace(set)
	g := r.Publications().View().Generation()
	f.Replace(set)
	if now := r.Publications().View().Generation(); now != g {
		t.Errorf("generation went from %d to %d", g, now)
	}
}

func TestMovedOriginLeavesItsOldKey(t *testing.T) {
	r := newRegistry()
	f := r.Feed("docker")
	f.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7)})
	f.Apply(port.Change{Put: []port.Binding{binding("1", "127.0.0.1:90", 7)}})
	expect(t, r, "tcp 127.0.0.1:90")
}

func TestSinceIsKept(t *testing.T) {
	r := newRegistry()
	f := r.Feed("socket")
	b := binding("1", "0.0.0.0:80", 7)
	f.Replace([]port.Binding{b})
	p, _ := r.Publications().View().Get(b.Key)
	f.Apply(port.Change{Put: []port.Binding{binding("2", "0.0.0.0:80", 8)}})
	f.Apply(port.Change{Drop: []port.Origin{{ID: "1"}}})
	q, _ := r.Publications().View().Get(b.Key)
	if !p.Since.Equal(q.Since) || p.Since.IsZero() {
		t.Errorf("since went from %v to %v", p.Since, q.Since)
	}
}

// Whatever arrives in whatever order, the table is what compiling all bindings gives: also those
// of an agent that starts now, which sees all for the first time.
func TestModel(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		r := newRegistry()
		names := []string{"socket", "nat", "docker", "demand"}
		feeds, truth := make([]Feed, len(names)), make([]map[string]port.Binding, len(names))
		for i, name := range names {
			feeds[i], truth[i] = r.Feed(name), map[string]port.Binding{}
		}
		addrs := []string{"0.0.0.0", "127.0.0.1", "[::]", "[::1]", "10.0.0.1", "[fe80::1%eth0]"}
		id := func(i int) string {
			if names[i] == "demand" {
				return fmt.Sprintf("web%d:80/tcp", rng.IntN(20))
			}
			return strconv.FormatInt(int64(rng.IntN(20)), 16)
		}
		random := func(i int) port.Binding {
			b := binding(id(i), fmt.Sprintf("%s:%d", addrs[rng.IntN(len(addrs))], 80+rng.IntN(3)), rng.IntN(2))
			b.Owner.Name = []string{"web", "own-a", "own-b", "docker-proxy"}[rng.IntN(4)]
			switch names[i] {
			case "socket":
				b.Mapped = b.Address == netip.IPv4Unspecified() && rng.IntN(2) == 0
			case "nat":
				b.Owner, b.Target = port.Owner{}, uint64(rng.IntN(2))
				b.Hints.Targets = []netip.AddrPort{netip.MustParseAddrPort([]string{"127.0.0.1:81", "127.0.0.1:82", "172.17.0.2:80"}[rng.IntN(3)])}
			case "docker":
				b.Owner.Kind = port.OwnerContainer
			}
			if rng.IntN(4) == 0 {
				b.Withheld = port.Because(port.Unlistened)
			}
			return b
		}
		for range 300 {
			i := rng.IntN(len(feeds))
			switch rng.IntN(6) {
			case 0:
				truth[i] = map[string]port.Binding{}
				for range rng.IntN(10) {
					b := random(i)
					truth[i][b.Origin.ID] = b
				}
				feeds[i].Replace(slices.Collect(maps.Values(truth[i])))
			case 1:
				feeds[i].Stale(errors.New("x"))
			default:
				var c port.Change
				for range rng.IntN(3) {
					o := port.Origin{ID: id(i)}
					c.Drop = append(c.Drop, o)
					delete(truth[i], o.ID)
				}
				for range rng.IntN(3) {
					b := random(i)
					c.Put = append(c.Put, b)
					truth[i][b.Origin.ID] = b
				}
				feeds[i].Apply(c)
			}
		}
		want := map[string]bool{}
		slots := map[port.Slot][]member{}
		for rank, set := range truth {
			for _, b := range set {
				b.Since = time.Unix(int64(rng.IntN(5))+1, 0)
				s := &source{name: names[rank], r: r}
				slots[b.Slot()] = append(slots[b.Slot()], member{order: int32(rank), source: s, binding: s.keep(&b)})
			}
		}
		for _, ms := range slots {
			for _, p := range compile(ms, func(s port.Slot) []member { return slots[s] }) {
				want[describe(p.Publication)] = true
			}
		}
		got := map[string]bool{}
		for _, p := range r.Publications().View().All() {
			got[describe(p)] = true
		}
		if !maps.Equal(got, want) {
			t.Fatalf("seed %d: table %v, want %v", seed, got, want)
		}
	}
}

// describe returns what a publication shows but for its age.
func describe(p port.Publication) string {
	name := func(o port.Owner) string { return fmt.Sprint(o.Kind, " ", o.ID, " ", o.Name) }
	text := fmt.Sprint(p.Key, name(p.Owner), p.Source, p.Target, p.Demands(), p.Dial)
	for _, o := range p.Others {
		text += fmt.Sprint(", ", name(o.Owner), o.Rival)
	}
	for _, o := range p.Origins {
		text += fmt.Sprint(", ", o.Source, "/", o.ID, o.Withheld)
	}
	return text
}

func BenchmarkApply(b *testing.B) {
	for _, n := range []int{10, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r := newRegistry()
			f := r.Feed("socket")
			var set []port.Binding
			for i := range n {
				set = append(set, binding(fmt.Sprint(i), fmt.Sprintf("10.%d.%d.1:%d", i>>8&255, i&255, 1+i%60000), 1))
			}
			f.Replace(set)
			x := binding("x", "0.0.0.0:65000", 1)
			b.ReportAllocs()
			for b.Loop() {
				f.Apply(port.Change{Put: []port.Binding{x}})
				f.Apply(port.Change{Drop: []port.Origin{{ID: "x"}}})
				_ = r.Publications().View()
			}
		})
	}
}

func TestWarningsAreLoggedOnce(t *testing.T) {
	var log strings.Builder
	r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	f := r.Feed("docker")
	f.Replace(nil)
	for range 2 {
		f.Warn([]string{"container a: port 0", "container b: sctp"})
	}
	st, _ := r.Sources().View().Get("docker")
	if st.State != Live || !slices.Equal(st.Warnings, []string{"container a: port 0", "container b: sctp"}) {
		t.Errorf("status = %+v", st)
	}
	f.Warn([]string{"container b: sctp"})
	if n := strings.Count(log.String(), "container"); n != 2 {
		t.Errorf("two warnings made %d lines:\n%s", n, log.String())
	}
	f.Warn(nil)
	if st, _ = r.Sources().View().Get("docker"); len(st.Warnings) != 0 {
		t.Errorf("warnings that ended are shown: %q", st.Warnings)
	}
}

// An optional source is listed only while it has something to say, and Ready waits for it.
func TestOptionalFeed(t *testing.T) {
	r := newRegistry()
	f := r.OptionalFeed("kube:k3s")
	listed := func(want bool) {
		t.Helper()
		if _, ok := r.Sources().View().Get("kube:k3s"); ok != want {
			t.Errorf("listed %v, want %v", ok, want)
		}
	}
	listed(true) // it may take long to start
	f.Replace(nil)
	listed(false)
	select {
	case <-r.Ready():
	default:
		t.Error("not ready after a complete set")
	}
	f.Stale(errors.New("down"))
	listed(true)
	f.Replace(nil)
	listed(false)
	f.Method("watch")
	listed(true)
	f.Method("")
	listed(false)
	f.Warn([]string{"a port"})
	listed(true)
}

// Two clusters claim one node port, by Services of one name: neither is certain.
func TestClaimsOfTwoClusters(t *testing.T) {
	r := newRegistry()
	key := binding("x", "0.0.0.0:30080", 0).Key
	feeds := []Feed{r.Feed("kube"), r.OptionalFeed("kube:kubeadm")}
	for i, cluster := range []string{"k3s", "kubeadm"} {
		b := binding("default/web", "0.0.0.0:30080", 0)
		b.Owner = port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web", Namespace: "default", Cluster: cluster}
		feeds[i].Replace([]port.Binding{b})
	}
	p, _ := r.Publications().View().Get(key)
	if p.Owner.Cluster != "k3s" || len(p.Others) != 1 || p.Others[0].Cluster != "kubeadm" || !p.Others[0].Rival {
		t.Errorf("owned by %+v, others %+v; want the Service of the other cluster as a rival", p.Owner, p.Others)
	}
}

// A pod's runtime does not know its cluster: both are the pod's, until another cluster claims
// the address.
func TestPodOfACluster(t *testing.T) {
	pod := port.Owner{Kind: port.OwnerContainer, ID: "default/web-0", Name: "web-0", Namespace: "default"}
	runtime := port.Owner{Kind: port.OwnerContainer, ID: "0123", Name: "web-0", Namespace: "default", Labels: map[string]string{"app": "web"}}
	answer := func(owners ...port.Owner) answer {
		var a arbiter
		for _, o := range owners {
			f := new(fixed)
			f.owner = o
			a.engines = append(a.engines, engine{f, func() bool { return false }})
		}
		return a.owner(port.Hints{Targets: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.2:80")}})
	}
	one, two := pod, pod
	one.Cluster, two.Cluster = "k3s", "kubeadm"
	if ans := answer(runtime, one); !ans.known || ans.owner.ID != "0123" || ans.owner.Cluster != "k3s" || ans.owner.Labels == nil {
		t.Errorf("one cluster: %+v, want the container with its cluster", ans)
	}
	if ans := answer(runtime, one, two); ans.known || len(ans.rivals) != 2 {
		t.Errorf("two clusters: %+v, want two rivals", ans)
	}
}

// fixed has one owner for all.
type fixed struct {
	Facts

	owner port.Owner
}

func (f *fixed) ByAddress(netip.Addr) (port.Owner, bool) { return f.owner, true }
