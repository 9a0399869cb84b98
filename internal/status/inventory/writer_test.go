// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/output"
)

// agent is the writer of one node, and what it reports.
type agent struct {
	*Writer
	changed schedule.Signal
	log     *output.Buffer
	stop    func()

	mu       sync.Mutex
	report   Report
	reported func() // called with the lock when the report is made; may be nil
}

// lines returns what was logged.
func lines(log *output.Buffer) []string {
	return strings.FieldsFunc(log.String(), func(r rune) bool { return r == '\n' })
}

func (g *agent) lines() []string { return lines(g.log) }

// locks is what LockNode is on one machine.
type locks struct {
	mu   sync.Mutex
	held map[string]bool
}

func (l *locks) lock(_ context.Context, node string) (func(), error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[node] {
		return nil, ErrHeld
	}
	l.held[node] = true
	return func() { l.mu.Lock(); defer l.mu.Unlock(); delete(l.held, node) }, nil
}

func newLocks() *locks { return &locks{held: make(map[string]bool)} }

const interval = 10 * time.Second

// startAgent runs a writer of a node, at machine "boot-NODE" unless change says otherwise.
func startAgent(t *testing.T, a *api, node string, change func(*Options), ports ...Port) *agent {
	t.Helper()
	g := &agent{changed: schedule.NewSignal(), log: new(output.Buffer), report: Report{Agent: "1", Ports: ports}}
	o := Options{
		Node: node, Interval: interval, Machine: "boot-" + node, Namespace: "1", Config: a.config, Lock: newLocks().lock, Changed: g.changed,
		Logger: slog.New(slog.NewTextHandler(g.log, nil)),
		Report: func(context.Context) Report {
			g.mu.Lock()
			defer g.mu.Unlock()
			r := g.report
			r.Ports = append([]Port(nil), r.Ports...)
			if g.reported != nil {
				g.reported()
			}
			return r
		},
	}
	if change != nil {
		change(&o)
	}
	g.Writer = NewWriter(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	g.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(g.stop)
	return g
}

func (g *agent) set(ports ...Port) {
	g.mu.Lock()
	g.report.Ports = ports
	g.mu.Unlock()
	g.changed.Notify()
}

// pass lets that much time pass.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestWriterCoalesces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
		pass(interval + time.Second)
		o := a.object("n")
		if o == nil || a.writes() != 1 {
			t.Fatalf("%d writes, object %v: %v", a.writes(), o, g.State())
		}
		if r := o.OwnerReferences; len(r) != 1 || r[0].Kind != "Node" || r[0].Name != "n" || r[0].UID != a.nodes["n"].UID {
			t.Errorf("owner references %+v", r)
		}
		// Quiet: nothing is written, however often it is said to have changed.
		pass(time.Minute)
		for range 20 {
			g.changed.Notify()
			pass(time.Second)
		}
		if n := a.writes(); n != 1 {
			t.Fatalf("%d writes without a change", n)
		}
		// The first change after that is written at once, the others together.
		g.set(tcp("0.0.0.0", 22, "sshd"), tcp("0.0.0.0", 80, "web"))
		pass(2 * settle)
		if n := a.writes(); n != 2 {
			t.Fatalf("%d writes at once after a change", n)
		}
		for i := range 9 {
			g.set(tcp("0.0.0.0", 22, "sshd"), tcp("0.0.0.0", 81+i, "web"))
			pass(time.Second)
		}
		if n := a.writes(); n != 2 {
			t.Fatalf("%d writes within the interval", n)
		}
		pass(interval/5 + 2*time.Second)
		if n := a.writes(); n != 3 {
			t.Fatalf("%d writes after the interval", n)
		}
		ports, err := a.object("n").Status.Decode()
		if err != nil || len(ports) != 2 || ports[1].Port != 89 {
			t.Errorf("the object has %v, %v", ports, err)
		}
		if s := g.State(); s.Error != "" || s.Writes != 3 || s.Written.IsZero() {
			t.Errorf("state %+v", s)
		}
	})
}

func TestWriterRenews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
		pass(interval + time.Second)
		first := a.object("n").Status
		pass(time.Hour)
		last := a.object("n").Status
		if n := a.writes(); n < 12 || n > 15 {
			t.Errorf("%d writes in an hour without a change", n)
		}
		if !last.Updated.Equal(&first.Updated) || !last.Holder.Renewed.After(first.Holder.Renewed.Time) {
			t.Errorf("updated %v, renewed %v after %v, %v", last.Updated, last.Holder.Renewed, first.Updated, first.Holder.Renewed)
		}
	})
}

