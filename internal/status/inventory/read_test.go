// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/status"
)

// objectOf is what an agent of that node wrote at noon.
func objectOf(t *testing.T, node string, r Report) NodeInventory {
	t.Helper()
	o := NodeInventory{TypeMeta: metav1.TypeMeta{APIVersion: Group + "/" + Version, Kind: Kind}, ObjectMeta: metav1.ObjectMeta{Name: node}, Status: built(t, r)}
	o.Status.Holder = Holder{Machine: node, Renewed: metav1.NewTime(noon)}
	return o
}

func TestListOf(t *testing.T) {
	healthy := []Condition{{Type: ConditionReady, True: true}}
	broken := objectOf(t, "d", Report{})
	broken.Status.List = []byte("x")
	ahead := objectOf(t, "c", Report{Ports: []Port{tcp("::", 1, "x")}, Conditions: healthy})
	ahead.Status.Holder.Renewed = metav1.NewTime(noon.Add(time.Hour))
	stale := objectOf(t, "b", Report{Ports: []Port{tcp("::", 2, "x")}, Conditions: []Condition{{Type: ConditionReady, Message: "source nat is stale"}}})
	stale.Status.Holder.Renewed = metav1.NewTime(noon.Add(-time.Hour))
	large := objectOf(t, "a", Report{Ports: []Port{tcp("::", 3, "x")}, Conditions: healthy})
	large.Status.ListOmitted, large.Status.Ports.Total = 5, 6
	l := ListOf([]NodeInventory{broken, ahead, stale, large}, noon)
	var rows []string
	for _, p := range l.Publications {
		rows = append(rows, fmt.Sprintf("%s %v %s", p.Node, p.Key, p.Owner.Name))
	}
	if got, want := strings.Join(rows, ", "), "a tcp [::]:3 x, b tcp [::]:2 x, c tcp [::]:1 x"; got != want {
		t.Errorf("rows %s, want %s", got, want)
	}
	var out strings.Builder
	if err := status.WriteCluster(&out, l, status.Style{Now: noon.Add(time.Minute)}); err != nil {
		t.Fatal(err)
	}
	want := `PORT   ADDRESS  STATE   NODE  OWNER  AGE
3/tcp  ::       active  a     x (7)  60s
2/tcp  ::       active  b     x (7)  60s
1/tcp  ::       active  c     x (7)  60s
node a has 6 ports, of which the list omits 5
node b is stale: last written 60m ago: its agent does not run, cannot reach the API server, or the clocks differ
node b is not Ready: source nat is stale
node c has a clock that is 60m ahead of this one
node d is stale: list: unexpected EOF
`
	if out.String() != want {
		t.Errorf("table:\n%s\nwant:\n%s", out.String(), want)
	}
}

// watched collects events.
type watched struct {
	mu     sync.Mutex
	events []string
}

func (w *watched) add(e status.Event) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := string(e.Type)
	if p := e.Publication; p != nil {
		text += fmt.Sprintf(" %s %d %s", p.Node, p.Port, p.State)
	}
	w.events = append(w.events, text)
	return nil
}

func (w *watched) warn(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, "warning "+err.Error())
}

// take returns the events since the last call.
func (w *watched) take() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer func() { w.events = nil }()
	return strings.Join(w.events, ", ")
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		put := func(node string, ports ...Port) {
			o := objectOf(t, node, Report{Ports: ports})
			a.set(func() { a.put(&o) })
			synctest.Wait()
		}
		broken := func() {
			o := objectOf(t, "broken", Report{Ports: []Port{tcp("0.0.0.0", 7, "x")}})
			o.Status.List = []byte("x")
			a.set(func() { a.put(&o) })
			synctest.Wait()
		}
		broken()
		put("b", tcp("0.0.0.0", 80, "web"))
		put("a", tcp("0.0.0.0", 22, "sshd"), tcp("::1", 631, "cups"))
		conf, _, _ := a.config()
		c, err := NewClient(conf)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		var w watched
		done := make(chan error, 1)
		go func() { done <- c.Watch(ctx, "", w.add, w.warn) }()
		synctest.Wait()
		expect := func(what, want string) {
			t.Helper()
			if got := w.take(); got != want {
				t.Errorf("%s: events %q, want %q", what, got, want)
			}
		}
		expect("at the start", "present a 22 active, present a 631 active, present b 80 active, warning node broken: list: unexpected EOF, synced")
		broken()
		expect("an object that still cannot be read", "")
		put("broken", tcp("0.0.0.0", 7, "x"))
		expect("an object that can be read again", "added broken 7 active")
		broken()
		expect("an object that cannot be read any more", "warning node broken: list: unexpected EOF")
		put("broken", tcp("0.0.0.0", 7, "x"), tcp("0.0.0.0", 8, "x"))
		expect("an object that can be read once more", "added broken 8 active")
		a.removeNode("broken")
		synctest.Wait()
		expect("the end of that node", "removed broken 7 active, removed broken 8 active")
		put("b", tcp("0.0.0.0", 81, "web"), tcp("0.0.0.0", 80, "web"))
		expect("a port more", "added b 81 active")
		put("b", tcp("0.0.0.0", 81, "web"))
		expect("a port less", "removed b 80 active")
		put("c", tcp("0.0.0.0", 1, "x"))
		expect("a node more", "added c 1 active")
		put("c", tcp("0.0.0.0", 1, "x"))
		expect("nothing new", "")
		a.removeNode("c")
		synctest.Wait()
		expect("a node less", "removed c 1 active")
		a.endWatches()
		a.set(func() {
			delete(a.objects, "a")
			o := objectOf(t, "b", Report{Ports: []Port{tcp("0.0.0.0", 81, "other")}})
			a.put(&o)
		})
		pass(time.Second)
		expect("after a watch ended", "changed b 81 active, removed a 22 active, removed a 631 active")
		a.set(func() { a.away = errors.New("away") })
		a.endWatches()
		pass(time.Hour)
		if got := w.take(); !strings.HasPrefix(got, "warning the nodes cannot be followed; retrying: ") || strings.Count(got, "warning") != 1 {
			t.Errorf("while the server is away: events %q, want one warning", got)
		}
		a.set(func() { a.away = nil })
		put("d", tcp("0.0.0.0", 9, "x"))
		pass(10 * time.Second)
		expect("when it is back", "added d 9 active")
		cancel()
		a.endWatches()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Watch: %v", err)
		}
	})
}

// The first failure ends a watch, and says what is missing.
func TestReadersAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(a *api)
		want   error
	}{
		"no CRD":       {func(a *api) { a.served = nil }, ErrNoCRD},
		"may not list": {func(a *api) { a.refuse["list nodeinventories"] = 403 }, ErrForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI()
			c.change(a)
			conf, _, _ := a.config()
			client, err := NewClient(conf)
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := client.List(t.Context(), ""); !errors.Is(err, c.want) {
				t.Errorf("List: %v", err)
			}
			if err := client.Watch(t.Context(), "", func(status.Event) error { return nil }, func(error) {}); !errors.Is(err, c.want) {
				t.Errorf("Watch: %v", err)
			}
		})
	}
}
