// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// holders name all ports of one user.
type holders struct {
	user   uint32
	owner  port.Owner
	notify func([]port.Slot)
}

func (h *holders) Holder(user uint32, _ port.Key) (port.Owner, bool) {
	return h.owner, user == h.user && h.owner.ID != ""
}
func (h *holders) Notify(f func([]port.Slot)) { h.notify = f }

// A user's engine names what sockets of that user serve, and nothing of root, of another
// user, of a container that another engine names, or of a source that is no socket.
func TestHoldersNameOnlyTheirUsersSockets(t *testing.T) {
	r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler)})
	engine := newFacts(r, "docker")
	h := &holders{user: 1000}
	r.SetHolders(h)
	socket, docker := r.Feed(port.SourceSocket), r.Feed("docker")
	relay := port.Owner{Kind: port.OwnerProcess, Name: "rootlesskit", ID: "7"}
	binding := func(id string, n uint16, user uint32, cgroup uint64) port.Binding {
		return port.Binding{
			Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}, Origin: port.Origin{ID: id},
			Owner: relay, Hints: port.Hints{User: user, Cgroup: cgroup},
		}
	}
	engine.put(AttributionKey{Cgroup: 42}, "of root's engine")
	declared := binding("d", 8004, 0, 0)
	declared.Owner, declared.Hints = port.Owner{Kind: port.OwnerContainer, Name: "declared", ID: "d"}, port.Hints{}
	docker.Replace([]port.Binding{declared})
	socket.Replace([]port.Binding{
		binding("1", 8000, 1000, 0), binding("2", 8001, 0, 0), binding("3", 8002, 1001, 0), binding("4", 8003, 1000, 42), binding("5", 8004, 1000, 0),
	})
	want := func(names ...string) {
		t.Helper()
		for i, name := range names {
			n := uint16(8000 + i)
			p, ok := r.Publications().View().Get(port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n})
			if !ok || p.Owner.Name != name {
				t.Errorf("%d is owned by %+v, want %q", n, p.Owner, name)
			}
		}
	}
	want("rootlesskit", "rootlesskit", "rootlesskit", "of root's engine", "declared")
	all := []port.Slot{{Protocol: port.TCP, Port: 8000}, {Protocol: port.TCP, Port: 8001}, {Protocol: port.TCP, Port: 8002}, {Protocol: port.TCP, Port: 8003}, {Protocol: port.TCP, Port: 8004}, {Protocol: port.UDP, Port: 1}}
	h.owner = port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "w", Held: &port.Held{Engine: "docker", User: "alice"}}
	h.notify(all)
	want("web", "rootlesskit", "rootlesskit", "of root's engine", "declared")
	p, _ := r.Publications().View().Get(port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8000})
	if got := *p.Owner.Held; got != (port.Held{Engine: "docker", User: "alice", Process: "rootlesskit"}) {
		t.Errorf("held by %+v", got)
	}
	h.owner = port.Owner{}
	h.notify(all)
	want("rootlesskit", "rootlesskit", "rootlesskit", "of root's engine", "declared")
}
