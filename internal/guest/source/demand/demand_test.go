// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// feed keeps the set that was reported.
type feed struct {
	mu  sync.Mutex
	set []port.Binding
	n   int // complete sets
}

func (f *feed) Replace(set []port.Binding) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.set, f.n = set, f.n+1
}

func (f *feed) Apply(c port.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.set = slices.DeleteFunc(slices.Clone(f.set), func(b port.Binding) bool {
		return slices.Contains(c.Drop, b.Origin) || slices.ContainsFunc(c.Put, func(p port.Binding) bool { return p.Origin == b.Origin })
	})
	f.set = append(f.set, c.Put...)
}

func (f *feed) Stale(error)   {}
func (f *feed) Warn([]string) {}
func (f *feed) Method(string) {}

func (f *feed) Lacks(port.Lack, string) {}

func (f *feed) text() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []string
	for _, b := range f.set {
		list = append(list, fmt.Sprintf("%s=%s>%v %s>%v", b.Origin.ID, b.Key, b.Dial, b.Owner.Name, b.Hints.Targets))
	}
	return strings.Join(list, "; ")
}

func (f *feed) reports() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n
}

// services is a directory of one Service.
type services struct {
	mu     sync.Mutex
	found  []engine.Found
	signal schedule.Signal
	needed bool // for a container
}

func (s *services) Need(is bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.needed = is
}

func (s *services) isNeeded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.needed
}

func (s *services) Find(d port.Demand) []engine.Found {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !d.Service || d.Scope != "default" || d.Name != "web" {
		return nil
	}
	return s.found
}

func (s *services) Watch() schedule.Signal { return s.signal }

func (s *services) change(found ...engine.Found) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.found = found
	s.signal.Notify()
}

func container(id, name string, labels map[string]string, addresses ...string) engine.Fact {
	f := engine.Fact{Owner: port.Owner{Kind: port.OwnerContainer, ID: id, Name: name, Labels: labels}}
	for _, a := range addresses {
		f.Addresses = append(f.Addresses, netip.MustParseAddr(a))
	}
	return f
}

func parse(t *testing.T, texts ...string) (list []port.Demand) {
	t.Helper()
	for _, s := range texts {
		d, err := port.ParseDemand(s)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, d)
	}
	return list
}

// kind takes 192.0.2.0/24 for this machine's own addresses.
func kind(a netip.Addr) (netwatch.Kind, error) {
	switch {
	case netip.MustParsePrefix("192.0.2.0/24").Contains(a):
		return netwatch.Own, nil
	case a == netip.MustParseAddr("172.17.255.255"):
		return netwatch.Broadcast, nil
	case a == netip.MustParseAddr("203.0.113.1"):
		return 0, errors.New("no answer")
	}
	return netwatch.Elsewhere, nil
}

// fixture is a source with an engine.
type fixture struct {
	*Source

	feed     feed
	t        *testing.T
	table    engine.Table
	services services
}

func newFixture(t *testing.T, await func(context.Context)) *fixture {
	f := &fixture{t: t, services: services{signal: schedule.NewSignal()}}
	var err error
	f.Source, err = New(Options{Directories: []Directory{&f.table, &f.services}, Await: await, Kind: kind, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// run starts the source. Stop ends it.
func (f *fixture) run() (stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx, &f.feed); !errors.Is(err, context.Canceled) {
			f.t.Error(err)
		}
	})
	return func() { cancel(); running.Wait() }
}

// now returns the states of all demands.
func (f *fixture) now() []State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.states
}

// settle returns when the source has nothing to do: a pause follows each look.
func settle() {
	time.Sleep(time.Minute)
	synctest.Wait()
}

func (f *fixture) want(when, set, reasons string) {
	f.t.Helper()
	settle()
	if got := f.feed.text(); got != set {
		f.t.Errorf("%s: reported %q, want %q", when, got, set)
	}
	var list []string
	for _, s := range f.now() {
		list = append(list, s.Reason.String())
	}
	if got := strings.Join(list, "; "); got != reasons {
		f.t.Errorf("%s: reasons %q, want %q", when, got, reasons)
	}
}

