// SPDX-License-Identifier: Apache-2.0

package docker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moby/moby/api/types/events"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// fakeEngine answers as an engine does, as far as this source asks.
type fakeEngine struct {
	t      *testing.T
	socket string
	stop   func() // the server

	mu      sync.Mutex
	version string        // of the API
	list    func() string // body of the list
	inspect func(id string) (status int, body string)
	listed  int
	streams map[chan string]bool
	// onSubscribe runs when a subscription is in place, before anything is sent.
	onSubscribe func()
	slow        map[string]chan struct{} // paths that answer when the channel is closed
	component   string                   // the name of the engine; "" and it does not tell
	filters     string                   // of the last subscription
	swarm       fakeSwarm
}

func newFake(t *testing.T) *fakeEngine {
	e := &fakeEngine{
		t: t, socket: filepath.Join(t.TempDir(), "d.sock"), version: "1.41",
		list:    func() string { return "[]" },
		inspect: func(string) (int, string) { return 404, `{"message":"No such container"}` },
		streams: make(map[chan string]bool), slow: make(map[string]chan struct{}),
	}
	e.start()
	t.Cleanup(func() { e.stop() })
	return e
}

func (e *fakeEngine) start() {
	// A socket appears when it is bound, before anybody listens; here it appears
	// ready, so that the first try behind it must succeed.
	l, err := net.Listen("unix", e.socket+".new")
	if err != nil {
		e.t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := os.Rename(e.socket+".new", e.socket); err != nil {
		e.t.Fatal(err)
	}
	srv := &http.Server{Handler: e}
	e.stop = enginetest.Serve(func() error { return srv.Serve(l) }, func() { _ = srv.Close() })
}

func (e *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	version := e.version
	var wait chan struct{}
	for suffix, c := range e.slow {
		if strings.HasSuffix(r.URL.Path, suffix) {
			wait = c
		}
	}
	e.mu.Unlock()
	if wait != nil {
		select {
		case <-wait:
		case <-r.Context().Done():
			return
		}
	}
	w.Header().Set("Api-Version", version)
	w.Header().Set("Content-Type", "application/json")
	switch {
	case strings.HasSuffix(r.URL.Path, "/_ping"):
		_, _ = fmt.Fprint(w, "OK")
	case strings.HasSuffix(r.URL.Path, "/info"):
		e.mu.Lock()
		node := e.swarm.node
		e.mu.Unlock()
		_, _ = fmt.Fprintf(w, `{"ServerVersion":"20.10.24","SecurityOptions":["name=seccomp"],"Swarm":{%s}}`, node)
	case strings.Contains(r.URL.Path, "/services"), strings.Contains(r.URL.Path, "/networks/"):
		e.mu.Lock()
		status, body := e.swarm.answer(r.URL.Path)
		e.mu.Unlock()
		w.WriteHeader(status)
		_, _ = fmt.Fprint(w, body)
	case strings.HasSuffix(r.URL.Path, "/version") && e.component != "":
		_, _ = fmt.Fprintf(w, `{"Components":[{"Name":%q}]}`, e.component)
	case strings.HasSuffix(r.URL.Path, "/events"):
		e.serveEvents(w, r)
	case strings.HasSuffix(r.URL.Path, "/containers/json") && strings.Contains(r.URL.Query().Get("filters"), "initialized"):
		http.Error(w, `{"message":"unknown container state: initialized: invalid argument"}`, http.StatusInternalServerError) // as Podman 3 does
	case strings.HasSuffix(r.URL.Path, "/containers/json"):
		e.mu.Lock()
		e.listed++
		list := e.list
		e.mu.Unlock()
		_, _ = fmt.Fprint(w, list())
	case strings.HasSuffix(r.URL.Path, "/json"):
		e.mu.Lock()
		inspect := e.inspect
		e.mu.Unlock()
		parts := strings.Split(r.URL.Path, "/")
		status, body := inspect(parts[len(parts)-2])
		w.WriteHeader(status)
		_, _ = fmt.Fprint(w, body)
	default:
		http.NotFound(w, r)
	}
}

func (e *fakeEngine) serveEvents(w http.ResponseWriter, r *http.Request) {
	c := make(chan string, 100)
	e.mu.Lock()
	e.streams[c] = true
	e.filters = r.URL.Query().Get("filters")
	on := e.onSubscribe
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.streams, c)
		e.mu.Unlock()
	}()
	w.WriteHeader(200)
	w.(http.Flusher).Flush()
	if on != nil {
		on()
	}
	for {
		select {
		case s, ok := <-c:
			if !ok {
				return
			}
			if !wanted(r, s) {
				continue
			}
			_, _ = fmt.Fprint(w, s)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// wanted applies the request's filter by the action's name, as engines do.
func wanted(r *http.Request, text string) bool {
	var filters struct{ Event map[string]bool }
	var e struct{ Action string }
	if json.Unmarshal([]byte(r.URL.Query().Get("filters")), &filters) != nil || json.Unmarshal([]byte(text), &e) != nil {
		return true
	}
	return len(filters.Event) == 0 || filters.Event[e.Action]
}

// send writes text to every stream of events.
func (e *fakeEngine) send(text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for c := range e.streams {
		c <- text
	}
}

// cut ends every stream of events.
func (e *fakeEngine) cut() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for c := range e.streams {
		close(c)
		delete(e.streams, c)
	}
}

func (e *fakeEngine) set(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

func event(action, id string) string {
	return fmt.Sprintf(`{"Type":"container","Action":%q,"Actor":{"ID":%q,"Attributes":{"name":"x"}},"timeNano":%d}`+"\n",
		action, id, time.Now().UnixNano())
}

func cid(n int) string { return fmt.Sprintf("%064x", n) }

// entry is one container of the list, with ports as JSON.
func entry(id, name, ports string) string {
	return fmt.Sprintf(`{"Id":%q,"Names":["/%s"],"Labels":{"a":"b"},"State":"running","Ports":[%s],`+
		`"NetworkSettings":{"Networks":{"bridge":{"IPAddress":"172.17.0.2"}}}}`, id, name, ports)
}

func inspection(id, name, ports string) string {
	return fmt.Sprintf(`{"Id":%q,"Name":"/%s","State":{"Running":true,"Pid":0},"Config":{"Labels":{"a":"b"}},`+
		`"NetworkSettings":{"Ports":{%s},"Networks":{"bridge":{"IPAddress":"172.17.0.2"}}}}`, id, name, ports)
}

func source(t *testing.T, e *fakeEngine, o Options) *Source {
	t.Helper()
	if o.Hosts == nil {
		o.Hosts = []string{"unix://" + e.socket}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Retry.MinDelay = cmp.Or(o.Retry.MinDelay, 5*time.Millisecond)
	o.Retry.MaxDelay = cmp.Or(o.Retry.MaxDelay, 20*time.Millisecond)
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	listed8080    = `{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":8080,"Type":"tcp"},{"IP":"::","PrivatePort":80,"PublicPort":8080,"Type":"tcp"}`
	inspected8080 = `"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"},{"HostIp":"::","HostPort":"8080"}]`
)

// one makes the engine have one container with port 8080.
func (e *fakeEngine) one(id, name string) {
	e.set(func() {
		e.list = func() string { return "[" + entry(id, name, listed8080) + "]" }
		e.inspect = func(got string) (int, string) {
			if got != id {
				return 404, `{"message":"No such container"}`
			}
			return 200, inspection(id, name, inspected8080)
		}
	})
}

func (e *fakeEngine) none() {
	e.set(func() {
		e.list = func() string { return "[]" }
		e.inspect = func(string) (int, string) { return 404, `{"message":"No such container"}` }
	})
}

// Nothing is asked of a container that died: with --rm it is gone. The incumbent
// inspects it first, learns nothing, and leaves its ports open.
func TestDeathNeedsNoInspection(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	e.none()
	e.set(func() { e.slow["/json"] = make(chan struct{}) }) // and nobody answers
	e.send(event("die", cid(1)))
	enginetest.WantKeys(t, f)
}

// The two families of one port stand side by side from the first list on. In the
// incumbent they collide there.
func TestBothFamiliesAreListed(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	f.Lock()
	defer f.Unlock()
	for _, b := range f.Set {
		want := []netip.AddrPort{
			netip.AddrPortFrom(port.Loopback(b.Address), 8080), netip.MustParseAddrPort("172.17.0.2:80"),
		}
		if !slices.Equal(b.Dial, want) {
			t.Errorf("%s is dialled at %v, want %v", b.Key, b.Dial, want)
		}
		if b.Owner.Name != "web" || b.Owner.ID != cid(1) || b.Owner.Labels["a"] != "b" || b.Owner.Kind != port.OwnerContainer {
			t.Errorf("%s is owned by %+v", b.Key, b.Owner)
		}
	}
}

// Podman's Docker API of before 4.4 has words of its own, and filters by them.
func TestEventsOfPodmanAreUnderstood(t *testing.T) {
	for _, gone := range []string{"die", "died", "destroy", "remove"} {
		e := newFake(t)
		e.one(cid(1), "web")
		f := enginetest.Run(t, source(t, e, Options{}))
		enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
		e.send(event("exec_create: sh", cid(1)))
		e.none()
		e.send(event(gone, cid(1)))
		enginetest.WantKeys(t, f)
		e.one(cid(2), "db")
		e.send(event("start", cid(2)))
		enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	}
}

// Docker is asked for the events that matter: the health checks of its containers are
// events as well. Podman understands no such question.
func TestDockerIsAskedForActions(t *testing.T) {
	for component, want := range map[string]bool{"Engine": true, "Podman Engine": false, "": false} {
		e := newFake(t)
		e.component = component
		e.one(cid(1), "web")
		f := enginetest.Run(t, source(t, e, Options{}))
		enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
		e.mu.Lock()
		if got := strings.Contains(e.filters, `"die":true`) && strings.Contains(e.filters, `"connect":true`); got != want || strings.Contains(e.filters, "exec") {
			t.Errorf("%q is asked for %s", component, e.filters)
		}
		e.mu.Unlock()
		e.none()
		e.send(event("die", cid(1)))
		enginetest.WantKeys(t, f)
	}
}

// A container that takes long to inspect is named by the list.
func TestContainerIsNamedBeforeItIsInspected(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	gate := make(chan struct{})
	t.Cleanup(func() { close(gate) })
	e.slow["/containers/"+cid(1)+"/json"] = gate
	s := source(t, e, Options{})
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	o, ok := s.Facts().ByAddress(netip.MustParseAddr("172.17.0.2"))
	if !ok || o.Name != "web" || o.Labels["a"] != "b" {
		t.Errorf("the address is %+v's, %v", o, ok)
	}
}

// podmanInspection is what Podman's own API has of a container.
func podmanInspection(id, name, ports, mode, more string) string {
	return fmt.Sprintf(`{"Id":%q,"Name":%q,"State":{"Running":true,"Paused":false,"Pid":0},"Config":{"Labels":{"of":%q}},`+
		`"HostConfig":{"NetworkMode":%q},"NetworkSettings":{"Ports":{%s},"Networks":{"podman":{"IPAddress":"10.88.0.2","GlobalIPv6Address":""}}}%s}`,
		id, name, name, mode, ports, more)
}

// The ports and the address of a network namespace are its owner's, a pod's or a container's,
// though Podman reports them of each container in it.
func TestSharedNetworkNamespace(t *testing.T) {
	owner, member, other := cid(1), cid(2), cid(3)
	mode := "container:" + owner
	const listed = `{"IP":"","PrivatePort":80,"PublicPort":8080,"Type":"tcp"}`
	const inspected = `"80/tcp":[{"HostIp":"","HostPort":"8080"}]`
	shop := map[string]string{
		owner:  podmanInspection(owner, "b6e4e6405f87-infra", inspected, "bridge", `,"Pod":"p1","IsInfra":true`),
		member: podmanInspection(member, "shop-web", inspected, mode, `,"Pod":"p1","IsInfra":false`),
		other:  podmanInspection(other, "shop-api", inspected, mode, `,"Pod":"p1","IsInfra":false`),
		"p1":   `{"Id":"p1","Name":"shop","Labels":{"app":"shop"},"InfraContainerID":"` + owner + `"}`,
	}
	base := map[string]string{
		owner:  podmanInspection(owner, "base", inspected, "bridge", ""),
		member: podmanInspection(member, "side", inspected, mode, ""),
	}
	paused := map[string]string{
		owner: strings.Replace(base[owner], `"Running":true,"Paused":false`, `"Running":false,"Paused":true`, 1), member: base[member],
	}
	docker := map[string]string{
		owner:  inspection(owner, "base", inspected),
		member: podmanInspection(member, "/side", "", mode, ""),
	}
	for _, c := range []struct {
		name, component string
		containers      map[string]string
		owner           string
		address         string
		labels          map[string]string
	}{
		{"pod", "Podman Engine", shop, "shop", "10.88.0.2", map[string]string{"of": "b6e4e6405f87-infra", "app": "shop"}},
		{"container", "Podman Engine", base, "base", "10.88.0.2", map[string]string{"of": "base"}},
		{"paused", "Podman Engine", paused, "base", "10.88.0.2", map[string]string{"of": "base"}},
		{"container of Docker", "Engine", docker, "base", "172.17.0.2", map[string]string{"a": "b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newFake(t)
			e.component = c.component
			inspect := func(id string) (int, string) {
				if body, ok := c.containers[id]; ok {
					return 200, body
				}
				return 404, `{"message":"No such container"}`
			}
			e.set(func() {
				e.inspect = inspect
				e.list = func() string {
					var entries []string
					for _, id := range []string{member, owner, other} {
						ports := listed
						if c.component == "Engine" && id != owner {
							ports = ""
						}
						if _, ok := c.containers[id]; ok {
							entries = append(entries, entry(id, "name", ports))
						}
					}
					return "[" + strings.Join(entries, ",") + "]"
				}
			})
			s := source(t, e, Options{})
			f := enginetest.Run(t, s)
			check := func() {
				t.Helper()
				enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080")
				enginetest.Eventually(t, func() error {
					f.Lock()
					defer f.Unlock()
					for _, b := range f.Set {
						if b.Owner.Name != c.owner || b.Owner.ID != owner || !maps.Equal(b.Owner.Labels, c.labels) || len(f.Set) != 1 {
							return fmt.Errorf("%d ports, one of %+v", len(f.Set), b.Owner)
						}
					}
					if o, ok := s.Facts().ByAddress(netip.MustParseAddr(c.address)); !ok || o.Name != c.owner {
						return fmt.Errorf("the address is %+v's, %v", o, ok)
					}
					return nil
				})
			}
			check()
			for id := range c.containers {
				e.send(event("start", id))
			}
			check()
			if removed := f.Removed(); len(removed) > 0 {
				t.Errorf("%v was removed", removed)
			}
		})
	}
}

// What a list says of a container of Podman opens nothing: it may be another one's port. The
// port of one that is known stays while Podman does not tell.
func TestPodmanIsBelievedOfInspectionsOnly(t *testing.T) {
	e := newFake(t)
	e.component = "Podman Engine"
	e.one(cid(1), "web")
	inspect := e.inspect
	broken := func(string) (int, string) { return 500, `{"message":"locked"}` }
	e.set(func() { e.inspect = broken })
	f := enginetest.Run(t, source(t, e, Options{Audit: 50 * time.Millisecond}))
	enginetest.WantWarning(t, f, "locked")
	enginetest.WantKeys(t, f)
	e.set(func() { e.inspect = inspect })
	e.send(event("start", cid(1)))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	e.set(func() { e.inspect = broken })
	enginetest.WantWarning(t, f, "locked")
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	// Before it is a proxy that knows Docker's API alone.
	e.set(func() { e.inspect = func(string) (int, string) { return 404, `{"message":"page not found"}` } })
	enginetest.WantWarning(t, f, "page not found")
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	e.set(func() {
		e.inspect = func(string) (int, string) {
			return 404, `{"cause":"no such container","message":"no container with that ID","response":404}`
		}
	})
	e.send(event("start", cid(1)))
	enginetest.WantKeys(t, f)
}

// An engine's health checks are no reason to look at a container.
func TestEventsThatChangeNoPortAreIgnored(t *testing.T) {
	for _, action := range []string{"exec_create: sh -c x", "exec_start: sh", "exec_die", "health_status: healthy", "top", "attach", "resize", "create", "init", ""} {
		if list := eventsOf(events.Message{Type: events.ContainerEventType, Action: events.Action(action), Actor: events.Actor{ID: "x"}}); len(list) > 0 {
			t.Errorf("%q means %+v, want nothing", action, list)
		}
	}
	for _, action := range []string{"start", "restart", "pause", "unpause", "rename", "update", "cleanup"} {
		list := eventsOf(events.Message{Type: events.ContainerEventType, Action: events.Action(action), Actor: events.Actor{ID: "x"}})
		if len(list) != 1 || list[0].Gone {
			t.Errorf("%q means %+v, want a look", action, list)
		}
	}
}

// What happens between the subscription and the list is not lost. The incumbent
// lists first and subscribes later.
func TestNoEventLostBetweenSubscriptionAndList(t *testing.T) {
	for _, during := range []string{"before the list", "while the list is read"} {
		t.Run(during, func(t *testing.T) {
			e := newFake(t)
			e.one(cid(1), "web")
			gone := func() {
				e.none()
				e.send(event("die", cid(1)))
			}
			if during == "before the list" {
				e.onSubscribe = gone
			} else {
				var once sync.Once
				e.set(func() {
					e.list = func() string {
						once.Do(gone)
						return "[" + entry(cid(1), "web", listed8080) + "]" // old news
					}
				})
			}
			f := enginetest.Run(t, source(t, e, Options{}))
			enginetest.Eventually(t, func() error {
				f.Lock()
				defer f.Unlock()
				if f.Replaced == 0 {
					return errors.New("nothing was listed")
				}
				return nil
			})
			enginetest.WantKeys(t, f)
		})
	}
}

// Every port of a container goes with it. The incumbent remembers one of them.
func TestAllPortsOfAContainerAreWithdrawn(t *testing.T) {
	e := newFake(t)
	e.set(func() {
		e.inspect = func(id string) (int, string) {
			return 200, inspection(id, "many", inspected8080+`,"53/udp":[{"HostIp":"127.0.0.1","HostPort":"53"}],"53/tcp":[{"HostIp":"127.0.0.1","HostPort":"53"}],"9/tcp":null`)
		}
	})
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f)
	enginetest.Eventually(t, func() error {
		e.send(event("start", cid(1)))
		time.Sleep(10 * time.Millisecond)
		return enginetest.ErrIf(len(f.Keys()) == 0)
	})
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080", "tcp 127.0.0.1:53", "udp 127.0.0.1:53")
	e.none()
	e.send(event("die", cid(1)))
	enginetest.WantKeys(t, f)
}

// A death that is older than the list is history: the container runs again.
func TestOldDeathIsIgnored(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	old := event("die", cid(1))
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	e.send(old)
	e.send(event("rename", cid(2))) // an event behind it that can be waited for
	e.set(func() {
		inspect := e.inspect
		e.inspect = func(id string) (int, string) {
			if id == cid(2) {
				return 200, inspection(id, "two", `"1/tcp":[{"HostIp":"","HostPort":"1"}]`)
			}
			return inspect(id)
		}
	})
	e.send(event("rename", cid(2)))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080", "tcp 0.0.0.0:1")
	enginetest.WantNoneRemoved(t, f)
}

// What cannot be published is named, and harms nobody else.
func TestMalformed(t *testing.T) {
	for _, c := range []struct{ name, ports, warning string }{
		{"port 0", `{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":0,"Type":"tcp"}`, "0 is no port"},
		{"port 70000", `{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":70000,"Type":"tcp"}`, "70000 is no port"},
		{"a port that is text", `{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":"http","Type":"tcp"}`, "PublicPort"},
		{"no address", `{"IP":"nowhere","PrivatePort":80,"PublicPort":81,"Type":"tcp"}`, `"nowhere" is no address`},
		{"sctp", `{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":81,"Type":"sctp"}`, "sctp is not supported"},
		{"unknown protocol", `{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":81,"Type":"dccp"}`, "dccp"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newFake(t)
			e.set(func() {
				e.list = func() string {
					return "[" + entry(cid(2), "bad", c.ports) + "," + entry(cid(1), "web", listed8080) + "]"
				}
				e.inspect = func(id string) (int, string) {
					if id == cid(1) {
						return 200, inspection(id, "web", inspected8080)
					}
					return 500, `{"message":"cannot"}`
				}
			})
			f := enginetest.Run(t, source(t, e, Options{}))
			enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
			enginetest.WantWarning(t, f, c.warning)
			enginetest.WantWarning(t, f, `"bad"`)
			if f.Lock(); f.Err != nil {
				t.Errorf("stale: %v", f.Err)
			}
			f.Unlock()
		})
	}
}

func TestMalformedInspection(t *testing.T) {
	e := newFake(t)
	e.set(func() {
		e.list = func() string { return "[" + entry(cid(1), "web", listed8080) + "]" }
		e.inspect = func(id string) (int, string) {
			return 200, inspection(id, "web", inspected8080+`,"81/tcp":[{"HostIp":"","HostPort":"70000"},{"HostIp":"","HostPort":"x"}]`)
		}
	})
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantWarning(t, f, "70000 is no port")
	enginetest.WantWarning(t, f, `"x" is no port`)
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
}

// An inspection that hangs, or is of another container, leaves what the list says.
func TestFailedInspectionFallsBackToTheList(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	e.slow["/"+cid(1)+"/json"] = make(chan struct{})
	f := enginetest.Run(t, source(t, e, Options{Timeout: 50 * time.Millisecond}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	enginetest.WantWarning(t, f, "no answer within 50ms")
}

// What an engine says wrongly as a whole is named, and nothing is taken back.
func TestUnusableEngine(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(e *fakeEngine)
		text string
	}{
		{"API too old", func(e *fakeEngine) { e.version = "1.20" }, "1.20"},
		{"no API version", func(e *fakeEngine) { e.version = "no version" }, "agree on an API version"},
		{"slow ping", func(e *fakeEngine) { e.slow["/_ping"] = make(chan struct{}) }, "agree on an API version: no answer within 50ms"},
		{"slow list", func(e *fakeEngine) { e.slow["/containers/json"] = make(chan struct{}) }, "list containers: no answer within 50ms"},
		{"slow events", func(e *fakeEngine) { e.slow["/events"] = make(chan struct{}) }, "subscribe to events: no answer within 50ms"},
		{"list is no list", func(e *fakeEngine) { e.list = func() string { return `{"message":"x"}` } }, "list containers"},
		{"entry without id", func(e *fakeEngine) { e.list = func() string { return `[{}]` } }, "no id"},
		{"half a list", func(e *fakeEngine) { e.list = func() string { return `[{"Id":"` } }, "list containers"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newFake(t)
			e.set(func() { c.make(e) })
			f := enginetest.Run(t, source(t, e, Options{Timeout: 50 * time.Millisecond}))
			enginetest.WantStale(t, f, c.text)
			enginetest.WantStale(t, f, e.socket)
			f.Lock()
			defer f.Unlock()
			if f.Replaced > 0 {
				t.Error("an engine that cannot be used stated a set")
			}
		})
	}
}

// A newer engine is asked in words that both know.
func TestNewerAPI(t *testing.T) {
	e := newFake(t)
	e.version = "1.99"
	e.one(cid(1), "web")
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
}

// A stream that ends, or ends in the middle, makes the source stale, not empty;
// it comes back by itself.
func TestStreamEnds(t *testing.T) {
	for _, last := range []string{"", `{"Type":"container","Act`, "not json\n"} {
		t.Run("after "+last, func(t *testing.T) {
			e := newFake(t)
			e.one(cid(1), "web")
			f := enginetest.Run(t, source(t, e, Options{}))
			enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
			if last != "" {
				e.send(last)
			}
			e.cut()
			enginetest.Eventually(t, func() error {
				f.Lock()
				defer f.Unlock()
				return enginetest.ErrIf(f.Replaced < 2 || f.Stales == 0 || f.Err != nil)
			})
			enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
			enginetest.WantNoneRemoved(t, f)
		})
	}
}

// Ports of an engine that stays away are withdrawn after the grace period, and
// the facts with them.
func TestGrace(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	s := source(t, e, Options{Retry: engine.Retry{Grace: 150 * time.Millisecond}})
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	enginetest.Eventually(t, func() error {
		_, ok := s.Facts().ByAddress(netip.MustParseAddr("172.17.0.2"))
		return enginetest.ErrIf(!ok)
	})
	e.stop()
	enginetest.WantKeys(t, f)
	enginetest.WantStale(t, f, "declared ports withdrawn after 150ms")
	if _, ok := s.Facts().ByAddress(netip.MustParseAddr("172.17.0.2")); ok {
		t.Error("a fact outlived the grace period")
	}
	e.start()
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
}

// The engine's socket appears, in a directory that was not there: it is found at
// once, not at the next try.
func TestEngineAppears(t *testing.T) {
	e := newFake(t)
	e.stop()
	e.socket = filepath.Join(t.TempDir(), "later", "run", "d.sock")
	s := source(t, e, Options{Retry: engine.Retry{MinDelay: time.Hour, MaxDelay: 2 * time.Hour}})
	f := enginetest.Run(t, s)
	// No engine is no ports, which is not stale.
	enginetest.Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		return enginetest.ErrIf(f.Replaced != 1 || f.Err != nil || !strings.Contains(f.MethodName, "no such file"))
	})
	if err := os.MkdirAll(filepath.Dir(e.socket), 0o755); err != nil {
		t.Fatal(err)
	}
	e.one(cid(1), "web")
	e.start()
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
}