// A long interval puts off changes, and neither renewals nor looks at the Node, without
// which others take the object for one that nobody writes.
func TestWriterRenewsWithinItsInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const long = time.Hour
		a := newAPI("n")
		g := startAgent(t, a, "n", func(o *Options) { o.Interval = long }, tcp("0.0.0.0", 22, "sshd"))
		pass(long)
		n, reads := a.writes(), a.count("get nodes")
		for i := range 12 {
			g.set(tcp("0.0.0.0", 22, "sshd"), tcp("0.0.0.0", 80+i, "web"))
			pass(RenewEvery + time.Second)
			if age := time.Since(a.object("n").Status.Holder.Renewed.Time); age > RenewEvery+time.Second {
				t.Fatalf("the object was renewed %v ago", age)
			}
		}
		if n, reads = a.writes()-n, a.count("get nodes")-reads; n < 11 || n > 15 || reads < 11 || reads > 15 {
			t.Errorf("%d writes, %d reads of the Node in an hour", n, reads)
		}
	})
}

// A new agent of the same boot writes nothing that is there, and knows since when ports
// are open.
func TestRestartedAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		same, other, reopened := tcp("0.0.0.0", 22, "sshd"), tcp("0.0.0.0", 80, "web"), tcp("0.0.0.0", 90, "job")
		startAgent(t, a, "n", nil, same, other).stop0(t)
		n := a.writes()
		later := func(p Port, by time.Duration) Port {
			p.Since = p.Since.Add(by)
			return p
		}
		g := startAgent(t, a, "n", nil, later(same, time.Hour), later(other, time.Hour))
		pass(interval + time.Second)
		if a.writes() != n {
			t.Errorf("%d writes by an agent that has nothing new", a.writes()-n)
		}
		replaced := later(other, time.Hour)
		replaced.Owner.ID = "8"
		g.set(later(same, time.Hour), replaced, reopened)
		pass(interval + time.Second)
		g.set(later(same, 2*time.Hour), replaced, reopened)
		pass(2 * interval)
		ports, err := a.object("n").Status.Decode()
		if err != nil || len(ports) != 3 {
			t.Fatalf("%v, %v", ports, err)
		}
		for i, want := range []time.Duration{2 * time.Hour, time.Hour, 0} {
			if got := ports[i].Since.Sub(noon); got != want {
				t.Errorf("port %d is open since noon + %v, want %v", ports[i].Port, got, want)
			}
		}
	})
}

// stop0 lets the agent write and ends it.
func (g *agent) stop0(t *testing.T) {
	t.Helper()
	pass(interval + time.Second)
	if s := g.State(); s.Writes == 0 {
		t.Fatalf("nothing was written: %+v", s)
	}
	g.stop()
}

// An API server that is away for an hour costs one line in the log.
func TestAPIServerIsAway(t *testing.T) {
	for name, away := range map[string]func(a *api){
		"refuses": func(a *api) { a.away = fmt.Errorf("dial: %w", syscall.ECONNREFUSED) },
		"fails": func(a *api) {
			for _, s := range []string{"get nodes", "get nodeinventories", "update nodeinventories"} {
				a.refuse[s] = 503
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI("n")
				g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
				pass(interval + time.Second)
				a.set(func() { away(a); a.asked = nil })
				for i := range 3600 {
					g.set(tcp("0.0.0.0", 1000+i, "web"))
					pass(time.Second)
				}
				if n := len(a.asked); n < 60 || n > 180 {
					t.Errorf("%d requests in an hour", n)
				}
				if lines := g.lines(); len(lines) != 1 {
					t.Errorf("log %q, want one line", lines)
				}
				if g.State().Error == "" {
					t.Error("the state has no error")
				}
				a.set(func() { a.away = nil; clear(a.refuse) })
				pass(time.Minute + time.Second)
				ports, err := a.object("n").Status.Decode()
				if err != nil || len(ports) != 1 || ports[0].Port != 1000+3599 || g.State().Error != "" {
					t.Errorf("a minute after the server is back the object has %v, %v: %+v", ports, err, g.State())
				}
				if lines := g.lines(); len(lines) != 2 {
					t.Errorf("log %q, want two lines", lines)
				}
			})
		})
	}
}

