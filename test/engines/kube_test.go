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

	"github.com/fairlead/fairlead/internal/source/engine"
	"github.com/fairlead/fairlead/internal/source/kube"
	"github.com/fairlead/fairlead/test/cluster"
)

func kubeSource(t testing.TB, o kube.Options) *kube.Source {
	t.Helper()
	o.Logger = logger(t)
	s, err := kube.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestKubeScenarios(t *testing.T) {
	c := startCluster(t)
	// What was there before the agent is seen; the incumbent misses it.
	c.service("before", "NodePort", nil, svcPort("a", "TCP", 80, 30000))
	src := kubeSource(t, kube.Options{Kubeconfigs: []string{c.Kubeconfig}})
	r, _ := follow(t, src)
	const before = "tcp 0.0.0.0:30000 before"
	want(t, r, before)
	began := r.mark()

	t.Run("nothing serves this", func(t *testing.T) {
		b := find(r, "tcp 0.0.0.0:30000")
		if len(b.Dial) > 0 || !strings.Contains(b.Detail, "nothing serves this") {
			t.Errorf("without endpoints: dialled at %v, detail %q", b.Dial, b.Detail)
		}
		c.endpoints("before", "before-pod", "192.168.77.10", obj{"name": "a", "protocol": "TCP", "port": 8080})
		eventually(t, 10*time.Second, func() error {
			b := find(r, "tcp 0.0.0.0:30000")
			if len(b.Dial) != 3 || b.Dial[1] != netip.MustParseAddrPort("127.0.0.1:30000") ||
				b.Dial[2] != netip.MustParseAddrPort("192.168.77.10:8080") || strings.Contains(b.Detail, "nothing") {
				return fmt.Errorf("with endpoints: dialled at %v, detail %q", b.Dial, b.Detail)
			}
			return nil
		})
		if o, ok := src.Facts().ByAddress(netip.MustParseAddr("192.168.77.10")); !ok || o.Name != "before-pod" {
			t.Errorf("the pod's address is %+v's, %v", o, ok)
		}
	})

	// The incumbent keeps one of the two.
	t.Run("53/TCP with 53/UDP", func(t *testing.T) {
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

	// A port that is added forgets no other: in the incumbent the others leak.
	t.Run("ports added and removed", func(t *testing.T) {
		c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
		want(t, r, before, "tcp 0.0.0.0:30080 web")
		mark := r.mark()
		c.must("PATCH", cluster.Services+"/web", obj{"spec": obj{"ports": []obj{
			svcPort("a", "TCP", 80, 30080), svcPort("b", "TCP", 443, 30443), svcPort("c", "SCTP", 9, 30009),
		}}})
		want(t, r, before, "tcp 0.0.0.0:30080 web", "tcp 0.0.0.0:30443 web")
		eventually(t, 10*time.Second, func() error {
			if w := r.warned(); !slices.ContainsFunc(w, func(s string) bool { return strings.Contains(s, "9/sctp is not supported") }) {
				return fmt.Errorf("warnings are %q", w)
			}
			return nil
		})
		if log := r.since(mark); len(log) != 1 {
			t.Errorf("moved %q, want one appearance", log)
		}
		c.must("DELETE", cluster.Services+"/web", nil)
		want(t, r, before)
		if w := r.warned(); len(w) > 0 {
			t.Errorf("warnings of a Service that is gone: %q", w)
		}
	})

	t.Run("type patched", func(t *testing.T) {
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
	t.Run("load balancer and external IPs", func(t *testing.T) {
		c.service("lb", "LoadBalancer", obj{"externalIPs": []string{"192.168.77.50"}}, svcPort("a", "TCP", 80, 30081))
		c.ingress("lb", nodeAddr, "192.168.77.60")
		want(t, r, before, "tcp 0.0.0.0:30081 lb", "tcp "+nodeAddr+":80 lb", "tcp 192.168.77.60:80 lb", "tcp 192.168.77.50:80 lb")
		c.ingress("lb", "192.168.77.60")
		want(t, r, before, "tcp 0.0.0.0:30081 lb", "tcp 192.168.77.60:80 lb", "tcp 192.168.77.50:80 lb")
		c.must("PATCH", cluster.Services+"/lb", obj{"spec": obj{"loadBalancerSourceRanges": []string{"10.0.0.0/8"}}})
		eventually(t, 10*time.Second, func() error {
			if b := find(r, "tcp 192.168.77.60:80"); b.Withheld != "limited to source 10.0.0.0/8" {
				return fmt.Errorf("withheld: %q", b.Withheld)
			}
			return nil
		})
		c.must("DELETE", cluster.Services+"/lb", nil)
		want(t, r, before)
	})

	t.Run("2000 Services", func(t *testing.T) {
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
		// An agent that starts now, and one whose server is away, say the same.
		r2, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.Kubeconfig}, Selector: "app in (s7, s8)"}))
		want(t, r2, "tcp 0.0.0.0:30107 s7", "tcp 0.0.0.0:30108 s8")
		stop()
		p := startPeers(t, "--source", "socket,nat,kube", "--kubeconfig", c.Kubeconfig)
		p.active(fmt.Sprintf("tcp 0.0.0.0:%d", 30100+n-1))
		p.agent.small(agentKubeMemory, "with 2,000 Services")
		mark := r.mark()
		c.api.stop(syscall.SIGKILL)
		eventually(t, time.Minute, func() error { return not(r.live(), "live") })
		c.api.run()
		c.ready()
		eventually(t, 60*time.Second, r.live)
		want(t, r, keys...)
		if log := r.since(mark); len(log) > 0 {
			t.Errorf("a restart of the API server moved %d ports, %q first", len(log), log[0])
		}
		eventually(t, time.Minute, func() error {
			if s := p.source("kube"); s.State != "live" {
				return fmt.Errorf("kube is %s: %s", s.State, s.Error)
			}
			return nil
		})
		p.agent.small(agentKubeMemory, "after the API server came back")
		c.must("DELETE", cluster.Services+"?labelSelector=app+notin+(before)", nil)
		want(t, r, before)
	})

	t.Run("namespaces", func(t *testing.T) {
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

	// The same source throughout: it must hold nothing of a server that is gone.
	t.Run("the server killed and started again", func(t *testing.T) {
		mark, goroutines := r.mark(), runtime.NumGoroutine()
		for range 3 {
			c.api.stop(syscall.SIGKILL)
			eventually(t, time.Minute, func() error { return not(r.live(), "live") })
			c.api.run()
			c.ready()
			eventually(t, time.Minute, r.live)
		}
		want(t, r, before)
		if log := r.since(mark); len(log) > 0 {
			t.Errorf("restarts of the API server moved %q", log)
		}
		c.Close()
		eventually(t, time.Minute, func() error {
			if n := runtime.NumGoroutine(); n > goroutines+4 {
				return fmt.Errorf("%d goroutines, had %d", n, goroutines)
			}
			return nil
		})
	})

	if log := r.since(began); slices.Contains(log, "-tcp 0.0.0.0:30000") {
		t.Error("a port that stayed was withdrawn")
	}
}

// The kubeconfig appears later, in a directory that is not there yet; points to
// a user who may not; and is changed to one who may.
func TestKubeconfigAppearsAndChanges(t *testing.T) {
	c := startCluster(t)
	c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
	path := filepath.Join(t.TempDir(), "later", "k3s", "k3s.yaml")
	r, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{path}, Retry: engine.Retry{MinDelay: time.Hour, MaxDelay: 2 * time.Hour}}))
	stale := func(text string) {
		t.Helper()
		eventually(t, 30*time.Second, func() error {
			if err := r.live(); err == nil || !strings.Contains(err.Error(), text) {
				return fmt.Errorf("stale says %v, want %q", err, text)
			}
			return nil
		})
	}
	want(t, r) // no cluster is no ports, which is not stale
	eventually(t, 10*time.Second, r.live)
	c.writeKubeconfig(path, "wrong")
	stale("Unauthorized")
	c.writeKubeconfig(path, "nobody")
	stale(`cannot list resource "services"`)
	c.writeKubeconfig(path, "token")
	want(t, r, "tcp 0.0.0.0:30080 web")
	mark := r.mark()
	// While it is live: one that is broken is refused, one that is good is taken.
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.service("more", "NodePort", nil, svcPort("a", "TCP", 80, 30081))
	want(t, r, "tcp 0.0.0.0:30080 web", "tcp 0.0.0.0:30081 more")
	c.writeKubeconfig(path, "nobody")
	stale(`cannot list resource "services"`)
	want(t, r, "tcp 0.0.0.0:30080 web", "tcp 0.0.0.0:30081 more") // stale, not empty
	c.writeKubeconfig(path, "token")
	eventually(t, 30*time.Second, r.live)
	if log := r.since(mark); len(log) != 1 {
		t.Errorf("moved %q, want one appearance", log)
	}
	stop()
}

