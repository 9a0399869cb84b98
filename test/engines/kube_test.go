// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/guest/source/kube"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/cluster"
)

func kubeSource(t testing.TB, o kube.Options) *kube.Source {
	t.Helper()
	o.Logger = logger(t)
	if o.Retry.Grace == 0 { // a server takes its time to come back
		o.Retry.Grace = time.Hour
	}
	s, err := kube.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestKubeScenarios(t *testing.T) {
	c := startCluster(t)
	// Services that existed before the agent are seen; the incumbent misses them.
	c.service("before", "NodePort", nil, svcPort("a", "TCP", 80, 30000))
	src := kubeSource(t, kube.Options{Kubeconfigs: []string{c.Kubeconfig}})
	r, _ := follow(t, src)
	const before = "tcp 0.0.0.0:30000 before"
	want(t, r, before)
	began := r.mark()

	// A scenario leaves nothing to the next, however it ends.
	scenario := func(name string, do func(t *testing.T, c *kubernetes)) {
		t.Run(name, func(t *testing.T) {
			c := c.in(t)
			t.Cleanup(func() {
				c.ready()
				for _, ns := range []string{"default", "other"} {
					c.must("DELETE", "/api/v1/namespaces/"+ns+"/services?labelSelector=app,app+notin+(before)", nil)
				}
				want(t, r, before)
			})
			do(t, c)
		})
	}

	scenario("nothing serves this", func(t *testing.T, c *kubernetes) {
		eventually(t, func() error {
			if b := find(r, "tcp 0.0.0.0:30000"); len(b.Dial) > 0 || !strings.Contains(b.Detail.String(), "nothing serves this") {
				return fmt.Errorf("without endpoints: dialled at %v, detail %q", b.Dial, b.Detail)
			}
			return nil
		})
		c.endpoints("before", "before-pod", "192.168.77.10", obj{"name": "a", "protocol": "TCP", "port": 8080})
		eventually(t, func() error {
			b := find(r, "tcp 0.0.0.0:30000")
			if len(b.Dial) != 3 || b.Dial[1] != netip.MustParseAddrPort("127.0.0.1:30000") ||
				b.Dial[2] != netip.MustParseAddrPort("192.168.77.10:8080") || strings.Contains(b.Detail.String(), "nothing") {
				return fmt.Errorf("with endpoints: dialled at %v, detail %q", b.Dial, b.Detail)
			}
			return nil
		})
		addressOf(t, src.Facts(), netip.MustParseAddr("192.168.77.10"), "before-pod")
	})

	// The incumbent keeps one of the two.
	scenario("53/TCP with 53/UDP", func(t *testing.T, c *kubernetes) {
		c.service("dns", "LoadBalancer", nil, svcPort("t", "TCP", 53, 30053), svcPort("u", "UDP", 53, 30053))
		want(t, r, before, "tcp 0.0.0.0:30053 dns", "udp 0.0.0.0:30053 dns")
		c.ingress("dns", nodeAddr)
		want(t, r, before, "tcp 0.0.0.0:30053 dns", "udp 0.0.0.0:30053 dns",
			"tcp "+nodeAddr+":53 dns", "udp "+nodeAddr+":53 dns")
		c.must("PATCH", cluster.Services+"/dns", obj{"spec": obj{"ports": []obj{svcPort("u", "UDP", 53, 30053)}}})
		want(t, r, before, "udp 0.0.0.0:30053 dns", "udp "+nodeAddr+":53 dns")
		c.must("DELETE", cluster.Services+"/dns", nil)
		want(t, r, before)
	})

	// Adding a port does not affect the others, which the incumbent leaks.
	scenario("ports added and removed", func(t *testing.T, c *kubernetes) {
		c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
		want(t, r, before, "tcp 0.0.0.0:30080 web")
		mark := r.mark()
		c.must("PATCH", cluster.Services+"/web", obj{"spec": obj{"ports": []obj{
			svcPort("a", "TCP", 80, 30080), svcPort("b", "TCP", 443, 30443), svcPort("c", "SCTP", 9, 30009),
		}}})
		want(t, r, before, "tcp 0.0.0.0:30080 web", "tcp 0.0.0.0:30443 web")
		r.warned(t, "9/sctp is not supported")
		if log := r.since(mark); len(log) != 1 {
			t.Errorf("moved %q, want one appearance", log)
		}
		c.must("DELETE", cluster.Services+"/web", nil)
		want(t, r, before)
		r.warned(t, "")
	})

	scenario("type patched", func(t *testing.T, c *kubernetes) {
		c.service("web", "ClusterIP", nil, svcPort("a", "TCP", 80, 0))
		c.must("PATCH", cluster.Services+"/web", obj{"spec": obj{"type": "NodePort", "ports": []obj{svcPort("a", "TCP", 80, 30080)}}})
		want(t, r, before, "tcp 0.0.0.0:30080 web")
		c.must("PATCH", cluster.Services+"/web", obj{"spec": obj{"ports": []obj{svcPort("a", "TCP", 80, 30082)}}})
		want(t, r, before, "tcp 0.0.0.0:30082 web")
		c.must("PATCH", cluster.Services+"/web", obj{"spec": obj{"type": "LoadBalancer"}})
		c.ingress("web", "192.168.77.60")
		want(t, r, before, "tcp 0.0.0.0:30082 web", "tcp 192.168.77.60:80 web")
		c.must("PATCH", cluster.Services+"/web", obj{"spec": obj{"type": "ClusterIP", "ports": []obj{{"name": "a", "protocol": "TCP", "port": 80, "nodePort": nil}}}})
		want(t, r, before)
		c.must("DELETE", cluster.Services+"/web", nil)
	})

	// The incumbent publishes the port on the load balancer's address alone.
	scenario("load balancer and external IPs", func(t *testing.T, c *kubernetes) {
		c.service("lb", "LoadBalancer", obj{"externalIPs": []string{"192.168.77.50"}}, svcPort("a", "TCP", 80, 30081))
		c.ingress("lb", nodeAddr, "192.168.77.60")
		want(t, r, before, "tcp 0.0.0.0:30081 lb", "tcp "+nodeAddr+":80 lb", "tcp 192.168.77.60:80 lb", "tcp 192.168.77.50:80 lb")
		c.ingress("lb", "192.168.77.60")
		want(t, r, before, "tcp 0.0.0.0:30081 lb", "tcp 192.168.77.60:80 lb", "tcp 192.168.77.50:80 lb")
		c.must("PATCH", cluster.Services+"/lb", obj{"spec": obj{"loadBalancerSourceRanges": []string{"10.0.0.0/8"}}})
		eventually(t, func() error {
			if b := find(r, "tcp 192.168.77.60:80"); b.Withheld != port.Because(port.FromSources, "10.0.0.0/8") {
				return fmt.Errorf("withheld: %q", b.Withheld)
			}
			return nil
		})
		c.must("DELETE", cluster.Services+"/lb", nil)
		want(t, r, before)
	})

	scenario("2000 Services", func(t *testing.T, c *kubernetes) {
		keys := []string{before}
		var makers sync.WaitGroup
		const n, at = 2000, 4
		for m := range at {
			makers.Go(func() {
				for i := m; i < n && !t.Failed(); i += at {
					name := fmt.Sprintf("s%d", i)
					if err := errors.Join(
						c.tryService("default", name, "NodePort", nil, svcPort("a", "TCP", 80, 30100+i)),
						c.tryEndpoints(name, name+"-pod", fmt.Sprintf("10.244.%d.%d", i/250, i%250+1), obj{"name": "a", "protocol": "TCP", "port": 8080}),
					); err != nil {
						t.Error(err)
					}
				}
			})
		}
		makers.Wait()
		for i := range n {
			keys = append(keys, fmt.Sprintf("tcp 0.0.0.0:%d s%d", 30100+i, i))
		}
		want(t, r, keys...)
		// An agent that starts now has the same set as one that lost its server.
		r2, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.Kubeconfig}, Selector: "app in (s7, s8)"}))
		want(t, r2, "tcp 0.0.0.0:30107 s7", "tcp 0.0.0.0:30108 s8")
		stop()
		p := startPeers(t, "--source", "socket,nat,kube", "--kubeconfig", c.Kubeconfig)
		p.active(fmt.Sprintf("tcp 0.0.0.0:%d", 30100+n-1))
		p.small("with 2,000 Services")
		mark := r.mark()
		c.api.Stop(syscall.SIGKILL)
		eventually(t, r.dead)
		c.api.run(t)
		c.ready()
		eventually(t, r.live)
		want(t, r, keys...)
		if log := r.since(mark); len(log) > 0 {
			t.Errorf("a restart of the API server moved %d ports, %q first", len(log), log[0])
		}
		eventually(t, func() error {
			if s := p.source("kube"); s.State != "live" {
				return fmt.Errorf("kube is %s: %s", s.State, s.Error)
			}
			return nil
		})
		p.small("after the API server came back")
		c.must("DELETE", cluster.Services+"?labelSelector=app+notin+(before)", nil)
		want(t, r, before)
	})

	scenario("namespaces", func(t *testing.T, c *kubernetes) {
		c.must("POST", "/api/v1/namespaces", obj{"apiVersion": "v1", "kind": "Namespace", "metadata": obj{"name": "other"}})
		c.serviceIn("other", "there", "NodePort", nil, svcPort("", "TCP", 80, 30200))
		want(t, r, before, "tcp 0.0.0.0:30200 there")
		r2, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.Kubeconfig}, Namespaces: []string{"other"}}))
		want(t, r2, "tcp 0.0.0.0:30200 there")
		stop()
		r3, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.Kubeconfig}, Namespaces: []string{"other", "default"}}))
		want(t, r3, "tcp 0.0.0.0:30200 there", before)
		stop()
		c.must("DELETE", "/api/v1/namespaces/other/services/there", nil)
		want(t, r, before)
	})

	// The same source throughout: it must keep no state of a server that is gone.
	scenario("the server killed and started again", func(t *testing.T, c *kubernetes) {
		mark, goroutines := r.mark(), runtime.NumGoroutine()
		for range 3 {
			c.api.Stop(syscall.SIGKILL)
			eventually(t, r.dead)
			c.api.run(t)
			c.ready()
			eventually(t, r.live)
		}
		want(t, r, before)
		if log := r.since(mark); len(log) > 0 {
			t.Errorf("restarts of the API server moved %q", log)
		}
		c.Close()
		flat(t, goroutines)
	})

	if log := r.since(began); slices.Contains(log, "-tcp 0.0.0.0:30000") {
		t.Error("a port that stayed was withdrawn")
	}
}

