// SPDX-License-Identifier: Apache-2.0

package docker

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/api/types/events"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
)

// What /info says of a node.
const (
	managerNode = `"LocalNodeState":"active","ControlAvailable":true`
	workerNode  = `"LocalNodeState":"active","ControlAvailable":false`
	lockedNode  = `"LocalNodeState":"locked","ControlAvailable":false`
)

// fakeSwarm is the swarm of a fake engine.
type fakeSwarm struct {
	node     string            // of /info
	services map[string]string // by id
	sandbox  string            // its address with the length of its network, "" if there is none
	status   int               // of all answers, if not 0
}

func (s *fakeSwarm) answer(path string) (status int, body string) {
	const failed = `{"message":"This node is not a swarm manager."}`
	_, network, isNetwork := strings.Cut(path, "/networks/")
	_, id, one := strings.Cut(path, "/services/")
	switch {
	case s.status != 0:
		return s.status, failed
	case isNetwork && network == sandboxNetwork && s.sandbox != "":
		return 200, fmt.Sprintf(`{"Containers":{"ingress-sbox":{"IPv4Address":%q},"c1":{"IPv4Address":"172.18.0.3/16"}}}`, s.sandbox)
	case isNetwork:
		return 404, `{"message":"network not found"}`
	case s.node != managerNode:
		return 503, failed
	case one && s.services[id] != "":
		return 200, s.services[id]
	case one:
		return 404, `{"message":"service not found"}`
	}
	var all []string
	for _, v := range s.services {
		all = append(all, v)
	}
	return 200, "[" + strings.Join(all, ",") + "]"
}

// service is a service of the stack shop.
func service(id, name string, replicas int, ports string) string {
	return fmt.Sprintf(`{"ID":%q,"Spec":{"Name":"shop_%s","Labels":{"com.docker.stack.namespace":"shop","tier":"front"},`+
		`"Mode":{"Replicated":{"Replicas":%d}}},"Endpoint":{"Ports":[%s]}}`, id, name, replicas, ports)
}

func ingress(proto string, n int) string {
	return fmt.Sprintf(`{"Protocol":%q,"TargetPort":80,"PublishedPort":%d,"PublishMode":"ingress"}`, proto, n)
}

// serve makes the swarm have these services, and tells it by an event about the first.
func (e *fakeEngine) serve(action string, services map[string]string, id string) {
	e.set(func() { e.swarm.services = services })
	e.send(serviceEvent(action, id))
}

func serviceEvent(action, id string) string {
	return fmt.Sprintf(`{"Type":"service","Action":%q,"Actor":{"ID":%q,"Attributes":{"name":"x"}},"scope":"swarm","timeNano":%d}`+"\n",
		action, id, time.Now().UnixNano())
}

func newManager(t *testing.T) *fakeEngine {
	e := newFake(t)
	e.component = "Engine"
	e.swarm = fakeSwarm{node: managerNode, sandbox: "172.18.0.2/16", services: map[string]string{"s1": service("s1", "web", 1, ingress("tcp", 8080))}}
	return e
}

// wildcards are the keys of a port that each node of a swarm opens.
func wildcards(proto string, n int) []string {
	return []string{fmt.Sprintf("%s 0.0.0.0:%d", proto, n), fmt.Sprintf("%s [::]:%d", proto, n)}
}

// A port that a swarm publishes on each node is its service's, and is dialled by IPv4: the
// engine accepts connections by IPv6 and serves none.
func TestServicesOwnIngressPorts(t *testing.T) {
	e := newManager(t)
	e.swarm.services["s1"] = service("s1", "web", 1, ingress("tcp", 8080)+","+ingress("udp", 53)+
		`,{"Protocol":"tcp","TargetPort":80,"PublishedPort":8081,"PublishMode":"host"}`)
	s := source(t, e, Options{})
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f, append(wildcards("tcp", 8080), wildcards("udp", 53)...)...)
	f.Lock()
	for _, b := range f.Set {
		want := port.Owner{Kind: port.OwnerService, ID: "s1", Name: "web", Namespace: "shop", Labels: map[string]string{"com.docker.stack.namespace": "shop", "tier": "front"}}
		if !b.Owner.Equal(want) {
			t.Errorf("%s is owned by %+v, want %+v", b.Key, b.Owner, want)
		}
		if dial := []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), b.Port)}; !slices.Equal(b.Dial, dial) {
			t.Errorf("%s is dialled at %v, want %v", b.Key, b.Dial, dial)
		}
		if d := b.Detail.String(); d != "Swarm service shop_web, ingress" {
			t.Errorf("%s is %q", b.Key, d)
		}
	}
	f.Unlock()
	if o, ok := s.Facts().ByAddress(netip.MustParseAddr("172.18.0.2")); !ok || o.Name != "ingress-sbox" {
		t.Errorf("where the NAT rules lead to is %+v, %v", o, ok)
	}
}