func TestRefusalsAreExplained(t *testing.T) {
	for name, c := range map[string]struct {
		change func(a *api)
		want   []string
		mend   func(a *api)
	}{
		"may not get nodes":   {func(a *api) { a.refuse["get nodes"] = 403 }, []string{"verb get of nodes is missing"}, nil},
		"may not get":         {func(a *api) { a.refuse["get nodeinventories"] = 403 }, []string{"verb get of nodeinventories.fairlead.dev is missing"}, nil},
		"may not create":      {func(a *api) { a.refuse["create nodeinventories"] = 403 }, []string{"verb create of nodeinventories.fairlead.dev is missing"}, nil},
		"no CRD":              {func(a *api) { a.served = nil }, []string{"no such resource as nodeinventories.fairlead.dev", "crd.yaml"}, func(a *api) { a.served = []string{Version} }},
		"CRD of another kind": {func(a *api) { a.served = []string{"v1", "v2"} }, []string{"serves nodeinventories.fairlead.dev v1, v2", "knows v1alpha1"}, func(a *api) { a.served = []string{Version} }},
		"CRD without a field": {func(a *api) { a.drops = true }, []string{"drops fields", "crd.yaml"}, func(a *api) { a.drops = false }},
		"no node":             {func(a *api) { delete(a.nodes, "n") }, []string{"node not found", "cluster.nodeName"}, func(a *api) { a.mu.Unlock(); a.addNode("n", "boot-n"); a.mu.Lock() }},
		"another machine":     {func(a *api) { a.nodes["n"].Status.NodeInfo.BootID = "x" }, []string{"boot id x", "cluster.nodeName"}, func(a *api) { a.nodes["n"].Status.NodeInfo.BootID = "boot-n" }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI("n")
				c.change(a)
				g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
				pass(10 * time.Minute)
				for _, want := range c.want {
					if s := g.State(); !strings.Contains(s.Error, want) {
						t.Errorf("error %q, want %q", s.Error, want)
					}
				}
				if lines := g.lines(); len(lines) != 1 || !strings.Contains(lines[0], "level=WARN") {
					t.Errorf("log %q, want one warning", lines)
				}
				if c.mend != nil {
					a.set(func() { c.mend(a) })
				}
				a.set(func() { clear(a.refuse) })
				pass(time.Minute + time.Second)
				if s := g.State(); s.Error != "" || a.object("n") == nil || len(a.object("n").Status.List) == 0 {
					t.Errorf("a minute after it was mended: %+v", s)
				}
			})
		})
	}
}

// RBAC may also lack update alone, which shows only at the second write.
func TestUpdateIsForbidden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		a.refuse["update nodeinventories"] = 403
		g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
		pass(2 * interval)
		g.set(tcp("0.0.0.0", 80, "web"))
		pass(interval)
		if s := g.State(); !strings.Contains(s.Error, "verb update of nodeinventories.fairlead.dev is missing") {
			t.Errorf("error %q", s.Error)
		}
	})
}

// Of two agents in one network namespace the second waits for the end of the first.
func TestTwoAgentsOfOneMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, l := newAPI("n"), newLocks()
		shared := func(o *Options) { o.Lock = l.lock }
		first := startAgent(t, a, "n", shared, tcp("0.0.0.0", 1, "first"))
		pass(interval + time.Second)
		second := startAgent(t, a, "n", shared, tcp("0.0.0.0", 2, "second"))
		writes := a.writes()
		for i := range 3600 {
			second.set(tcp("0.0.0.0", 1000+i, "second"))
			pass(time.Second)
		}
		if s := second.State(); s.Writes > 0 || !s.Held || len(second.lines()) != 1 {
			t.Errorf("the second: %+v, log %q", s, second.lines())
		}
		if n := a.writes() - writes; n > 15 || len(first.lines()) > 0 {
			t.Errorf("%d writes by the first in an hour, log %q", n, first.lines())
		}
		first.stop()
		pass(time.Minute + interval)
		if s := second.State(); s.Error != "" || s.Writes == 0 {
			t.Errorf("the second after the end of the first: %+v", s)
		}
	})
}