// What keeps the agent from the cluster is named among its sources, and harms no
// other source. Each is mended by a kubeconfig that replaces the one before.
func TestWhatKeepsTheAgentFromTheClusterIsNamed(t *testing.T) {
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
			step.do()
			eventually(t, time.Minute, func() error {
				if s := p.source("kube"); s.State != "stale" || !strings.Contains(s.Error, step.error) {
					return fmt.Errorf("kube is %s: %q", s.State, s.Error)
				}
				return nil
			})
			for _, name := range []string{"socket", "nat"} {
				eventually(t, time.Minute, func() error {
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
	eventually(t, time.Minute, func() error {
		if s := p.source("kube"); s.State != "live" || s.Error != "" {
			return fmt.Errorf("kube is %s: %q", s.State, s.Error)
		}
		return nil
	})
	p.listed("tcp 0.0.0.0:30080")
}

// Who may read Services and nothing else gets their ports, and a warning.
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
	if b := find(r, "tcp 0.0.0.0:30080"); len(b.Dial) == 0 || strings.Contains(b.Detail, "nothing") {
		t.Errorf("dialled at %v, detail %q: endpoints are not known", b.Dial, b.Detail)
	}
	if w := r.warned(); !slices.ContainsFunc(w, func(s string) bool { return strings.Contains(s, "endpointslices") }) {
		t.Errorf("warnings are %q", w)
	}
}