// An engine that sleeps is needed while somebody asks for a container.
func TestNeedsEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		defer f.run()()
		for _, c := range []struct {
			ask  string
			want bool
		}{
			{"web:80", true},
			{"svc/default/web:80", false},
			{"svc/default/web:80 shop/api:80", true},
			{"", false},
		} {
			f.Ask(parse(t, strings.Fields(c.ask)...))
			settle()
			if got := f.services.isNeeded(); got != c.want {
				t.Errorf("%q is asked for: needed %v, want %v", c.ask, got, c.want)
			}
		}
	})
}

// A port is there while its container is, at whatever address that has.
func TestFollowsContainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		defer f.run()()
		f.want("nothing asked for", "", "")
		f.Ask(parse(t, "web:80"))
		f.want("no container", "", "no running container has the name web")
		f.table.Put("1", container("1", "web", nil, "172.17.0.2", "fd00::2"))
		f.want("started", "web:80/tcp=tcp 172.17.0.2:80>[172.17.0.2:80 [fd00::2]:80] web>[172.17.0.2:80 [fd00::2]:80]", "")
		f.table.Put("2", container("2", "api", nil, "172.17.0.3"))
		f.table.Swap([]string{"1"}, map[string]engine.Fact{"3": container("3", "web", nil, "172.17.0.9")})
		f.want("started again", "web:80/tcp=tcp 172.17.0.9:80>[172.17.0.9:80] web>[172.17.0.9:80]", "")
		stopped := container("3", "web", nil, "172.17.0.9")
		stopped.Stopped = true
		f.table.Put("3", stopped)
		f.want("stopped", "", "no running container has the name web")
		f.table.Put("3", container("3", "web", nil, "172.17.0.10"))
		f.want("back", "web:80/tcp=tcp 172.17.0.10:80>[172.17.0.10:80] web>[172.17.0.10:80]", "")
		f.Ask(nil)
		f.want("not asked for", "", "")
	})
}

// What is not asked for any more is withdrawn at once, also if it was looked up before that.
func TestDrop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.Drop(nil) // nothing runs
		stop := f.run()
		f.table.Put("1", container("1", "web", nil, "172.17.0.2"))
		f.table.Put("2", container("2", "api", nil, "172.17.0.3"))
		f.Ask(parse(t, "web:80", "api:80"))
		const web, api = "web:80/tcp=tcp 172.17.0.2:80>[172.17.0.2:80] web>[172.17.0.2:80]", "api:80/tcp=tcp 172.17.0.3:80>[172.17.0.3:80] api>[172.17.0.3:80]"
		f.want("both", api+"; "+web, "; ")
		late, _ := f.lookUp(true)
		f.Drop(parse(t, "api:80", "db:5432"))
		if got := f.feed.text(); got != api {
			t.Errorf("at once: reported %q", got)
		}
		f.report(&f.feed, late, false)
		if got := f.feed.text(); got != api {
			t.Errorf("after a late report: reported %q", got)
		}
		f.want("later", api, "")
		stop()
		n := f.feed.reports()
		if f.Drop(nil); f.feed.reports() != n {
			t.Error("it reports after its end")
		}
	})
}