// An agent in another network namespace, or on another machine where the node's boot is
// not known, waits until the first has not written for long, whatever its clock says.
func TestTwoHolders(t *testing.T) {
	for _, skew := range []time.Duration{0, -24 * time.Hour, 24 * time.Hour} {
		t.Run(skew.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI()
				a.addNode("n", "")
				o := &NodeInventory{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
				o.Status.Holder = Holder{Machine: "other", Namespace: "1", Renewed: metav1.NewTime(time.Now().Add(skew))}
				renew := func() {
					a.set(func() {
						c := *o
						c.Status.Holder.Renewed = metav1.NewTime(c.Status.Holder.Renewed.Add(RenewEvery))
						o = &c
						a.put(o)
					})
				}
				renew()
				g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
				for range 12 {
					pass(RenewEvery)
					renew()
				}
				if s := g.State(); s.Writes > 0 || !s.Held || !strings.Contains(s.Error, "boot id other") || len(g.lines()) != 1 {
					t.Fatalf("beside a holder: %+v, log %q", s, g.lines())
				}
				pass(HeldFor - time.Minute)
				if s := g.State(); s.Writes > 0 {
					t.Fatalf("took the object after %v", HeldFor-time.Minute)
				}
				pass(4 * time.Minute)
				if s := g.State(); s.Writes == 0 || s.Error != "" {
					t.Errorf("after the holder's time: %+v", s)
				}
			})
		})
	}
}

// Two agents in two network namespaces of one machine: only one writes, until it has not for
// long. Then the other does, also after the first has returned.
func TestTwoNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		in := func(namespace string) func(*Options) { return func(o *Options) { o.Namespace = namespace } }
		first := startAgent(t, a, "n", in("1"), tcp("0.0.0.0", 1, "first"))
		pass(2 * interval)
		second := startAgent(t, a, "n", in("2"), tcp("0.0.0.0", 2, "second"))
		both := func(writes, waits *agent, d time.Duration) {
			t.Helper()
			n := waits.State().Writes
			for i := range int(d / time.Second) {
				writes.set(tcp("0.0.0.0", 1000+i, "writes"))
				waits.set(tcp("0.0.0.0", 2000+i, "waits"))
				pass(time.Second)
			}
			if w, o := waits.State(), writes.State(); w.Writes != n || !w.Held || !o.Current || len(waits.lines()) != 1 {
				t.Errorf("writes: %+v, waits: %+v, log %q", o, w, waits.lines())
			}
		}
		both(first, second, time.Hour)
		first.stop()
		pass(HeldFor - time.Minute)
		if s := second.State(); s.Writes > 0 {
			t.Fatalf("took the object before its time: %+v", s)
		}
		pass(3 * time.Minute)
		if s := second.State(); s.Writes == 0 || !s.Current || len(second.lines()) != 2 {
			t.Fatalf("after the holder's time: %+v, log %q", s, second.lines())
		}
		first = startAgent(t, a, "n", in("1"), tcp("0.0.0.0", 1, "first"))
		pass(2 * interval)
		both(second, first, time.Hour)
	})
}

// After a reboot the object of the boot before is taken at once.
func TestObjectOfAnEarlierBoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd")).stop0(t)
		a.nodes["n"].Status.NodeInfo.BootID = "second"
		g := startAgent(t, a, "n", func(o *Options) { o.Machine = "second" }, tcp("0.0.0.0", 22, "sshd"))
		pass(interval + time.Second)
		if s := g.State(); s.Writes != 1 || a.object("n").Status.Holder.Machine != "second" {
			t.Errorf("after a reboot: %+v", s)
		}
	})
}

// A server that takes less gets a shorter list, which says so.
func TestServerTakesLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		a.limit = 32 << 10
		var ports []Port
		for i := range 3_000 {
			p := tcp("127.0.0.1", i, fmt.Sprintf("%x-%d", i*7919, i))
			ports = append(ports, p)
		}
		g := startAgent(t, a, "n", nil, ports...)
		pass(2 * interval)
		o := a.object("n")
		if o == nil {
			t.Fatalf("no object: %+v", g.State())
		}
		listed, err := o.Status.Decode()
		if err != nil || len(listed) == 0 || len(listed)+o.Status.ListOmitted != len(ports) || g.State().Omitted != o.Status.ListOmitted {
			t.Errorf("%d listed, %d omitted, %v: %+v", len(listed), o.Status.ListOmitted, err, g.State())
		}
	})
}