// The kubeconfig appears later, in a directory that does not exist yet. It names a user
// without permission and is then changed to one with permission.
func TestKubeconfigAppearsAndChanges(t *testing.T) {
	c := startCluster(t)
	c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
	path := filepath.Join(t.TempDir(), "later", "k3s", "k3s.yaml")
	r, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{path}, Retry: engine.Retry{MinDelay: time.Hour, MaxDelay: 2 * time.Hour}}))
	// change replaces the kubeconfig and waits until the source is live, or stale for a
	// reason. By itself the source retries after an hour. If an overloaded server made
	// it fail for another reason, the file is written again.
	change := func(token, reason string) {
		t.Helper()
		var wrote time.Time
		eventually(t, func() error {
			if time.Since(wrote) > 15*time.Second {
				c.writeKubeconfig(path, token)
				wrote = time.Now()
			}
			err := r.live()
			switch {
			case reason == "":
				return err
			case err == nil || !strings.Contains(err.Error(), reason):
				return fmt.Errorf("stale says %v, want %q", err, reason)
			}
			return nil
		})
	}
	want(t, r) // no cluster is no ports, which is not stale
	eventually(t, r.live)
	change("wrong", "Unauthorized")
	change("nobody", `cannot list resource "services"`)
	change("token", "")
	want(t, r, "tcp 0.0.0.0:30080 web")
	mark := r.mark()
	// While the source is live, a broken kubeconfig is refused and a good one is used.
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.service("more", "NodePort", nil, svcPort("a", "TCP", 80, 30081))
	want(t, r, "tcp 0.0.0.0:30080 web", "tcp 0.0.0.0:30081 more")
	change("nobody", `cannot list resource "services"`)
	want(t, r, "tcp 0.0.0.0:30080 web", "tcp 0.0.0.0:30081 more") // stale, not empty
	change("token", "")
	if log := r.since(mark); len(log) != 1 {
		t.Errorf("moved %q, want one appearance", log)
	}
	stop()
}