// Events of services move ports as they happen.
func TestServicesChange(t *testing.T) {
	e := newManager(t)
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, wildcards("tcp", 8080)...)
	e.serve("update", map[string]string{"s1": service("s1", "web", 1, ingress("tcp", 8082))}, "s1")
	enginetest.WantKeys(t, f, wildcards("tcp", 8082)...)
	e.serve("update", map[string]string{"s1": service("s1", "web", 0, ingress("tcp", 8082))}, "s1")
	enginetest.Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		for _, b := range f.Set {
			if len(b.Dial) > 0 || !strings.Contains(b.Detail.String(), "scaled to 0") {
				return fmt.Errorf("%s is %q, dialled at %v", b.Key, b.Detail, b.Dial)
			}
		}
		return nil
	})
	e.serve("create", map[string]string{"s1": service("s1", "web", 1, ""), "s2": service("s2", "db", 1, ingress("tcp", 5432))}, "s2")
	enginetest.WantKeys(t, f, append(wildcards("tcp", 5432), wildcards("tcp", 8082)...)...)
	e.serve("remove", map[string]string{}, "s2")
	enginetest.WantKeys(t, f, wildcards("tcp", 8082)...)
}

// A label of a container is not an id because it says so.
func TestLabelsOfOthersNameNoService(t *testing.T) {
	for _, id := range []string{"../containers/json", "s1?x", "S1", strings.Repeat("a", 65), "\u00e4"} {
		m := events.Message{Type: events.ContainerEventType, Action: events.ActionStart, Actor: events.Actor{ID: cid(1), Attributes: map[string]string{labelService: id}}}
		if list := eventsOf(m); len(list) != 1 || list[0].ID != cid(1) {
			t.Errorf("label %q means %+v, want a look at the container alone", id, list)
		}
	}
}

// A node that joins and leaves a swarm says nothing of services; the end of a task does.
func TestNodeLeavesItsSwarm(t *testing.T) {
	for name, node := range map[string]string{"no swarm": "", "worker": workerNode} {
		t.Run(name, func(t *testing.T) {
			e := newManager(t)
			f := enginetest.Run(t, source(t, e, Options{}))
			enginetest.WantKeys(t, f, wildcards("tcp", 8080)...)
			e.set(func() { e.swarm.node, e.swarm.sandbox = node, "" })
			e.send(strings.Replace(event("die", cid(1)), `"name":"x"`, `"com.docker.swarm.service.id":"s1"`, 1))
			enginetest.WantKeys(t, f)
			e.set(func() { e.swarm.node = managerNode })
			e.send(serviceEvent("create", "s1"))
			enginetest.WantKeys(t, f, wildcards("tcp", 8080)...)
		})
	}
}

// While a swarm is locked, or has no leader, what is known of its services stays, and
// containers do not wait.
func TestServicesStayWhileTheSwarmDoesNotTell(t *testing.T) {
	for name, c := range map[string]struct {
		node string
		slow bool
	}{"locked": {node: lockedNode}, "no answer": {node: managerNode, slow: true}} {
		t.Run(name, func(t *testing.T) {
			e := newManager(t)
			f := enginetest.Run(t, source(t, e, Options{Audit: 50 * time.Millisecond}))
			enginetest.WantKeys(t, f, wildcards("tcp", 8080)...)
			gate := make(chan struct{})
			e.set(func() {
				e.swarm.node = c.node
				if c.slow {
					e.slow["/services"], e.slow["/services/s1"] = gate, gate
				}
			})
			e.one(cid(1), "box")
			e.send(serviceEvent("update", "s1"))
			e.send(event("start", cid(1)))
			bindings := func(n int) {
				t.Helper()
				enginetest.Eventually(t, func() error {
					f.Lock()
					defer f.Unlock()
					if len(f.Set) != n {
						return fmt.Errorf("%d bindings, want %d", len(f.Set), n)
					}
					return nil
				})
			}
			bindings(4) // the container publishes the same port
			enginetest.WantNoneRemoved(t, f)
			close(gate)
			e.set(func() { e.swarm.node, e.swarm.services = managerNode, map[string]string{} })
			bindings(2)
		})
	}
}

// A proxy in front of the engine's socket may keep services and networks from us. Containers
// are reported all the same.
func TestServicesMayBeForbidden(t *testing.T) {
	for _, status := range []int{401, 403, 404, 500} {
		e := newManager(t)
		e.swarm.status = status
		e.one(cid(1), "box")
		f := enginetest.Run(t, source(t, e, Options{}))
		enginetest.WantKeys(t, f, wildcards("tcp", 8080)...)
	}
}

// One bad service harms no other.
func TestBadServices(t *testing.T) {
	e := newManager(t)
	e.swarm.services["s2"] = `{"ID":"s2","Spec":5}`
	e.swarm.services["s3"] = service("s3", "sctp", 1, ingress("sctp", 9)+","+ingress("tcp", 70000))
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, wildcards("tcp", 8080)...)
	for _, text := range []string{`service "s2": json`, `service "sctp": port :9->80/sctp: sctp is not supported`, `70000 is no port`} {
		enginetest.WantWarning(t, f, text)
	}
}