// A server that takes nothing at all is asked no more often than one that is away, and what
// it says is in the error.
func TestServerTakesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		a.limit = 1
		g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
		pass(time.Hour)
		if s, n := g.State(), a.writes(); !strings.Contains(s.Error, "too large") || n > 180 || len(g.lines()) != 1 {
			t.Errorf("%d writes in an hour, %+v, log %q", n, s, g.lines())
		}
		a.set(func() { a.limit = 0 })
		pass(time.Minute + time.Second)
		if s := g.State(); !s.Current {
			t.Errorf("after the server takes it: %+v", s)
		}
	})
}

// A change costs one request. The Node is read at the start, after a conflict and when the
// object is renewed.
func TestRequestsOfAWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
		pass(interval + time.Second)
		asked := func(want ...string) {
			t.Helper()
			a.mu.Lock()
			defer a.mu.Unlock()
			if !slices.Equal(a.asked, want) {
				t.Errorf("asked %q, want %q", a.asked, want)
			}
			a.asked = nil
		}
		asked("get nodes", "get nodeinventories", "create nodeinventories")
		for i := range 5 {
			g.set(tcp("0.0.0.0", 1000+i, "web"))
			pass(2 * interval)
			asked("update nodeinventories")
		}
		pass(RenewEvery)
		asked("get nodes", "update nodeinventories")
		a.set(func() { // somebody else changes the object
			o := *a.objects["n"]
			o.Labels = map[string]string{"kept": "yes"}
			a.put(&o)
		})
		g.set(tcp("0.0.0.0", 22, "sshd"))
		pass(2 * interval)
		asked("update nodeinventories", "get nodes", "get nodeinventories", "update nodeinventories")
		o := a.object("n")
		if ports, err := o.Status.Decode(); err != nil || len(ports) != 1 || ports[0].Port != 22 || o.Labels["kept"] != "yes" {
			t.Errorf("object %+v, %v", o, err)
		}
		// Changes that never end do not keep the Node from being read.
		for i := range 3600 {
			g.set(tcp("0.0.0.0", 1000+i, "web"))
			pass(time.Second)
		}
		if n := a.count("get nodes"); n < 12 || n > 14 || a.count("get nodeinventories") > 0 || a.writes() > 360 {
			t.Errorf("in an hour of changes: %d reads of the Node, %d of the object, %d writes", n, a.count("get nodeinventories"), a.writes())
		}
	})
}

// A node that was removed and made again has an object that belongs to it, whether the
// garbage collector has come to the one before or not.
func TestNodeIsMadeAgain(t *testing.T) {
	ports := tcp("0.0.0.0", 22, "sshd")
	again := func(a *api) { a.removeNode("n"); a.addNode("n", "boot-n") }
	uncollected := func(a *api) { a.addNode("n", "boot-n") }
	for name, c := range map[string]struct {
		change func(a *api)
		then   func(t *testing.T, a *api, g *agent)
	}{
		"and a port changes":                 {again, func(_ *testing.T, _ *api, g *agent) { g.set(tcp("0.0.0.0", 80, "web")); pass(time.Minute) }},
		"and nothing changes":                {again, func(*testing.T, *api, *agent) { pass(RenewEvery + interval) }},
		"not yet collected":                  {uncollected, func(*testing.T, *api, *agent) { pass(RenewEvery + interval) }},
		"not yet collected, a port changes":  {uncollected, func(_ *testing.T, _ *api, g *agent) { g.set(tcp("0.0.0.0", 80, "web")); pass(RenewEvery + interval) }},
		"not yet collected, the agent, too":  {uncollected, func(t *testing.T, a *api, g *agent) { g.stop(); startAgent(t, a, "n", nil, ports); pass(2 * interval) }},
		"while no agent ran, which returned": {again, func(t *testing.T, a *api, g *agent) { g.stop(); startAgent(t, a, "n", nil, ports); pass(2 * interval) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI("n")
				g := startAgent(t, a, "n", nil, ports)
				pass(2 * interval)
				c.change(a)
				c.then(t, a, g)
				if o := a.object("n"); o == nil || !owned(o, a.nodes["n"].UID) {
					t.Errorf("object %+v of node %s: %+v", o, a.nodes["n"].UID, g.State())
				}
			})
		})
	}
}