// An error that keeps the agent from the cluster is shown with its sources and affects
// no other source. Each is fixed by a new kubeconfig.
func TestKubeErrorsAreNamed(t *testing.T) {
	c := startCluster(t)
	c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
	path := filepath.Join(t.TempDir(), "kubeconfig")
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	p := startPeers(t, "--source", "socket,nat,kube", "--kubeconfig", path)
	for _, step := range []struct {
		name  string
		do    func()
		error string
	}{
		{"a kubeconfig that is none", func() {
			if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "kubeconfig " + path},
		{"a token that nobody knows", func() { c.writeKubeconfig(path, "wrong") }, "Unauthorized"},
		{"an expired certificate", func() {
			c.writeKubeconfigFor(path, c.certificate("nobody", time.Now().Add(-time.Minute)))
		}, `the client certificate of "nobody" expired on`},
		{"a user who may not", func() {
			c.writeKubeconfigFor(path, c.certificate("nobody", time.Now().Add(time.Hour)))
		}, `User "nobody" cannot list resource "services"`},
	} {
		t.Run(step.name, func(t *testing.T) {
			p := p.in(t)
			step.do()
			eventually(t, func() error {
				if s := p.source("kube"); s.State != "stale" || !strings.Contains(s.Error, step.error) {
					return fmt.Errorf("kube is %s: %q", s.State, s.Error)
				}
				return nil
			})
			for _, name := range []string{"socket", "nat"} {
				eventually(t, func() error {
					if s := p.source(name); s.State != "live" {
						return fmt.Errorf("%s is %s: %s", name, s.State, s.Error)
					}
					return nil
				})
			}
			p.active("tcp " + l.Addr().String())
		})
	}
	c.writeKubeconfig(path, "token")
	eventually(t, func() error {
		if s := p.source("kube"); s.State != "live" || s.Error != "" {
			return fmt.Errorf("kube is %s: %q", s.State, s.Error)
		}
		return nil
	})
	p.listed("tcp 0.0.0.0:30080")
}

// A user who may only read Services gets their ports and a warning.
func TestKubeWithoutEndpoints(t *testing.T) {
	c := startCluster(t)
	c.must("POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles", obj{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": obj{"name": "r"},
		"rules": []obj{{"apiGroups": []string{""}, "resources": []string{"services"}, "verbs": []string{"list", "watch"}}},
	})
	c.must("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", obj{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": obj{"name": "r"},
		"roleRef":  obj{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "r"},
		"subjects": []obj{{"kind": "User", "name": "nobody", "apiGroup": "rbac.authorization.k8s.io"}},
	})
	c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
	c.writeKubeconfig(c.Kubeconfig, "nobody")
	r, _ := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.Kubeconfig}}))
	want(t, r, "tcp 0.0.0.0:30080 web")
	eventually(t, func() error {
		if b := find(r, "tcp 0.0.0.0:30080"); len(b.Dial) == 0 || strings.Contains(b.Detail.String(), "nothing") {
			return fmt.Errorf("dialled at %v, detail %q: endpoints are not known", b.Dial, b.Detail)
		}
		return nil
	})
	r.warned(t, "endpointslices")
}
