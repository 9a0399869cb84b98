// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func targets(addrs ...string) (h port.Hints) {
	for _, a := range addrs {
		h.Targets = append(h.Targets, netip.MustParseAddrPort(a))
	}
	return h
}

func TestOwnerIsNeverGuessed(t *testing.T) {
	r, docker := attributed()
	containerd, kube := newFacts(r, "containerd"), newFacts(r, "kube")
	owns := func(f *facts, id, name, namespace string, addrs ...string) {
		for _, a := range addrs {
			f.own(port.Owner{Kind: port.OwnerContainer, ID: id, Name: name, Namespace: namespace}, AttributionKey{Address: netip.MustParseAddr(a)})
		}
	}
	owns(docker, "a", "web", "", "172.17.0.2")
	owns(docker, "b", "db", "", "172.17.0.3")
	owns(containerd, "sandbox", "front-1", "shop", "10.42.0.5", "fd42::5")
	owns(kube, "shop/front-1", "front-1", "shop", "10.42.0.5")
	owns(kube, "shop/front-2", "front-2", "shop", "10.42.0.6")
	owns(containerd, "x", "x", "default", "10.9.0.1")
	owns(kube, "shop/y", "y", "shop", "10.9.0.1")
	docker.put(AttributionKey{Cgroup: 9}, "web")
	docker.put(AttributionKey{Path: "/docker/web"}, "web")
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
		if got := r.owners.arbiter.owner(c.hints); got.owner.Name != c.want || got.known != (c.want != "") {
			t.Errorf("%s: %+v, want %q", c.name, got, c.want)
		}
	}
}

// A container that asks for something is named only by an engine that is live, and by no
// two that differ.
func TestContainerFailsClosed(t *testing.T) {
	r, docker := attributed()
	feed := r.Feed("docker")
	path := "/system.slice/docker-" + id1 + ".scope"
	want := func(why, name string) {
		t.Helper()
		o, err := r.Container([]string{path + "/inner"})
		if (err == nil) != (name != "") || o.Name != name {
			t.Errorf("%s: %q, %v; want %q", why, o.Name, err, name)
		}
	}
	want("no engine knows it", "")
	docker.put(AttributionKey{Path: id1}, "web")
	feed.Replace(nil)
	want("known", "web")
	feed.Stale(errors.New("gone"))
	want("stale", "")
	feed.Replace(nil)
	want("live again", "web")
	containerd := newFacts(r, "containerd")
	containerd.put(AttributionKey{Path: id1}, "other")
	want("two engines differ", "")
	old := port.Owner{Kind: port.OwnerContainer, ID: id1, Name: "old", Labels: map[string]string{"expose": "yes"}}
	docker.own(old, AttributionKey{Path: id1})
	containerd.own(port.Owner{Kind: port.OwnerContainer, ID: id1, Name: "new"}, AttributionKey{Path: id1})
	feed.Stale(errors.New("gone"))
	want("only the facts of the live engine count", "new")
	if o, _ := r.Container([]string{path}); o.Labels != nil {
		t.Errorf("labels of the stale engine: %v", o.Labels)
	}
	feed.Replace(nil)
	containerd.remove(AttributionKey{Path: id1})
	docker.own(port.Owner{Kind: port.OwnerService, Name: "service"}, AttributionKey{Path: id1})
	want("no container", "")
	if o, err := r.Container(nil); err == nil {
		t.Errorf("a process in no cgroup is in %+v", o)
	}
}