// A node that was renamed, or whose name another machine took, gets no object any more.
func TestNodeIsRenamed(t *testing.T) {
	for name, c := range map[string]struct {
		taken bool
		want  string
	}{"renamed": {false, "set cluster.nodeName"}, "taken by another machine": {true, "boot id other"}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI("n")
				g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
				pass(2 * interval)
				a.removeNode("n")
				a.addNode("renamed", "boot-n")
				if c.taken {
					a.addNode("n", "other")
				}
				for i := range 3600 {
					g.set(tcp("0.0.0.0", 1000+i, "web"))
					pass(time.Second)
				}
				if o := a.object("n"); o != nil || a.object("renamed") != nil || !strings.Contains(g.State().Error, c.want) {
					t.Errorf("object %+v, error %q, want %q", o, g.State().Error, c.want)
				}
				if lines := g.lines(); len(lines) > 2 {
					t.Errorf("log %q, want a line for the object and one for the Node", lines)
				}
			})
		})
	}
}

// The writer follows its configuration, and what was reported of one cluster goes to no other.
func TestServerOrCredentialsChange(t *testing.T) {
	ours, theirs := tcp("0.0.0.0", 80, "first"), tcp("0.0.0.0", 81, "second")
	names := func(t *testing.T, a *api) (list []string) {
		if a.object("n") == nil {
			return nil
		}
		ports, err := a.object("n").Status.Decode()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range ports {
			list = append(list, p.Owner.Name)
		}
		return list
	}
	type config struct {
		conf *rest.Config
		err  error
	}
	for name, c := range map[string]struct {
		run           func(t *testing.T, g *agent, become func(config), first, second *api)
		first, second string // whose ports these servers have
		wrong         string // what the state says
	}{
		"and the ports": {func(_ *testing.T, g *agent, become func(config), _, second *api) {
			become(config{conf: second.conf})
			g.set(theirs)
			pass(2 * interval)
		}, "first", "second", ""},
		"and no port": {func(_ *testing.T, _ *agent, become func(config), _, second *api) {
			become(config{conf: second.conf})
			pass(RenewEvery)
		}, "first", "first", ""},
		"while ports are reported": {func(_ *testing.T, g *agent, become func(config), _, second *api) {
			g.mu.Lock()
			g.reported = func() { // what was reported is of the cluster before
				become(config{conf: second.conf})
				g.reported = nil
				g.report.Ports = []Port{theirs}
			}
			g.report.Ports = []Port{tcp("0.0.0.0", 82, "late")}
			g.mu.Unlock()
			g.changed.Notify()
			pass(2 * interval)
		}, "first", "second", ""},
		"before its Services are listed": {func(_ *testing.T, g *agent, become func(config), _, _ *api) {
			become(config{err: errors.New("not listed yet")})
			g.set(tcp("0.0.0.0", 82, "late"))
			pass(2 * RenewEvery)
		}, "first", "", "not listed yet"},
		"and back": {func(t *testing.T, g *agent, become func(config), first, second *api) {
			become(config{conf: second.conf})
			g.set(theirs)
			pass(2 * interval)
			writes := first.writes()
			become(config{conf: first.conf})
			g.set(ours)
			pass(2 * interval)
			if first.writes() == writes {
				t.Error("the first server has what it had before")
			}
		}, "first", "second", ""},
		"to a user without rights": {func(_ *testing.T, g *agent, become func(config), first, _ *api) {
			become(config{conf: &rest.Config{Host: "http://api", Transport: forbidden{}}})
			g.set(theirs)
			pass(2 * interval)
		}, "first", "", "RBAC does not allow it"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				first, second := newAPI("n"), newAPI("n")
				var mu sync.Mutex
				now := config{conf: first.conf}
				g := startAgent(t, first, "n", func(o *Options) {
					o.Config = func() (*rest.Config, string, error) {
						mu.Lock()
						defer mu.Unlock()
						return now.conf, "the test", now.err
					}
				}, ours)
				pass(2 * interval)
				c.run(t, g, func(next config) { mu.Lock(); defer mu.Unlock(); now = next }, first, second)
				if got := strings.Join(names(t, first), " "); got != c.first {
					t.Errorf("the first server has ports of %q, want %q", got, c.first)
				}
				if got := strings.Join(names(t, second), " "); got != c.second {
					t.Errorf("the second server has ports of %q, want %q", got, c.second)
				}
				if s := g.State(); !strings.Contains(s.Error, c.wrong) || s.Current != (c.wrong == "") {
					t.Errorf("state %+v, want an error with %q", s, c.wrong)
				}
			})
		})
	}
}

// forbidden is a server that allows nothing.
type forbidden struct{}

func (forbidden) RoundTrip(*http.Request) (*http.Response, error) {
	return refusal(http.StatusForbidden, "no"), nil
}
