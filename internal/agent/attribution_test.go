// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/source/engine"
	"github.com/fairlead/fairlead/internal/table"
)

// known is a source that only knows owners.
type known struct{ engine.Table }

func (*known) Name() string                             { return "known" }
func (*known) Run(context.Context, registry.Feed) error { return nil }
func (k *known) Facts() engine.Facts                    { return &k.Table }

func newOwners(sources ...*known) (*owners, *registry.Registry) {
	o := new(owners)
	r := registry.New(registry.Options{Rules: allowAll{}, Owners: o, Logger: slog.New(slog.DiscardHandler)})
	for _, s := range sources {
		o.add(s, r)
	}
	return o, r
}

type allowAll struct{}

func (allowAll) Decide(port.Publication) port.Decision { return port.Decision{Allow: true} }

func targets(addrs ...string) (h port.Hints) {
	for _, a := range addrs {
		h.Targets = append(h.Targets, netip.MustParseAddrPort(a))
	}
	return h
}

func fact(id, name, namespace string, addrs ...string) engine.Fact {
	f := engine.Fact{Owner: port.Owner{Kind: port.OwnerContainer, ID: id, Name: name, Namespace: namespace}, ID: id}
	for _, a := range addrs {
		f.Addresses = append(f.Addresses, netip.MustParseAddr(a))
	}
	return f
}

func TestNoOwnerIsNamedByGuess(t *testing.T) {
	docker, containerd, kube := new(known), new(known), new(known)
	o, _ := newOwners(docker, containerd, kube)
	docker.Put("a", fact("a", "web", "", "172.17.0.2"))
	docker.Put("b", fact("b", "db", "", "172.17.0.3"))
	containerd.Put("s", fact("sandbox", "front-1", "shop", "10.42.0.5", "fd42::5"))
	kube.Put("p", fact("shop/front-1", "front-1", "shop", "10.42.0.5"))
	kube.Put("q", fact("shop/front-2", "front-2", "shop", "10.42.0.6"))
	containerd.Put("x", fact("x", "x", "default", "10.9.0.1"))
	kube.Put("y", fact("shop/y", "y", "shop", "10.9.0.1"))
	docker.Put("web", engine.Fact{Owner: port.Owner{Kind: port.OwnerContainer, Name: "web"}, Cgroup: 9, Path: "/docker/web"})
	for _, c := range []struct {
		name  string
		hints port.Hints
		want  string
	}{
		{"nothing to go by", port.Hints{}, ""},
		{"one target", targets("172.17.0.2:80"), "web"},
		{"two ports of one target", targets("172.17.0.2:80", "172.17.0.2:81"), "web"},
		{"two targets", targets("172.17.0.2:80", "172.17.0.3:80"), ""},
		{"a target that is not known", targets("172.17.0.2:80", "172.17.0.9:80"), ""},
		{"only the last target is known", targets("172.17.0.9:80", "172.17.0.2:80"), ""},
		{"a pod that two engines know", targets("10.42.0.5:80"), "front-1"},
		{"both addresses of a pod", targets("10.42.0.5:80", "[fd42::5]:80"), "front-1"},
		{"a mapped address", targets("[::ffff:172.17.0.2]:80"), "web"},
		{"an address that two engines give to two", targets("10.9.0.1:80"), ""},
		{"two pods", targets("10.42.0.5:80", "10.42.0.6:80"), ""},
		{"a cgroup", port.Hints{Cgroup: 9, Paths: []string{"/elsewhere"}}, "web"},
		{"a path below", port.Hints{Cgroup: 10, Paths: []string{"/elsewhere", "/docker/web/x"}}, "web"},
		{"a cgroup that is not known", port.Hints{Cgroup: 10, Paths: []string{"/docker"}}, ""},
	} {
		if got, ok := o.Owner(c.hints); got.Name != c.want || ok != (c.want != "") {
			t.Errorf("%s: owner = %+v, %v, want %q", c.name, got, ok, c.want)
		}
	}
}

func TestFactsOfASourceReachThePortsThatTheyName(t *testing.T) {
	docker := new(known)
	_, r := newOwners(docker)
	feed := r.Feed("socket")
	key := port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}
	feed.Replace([]port.Binding{{Key: key, Origin: port.Origin{ID: "1"}, Hints: port.Hints{Cgroup: 9}}})
	name := func() string {
		p, _ := r.Publications().View().Get(key)
		return p.Owner.Name
	}
	f := fact("a", "web", "")
	f.Cgroup = 9
	docker.Put("a", f)
	if got := name(); got != "web" {
		t.Errorf("owner = %q, want web", got)
	}
	docker.Remove("a")
	if got := name(); got != "" {
		t.Errorf("owner = %q of a container that is gone", got)
	}
}

// A Service without endpoints is published, and shown as what it is.
func TestDeclaredPortThatNothingServesIsShownAsSuch(t *testing.T) {
	p := port.Publication{
		Key:      port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 30080},
		Decision: port.Decision{Allow: true},
	}
	var none table.View[port.Key, reconcile.Outcomes]
	if got := describe(p, none).Reason; got != unserved {
		t.Errorf("reason = %q, want %q", got, unserved)
	}
	p.Dial = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:30080")}
	if got := describe(p, none).Reason; got != "" {
		t.Errorf("reason of a port that is served = %q", got)
	}
	p.Dial, p.Decision = nil, port.Decision{Reason: "no rule allows it"}
	if got := describe(p, none).Reason; got != "no rule allows it" {
		t.Errorf("reason of a port that is denied = %q", got)
	}
}