// A hundred restarts leave no goroutine and no connection behind.
func TestHundredRestarts(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	f := enginetest.Run(t, source(t, e, Options{Retry: engine.Retry{MinDelay: time.Millisecond, MaxDelay: 2 * time.Millisecond}}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	enginetest.Restarts(t, func() {
		sets := f.Sets()
		e.stop()
		e.start()
		enginetest.Eventually(t, func() error { return enginetest.ErrIf(f.Sets() <= sets) })
	})
	enginetest.WantNoneRemoved(t, f)
}

// Podman's service is left alone while no container runs, so that systemd can stop it. A
// sign of a container has it asked again, and so has somebody who wants one by its name, until
// nobody does.
func TestPodmanRests(t *testing.T) {
	e := newFake(t)
	e.component = "Podman Engine"
	signs := schedule.NewSignal()
	s := source(t, e, Options{Kind: Podman, Signs: signs, Rest: 20 * time.Millisecond})
	f := enginetest.Run(t, s)
	asleep := func(want bool) {
		t.Helper()
		enginetest.Eventually(t, func() error {
			f.Lock()
			defer f.Unlock()
			if got := strings.Contains(f.MethodName, "asleep"); got != want || f.Err != nil || !strings.HasPrefix(f.MethodName, "podman 20") {
				return fmt.Errorf("%q, stale: %v", f.MethodName, f.Err)
			}
			return nil
		})
	}
	asleep(true)
	enginetest.Eventually(t, func() error {
		e.mu.Lock()
		defer e.mu.Unlock()
		return enginetest.ErrIf(len(e.streams) > 0) // nobody is connected
	})
	e.one(cid(1), "web")
	signs.Notify()
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
	asleep(false)
	e.none()
	e.send(event("died", cid(1)))
	enginetest.WantKeys(t, f)
	asleep(true)
	s.Need(true)
	asleep(false)
	s.Need(false)
	asleep(true)
}

// counting counts connections.
type counting struct {
	engine.Path

	dials *atomic.Int32
}

func (c counting) Dial(ctx context.Context, connect engine.Connect) (net.Conn, error) {
	c.dials.Add(1)
	return c.Path.Dial(ctx, connect)
}

// A service that sleeps from the beginning is not started before there is a sign.
func TestAsleepFromTheBeginning(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	signs, dials := schedule.NewSignal(), new(atomic.Int32)
	f := enginetest.Run(t, source(t, e, Options{Kind: Podman, Signs: signs, Asleep: true, Access: counting{engine.Path(e.socket), dials}}))
	enginetest.Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		return enginetest.ErrIf(f.Replaced == 0 || f.MethodName != "podman"+asleep)
	})
	if n := dials.Load(); n > 0 {
		t.Errorf("%d connections before there was a sign", n)
	}
	signs.Notify()
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080")
}