// Nothing is dialled that is not a container's alone, and what is not certain waits.
func TestWaits(t *testing.T) {
	project := func(service string) map[string]string {
		return map[string]string{"com.docker.compose.project": "shop", "com.docker.compose.service": service}
	}
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.table.Swap(nil, map[string]engine.Fact{
			"h": container("h", "hosted", nil), "o": container("o", "own", nil, "192.0.2.1"), "l": container("l", "loop", nil, "127.0.0.1"),
			"b": container("b", "broad", nil, "172.17.255.255"), "q": container("q", "unclear", nil, "203.0.113.1"), "m": container("m", "meta", nil, "169.254.169.254"),
			"1": container("1", "shop-web-1", project("web"), "172.18.0.2"), "2": container("2", "shop-web-2", project("web"), "172.18.0.3"),
			"d": container("d", "shop-db-1", project("db"), "172.18.0.4"),
			"t": container("0123456789abcdef", "twin", nil, "172.18.0.5"), "u": container("fedcba9876543210", "Twin", nil, "172.18.0.6"),
		})
		defer f.run()()
		own := "has no address of its own that this guest reaches: if it is in the guest's network, forward its port as one of the guest: `fairlead forward add 80/tcp`; if it is in that of a pod or of another container, name that; else publish the port"
		for _, c := range []struct{ ask, set, reason string }{
			{"hosted:80", "", "container hosted " + own},
			{"own:80", "", "container own " + own},
			{"loop:80", "", "container loop " + own},
			{"broad:80", "", "container broad " + own},
			{"unclear:80", "", "container unclear " + own},
			{"meta:80", "", "container meta " + own},
			{"shop/web:80", "", "shop/web names 2 containers: name one of shop-web-1, shop-web-2"},
			{"shop/db:5432", "shop/db:5432/tcp=tcp 172.18.0.4:5432>[172.18.0.4:5432] shop-db-1>[172.18.0.4:5432]", ""},
			{"shop/cache:1", "", "no running container is cache of the project or namespace shop"},
			{"svc/default/gone:80", "", "there is no Service default/gone"},
			{"twin:80", "twin:80/tcp=tcp 172.18.0.5:80>[172.18.0.5:80] twin>[172.18.0.5:80]", ""},
		} {
			f.Ask(parse(t, c.ask))
			f.want(c.ask, c.set, c.reason)
		}
		f.table.Put("v", container("00ff00ff00ff00ff", "twin", nil, "172.18.0.7"))
		f.want("two of one name", "", "twin names 2 containers: name one of twin (00ff00ff00ff), twin (0123456789ab)")
	})
}

// A Service of that name in two clusters is none that can be dialled: it names both.
func TestServiceOfTwoClusters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		defer f.run()()
		found := func(cluster, address string) engine.Found {
			return engine.Found{
				Owner: port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web", Namespace: "default", Cluster: cluster},
				Dial:  []netip.AddrPort{netip.MustParseAddrPort(address)},
			}
		}
		f.services.change(found("k3s", "10.43.0.7:80"), found("kubeadm", "10.96.0.7:80"))
		f.Ask(parse(t, "svc/default/web:80"))
		f.want("both", "", "svc/default/web is in 2 clusters: default/web of cluster k3s, default/web of cluster kubeadm; name a pod of it instead")
		f.services.change(found("", "10.43.0.7:80"))
		f.want("one", "svc/default/web:80/tcp=tcp 10.43.0.7:80>[10.43.0.7:80] web>[]", "")
	})
}

// A Service is dialled at its address, and rules see its endpoints.
func TestService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		defer f.run()()
		f.Ask(parse(t, "svc/default/web:80"))
		f.want("no Service", "", "there is no Service default/web")
		web := engine.Found{
			Owner:   port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web", Namespace: "default"},
			Dial:    []netip.AddrPort{netip.MustParseAddrPort("10.96.0.7:80"), netip.MustParseAddrPort("10.244.0.5:8080")},
			Targets: []netip.AddrPort{netip.MustParseAddrPort("10.244.0.5:8080")},
		}
		f.services.change(web)
		f.want("there", "svc/default/web:80/tcp=tcp 10.96.0.7:80>[10.96.0.7:80 10.244.0.5:8080] web>[]; "+
			"svc/default/web:80/tcp endpoints=tcp 10.96.0.7:80>[10.96.0.7:80 10.244.0.5:8080] >[10.244.0.5:8080]", "")
		f.services.change(engine.Found{Owner: web.Owner, Reason: port.Because(port.SystemFailed, "nothing serves it")})
		f.want("unserved", "", "nothing serves it")
		f.services.change()
		f.want("gone", "", "there is no Service default/web")
	})
}

// The first set waits for the engines only if something is asked for. What is asked for later
// does too: the host closes what an agent says is not there.
func TestFirstSetWaitsForEngines(t *testing.T) {
	for _, asked := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			read := make(chan struct{})
			f := newFixture(t, func(ctx context.Context) {
				select {
				case <-read:
				case <-ctx.Done():
				}
			})
			if asked {
				f.Ask(parse(t, "web:80"))
			}
			defer f.run()()
			settle()
			if reported := f.feed.reports() > 0; reported == asked {
				t.Errorf("asked %t: reported %t before the engines were read", asked, reported)
			}
			if asked {
				f.Ask(parse(t, "web:80", "db:80"))
			} else {
				f.Ask(parse(t, "db:80"))
			}
			settle()
			if states := f.now(); len(states) > 0 {
				t.Errorf("asked %t: said before the engines were read: %v", asked, states)
			}
			close(read)
			settle()
			if f.feed.reports() == 0 {
				t.Error("nothing was reported")
			}
		})
	}
}