// A socket that another source follows is absent, under any name.
func TestSocketOfAnotherSource(t *testing.T) {
	e := newFake(t)
	e.one(cid(1), "web")
	link := filepath.Join(t.TempDir(), "docker.sock")
	if err := os.Symlink(e.socket, link); err != nil {
		t.Fatal(err)
	}
	f := enginetest.Run(t, source(t, e, Options{Hosts: []string{"unix://" + link}, Others: []string{e.socket}}))
	enginetest.Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		return enginetest.ErrIf(f.Replaced != 1 || f.Err != nil || !strings.Contains(f.MethodName, "another source follows"))
	})
	enginetest.WantKeys(t, f)
}

// Docker's containers are not reported as Podman's.
func TestDockerIsNotPodman(t *testing.T) {
	e := newFake(t)
	e.component = "Engine"
	e.one(cid(1), "web")
	f := enginetest.Run(t, source(t, e, Options{Kind: Podman}))
	enginetest.Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		return enginetest.ErrIf(f.Err == nil || !strings.Contains(f.Err.Error(), "docker.hosts") || len(f.Set) > 0)
	})
}

func TestOptions(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for _, c := range []struct {
		name string
		o    Options
		want string
	}{
		{"elsewhere", Options{Hosts: []string{"tcp://10.1.2.3:2375"}, Logger: log}, "another machine"},
		{"ssh", Options{Hosts: []string{"ssh://me@there"}, Logger: log}, "want unix:///path"},
		{"relative", Options{Hosts: []string{"unix://x/y"}, Logger: log}, "absolute path"},
		{"no logger", Options{}, "logger"},
		{"timeout", Options{Timeout: -1, Logger: log}, "timeout"},
		{"delays", Options{Logger: log, Retry: engine.Retry{MinDelay: 2, MaxDelay: 1}}, "delays"},
	} {
		if _, err := New(c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: New = %v, want %q", c.name, err, c.want)
		}
	}
	env := map[string]string{"DOCKER_HOST": "tcp://127.0.0.1:2376", "DOCKER_CERT_PATH": "/c"}
	s, err := New(Options{Logger: log, Getenv: func(k string) string { return env[k] }})
	if err != nil || !slices.Equal(s.o.Hosts, []string{env["DOCKER_HOST"]}) || s.o.CertPath != "/c" {
		t.Errorf("New = %+v, %v; want the environment's host", s, err)
	}
	env = map[string]string{"XDG_RUNTIME_DIR": "/run/user/7"}
	s, err = New(Options{Logger: log, Getenv: func(k string) string { return env[k] }})
	if want := []string{"unix:///var/run/docker.sock", "unix:///run/user/7/docker.sock"}; err != nil || !slices.Equal(s.o.Hosts, want) {
		t.Errorf("New = %+v, %v; want %q", s, err, want)
	}
}

// An expired client certificate is named before it is tried.
func TestExpiredCertificate(t *testing.T) {
	dir := t.TempDir()
	cert, key := enginetest.ExpiredCertificate(t)
	for name, b := range map[string][]byte{"cert.pem": cert, "ca.pem": cert, "key.pem": key} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := enginetest.Run(t, source(t, nil, Options{Hosts: []string{"tcp://127.0.0.1:1"}, CertPath: dir}))
	enginetest.WantStale(t, f, "expired on")
}

func TestNameOf(t *testing.T) {
	for _, c := range []struct {
		names []string
		want  string
	}{
		{[]string{"/other/alias", "/web"}, "web"},
		{[]string{"/other/alias"}, cid(1)[:12]},
		{nil, cid(1)[:12]},
	} {
		if got := nameOf(c.names, cid(1)); got != c.want {
			t.Errorf("nameOf(%q) = %q, want %q", c.names, got, c.want)
		}
	}
}

func FuzzDecodeList(f *testing.F) {
	f.Add([]byte("[" + entry(cid(1), "web", listed8080) + "]"))
	f.Add([]byte(`[{"Id":1},null,{}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := decodeList(b)
		if err != nil {
			return
		}
		for _, l := range all {
			if l.ID == "" && l.err == nil {
				t.Fatal("an entry without an id and without an error")
			}
			for _, b := range (fetcher{}).summarised(l).Bindings {
				if b.Port == 0 || !b.Address.IsValid() || b.Address.Is4In6() {
					t.Fatalf("a binding that cannot be: %+v", b)
				}
			}
		}
	})
}

func FuzzInspect(f *testing.F) {
	f.Add([]byte(inspection(cid(1), "web", inspected8080)))
	f.Add([]byte(inspection(cid(1), "", `"x/tcp":[{"HostPort":"70000"}],"53/udp":[{"HostIp":"127.0.0.1","HostPort":"53"}],"9/tcp":null`)))
	f.Fuzz(func(t *testing.T, b []byte) {
		var d details
		if json.Unmarshal(b, &d) != nil {
			return
		}
		for _, b := range (fetcher{}).inspected(d).Bindings {
			if b.Port == 0 || !b.Address.IsValid() || b.Address.Is4In6() {
				t.Fatalf("a binding that cannot be: %+v", b)
			}
		}
	})
}

func FuzzEvent(f *testing.F) {
	f.Add([]byte(`{"Type":"container","Action":"start","Actor":{"ID":"c1","Attributes":{"name":"web"}},"timeNano":1700000000000000000}`))
	f.Add([]byte(`{"Type":"container","Action":"died","Actor":{"ID":"c1"}}`))
	f.Add([]byte(`{"Type":"service","Action":"update","Actor":{"ID":"s1","Attributes":{"name":"web"}},"scope":"swarm"}`))
	f.Add([]byte(`{"Type":"network","Action":"connect","Actor":{"ID":"n1","Attributes":{"container":"c1"}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m events.Message
		if json.Unmarshal(b, &m) != nil {
			return
		}
		for _, ev := range eventsOf(m) {
			service, is := strings.CutPrefix(ev.ID, servicePrefix)
			if ev.ID == "" || is && m.Type == events.ServiceEventType && !isServiceID(service) {
				t.Errorf("%+v is of nobody", m)
			}
		}
	})
}

func FuzzServices(f *testing.F) {
	f.Add([]byte("[" + service("s1", "web", 1, `{"Protocol":"tcp","TargetPort":80,"PublishedPort":8080,"PublishMode":"ingress"}`) + "]"))
	f.Add([]byte(`[{"ID":"s1","Endpoint":{"Ports":[{"Protocol":"sctp","PublishedPort":70000}]}},{"ID":"s2","Spec":5},{}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		objects, err := decodeServices(b)
		if err != nil && len(objects) > 0 {
			t.Fatalf("%d objects and %v", len(objects), err)
		}
		for _, o := range objects {
			if !isServiceID(strings.TrimPrefix(o.ID, servicePrefix)) {
				t.Fatalf("a service without an id: %+v", o)
			}
			for _, b := range o.Bindings {
				if b.Port == 0 || !b.Address.IsUnspecified() || b.Owner.Kind != port.OwnerService || b.Owner.Name == "" {
					t.Fatalf("a binding that cannot be: %+v", b)
				}
			}
		}
	})
}

func TestRefusedAddresses(t *testing.T) {
	enginetest.RefusedAddresses(t, hanging(t), engine.ErrAbsent, engine.ErrRefused, connectError(t))
}

func TestConnectionIsTraced(t *testing.T) {
	enginetest.ConnectionIsTraced(t, hanging(t), connectError(t))
}

// hanging returns the socket of an engine that does not answer.
func hanging(t *testing.T) string {
	e := newFake(t)
	e.set(func() { e.slow = map[string]chan struct{}{"/_ping": make(chan struct{})} })
	return e.socket
}

// connectError returns a function that returns why no engine at sockets answers.
func connectError(t *testing.T) func(ctx context.Context, paths ...string) error {
	return func(ctx context.Context, paths ...string) error {
		var hosts []string
		for _, p := range paths {
			hosts = append(hosts, "unix://"+p)
		}
		_, _, err := source(t, nil, Options{Hosts: hosts, Timeout: 50 * time.Millisecond}).connect(ctx)
		return err
	}
}

// What does not run may be starting. Each engine has other words for it, and refuses those that it
// does not know.
func TestStarting(t *testing.T) {
	e := newFake(t)
	e.list = func() string {
		var all []string
		for _, state := range []string{"running", "paused", "created", "exited", "configured", "initialized", "stopped"} {
			all = append(all, fmt.Sprintf(`{"Id":%q,"State":%q}`, "of-"+state, state))
		}
		return "[" + strings.Join(append(all, `{"Id":"of-many-ports","Ports":7}`), ",") + "]"
	}
	c, err := source(t, e, Options{}).dial(t.Context(), "unix://"+e.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	want := []string{"of-created", "of-exited", "of-configured", "of-initialized", "of-stopped", "of-many-ports"}
	for _, podman := range []bool{false, true} {
		if ids, err := (fetcher{c: c, podman: podman}).Starting(t.Context()); err != nil || !slices.Equal(ids, want) {
			t.Errorf("podman %v: %q, %v, want %q", podman, ids, err, want)
		}
	}
	e.list = func() string { return `[{"State":"exited"}]` }
	if ids, err := (fetcher{c: c}).Starting(t.Context()); err == nil {
		t.Errorf("%q of an entry without an id", ids)
	}
}