// What one engine has is there although another one has not answered. A pod is not: another engine
// may know labels of it, by which rules deny it.
func TestSlowEngineHoldsUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		read := make(chan struct{})
		f := newFixture(t, func(ctx context.Context) {
			select {
			case <-read:
			case <-ctx.Done():
			}
		})
		f.Ask(parse(t, "gone:80", "svc/default/web:80", "default/pod:80"))
		f.services.change(engine.Found{
			Owner: port.Owner{Kind: port.OwnerService, ID: "default/web", Name: "web", Namespace: "default"},
			Dial:  []netip.AddrPort{netip.MustParseAddrPort("10.96.0.7:80")},
		})
		pod := container("1", "pod", nil, "10.244.0.5")
		pod.Owner.Namespace = "default"
		f.table.Put("1", pod)
		defer f.run()()
		const web = "svc/default/web:80/tcp=tcp 10.96.0.7:80>[10.96.0.7:80] web>[]"
		f.want("before the other engine is read", web, "")
		f.Drop(parse(t, "gone:80", "default/pod:80"))
		f.Ask(parse(t, "gone:80", "default/pod:80"))
		f.want("not asked for any more", "", "")
		if f.feed.reports() > 0 {
			t.Error("a set was reported as complete")
		}
		f.Ask(parse(t, "gone:80", "svc/default/web:80", "default/pod:80"))
		close(read)
		f.want("then", "default/pod:80/tcp=tcp 10.244.0.5:80>[10.244.0.5:80] pod>[10.244.0.5:80]; "+web, "; no running container has the name gone; ")
		if f.feed.reports() == 0 {
			t.Error("no set was reported as complete")
		}
	})
}

// Beyond the limit demands wait.
func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		defer f.run()()
		var many []string
		for i := range Max + 1 {
			many = append(many, fmt.Sprintf("c%03d:80", i))
		}
		f.Ask(parse(t, many...))
		settle()
		states := f.now()
		if n := len(states); n != Max+1 || !strings.Contains(states[Max].Reason.String(), "more than 256 ports") {
			t.Fatalf("%d states", n)
		}
	})
}

func TestOptions(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("no error without options")
	}
}

// The table has what waits alone, since when it does, and its changes.
func TestWaitingTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		defer f.run()()
		want := func(when string, rows ...string) {
			t.Helper()
			settle()
			got := []string{}
			for text, w := range f.Waiting().View().All() {
				got = append(got, fmt.Sprintf("%s %s", text, time.Since(w.Since)))
			}
			if !slices.Equal(got, rows) {
				t.Errorf("%s: %q, want %q", when, got, rows)
			}
		}
		want("nothing asked for", []string{}...)
		f.Ask(parse(t, "web:80", "db:1"))
		want("asked", "db:1/tcp 1m0s", "web:80/tcp 1m0s")
		f.table.Put("1", container("1", "web", nil, "172.17.0.2"))
		want("one started", "db:1/tcp 2m0s")
		sub := f.Waiting().Subscribe()
		defer sub.Close()
		sub.Take()
		f.table.Put("2", container("2", "db", nil, "192.0.2.1"))
		want("another reason", "db:1/tcp 3m0s")
		if _, change := sub.Take(); !slices.Equal(change.Keys, []string{"db:1/tcp"}) {
			t.Errorf("changed: %q", change.Keys)
		}
		f.Ask(nil)
		want("not asked for", []string{}...)
	})
}

// Where nothing knows containers, what is asked for waits at once.
func TestWithoutDirectories(t *testing.T) {
	s, err := New(Options{Kind: kind, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s.Ask(parse(t, "web:80"))
	if w, ok := s.Waiting().View().Get("web:80/tcp"); !ok || !strings.Contains(w.Reason.String(), "enable docker") {
		t.Errorf("%+v", w)
	}
}
