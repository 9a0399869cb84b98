// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/engine"
	"github.com/fairlead/fairlead/internal/source/kube"
)

// cluster is an API server with its etcd.
type cluster struct {
	t          testing.TB
	dir        string
	etcd, api  *daemon
	kubeconfig string
	client     *http.Client
}

const apiURL = "https://127.0.0.1:6443"

// startCluster starts etcd and kube-apiserver and waits until they answer. The
// token "token" may do everything, "nobody" nothing.
func startCluster(t testing.TB, flags ...string) *cluster {
	t.Helper()
	dir := t.TempDir()
	c := &cluster{t: t, dir: dir, kubeconfig: filepath.Join(dir, "kubeconfig"), client: &http.Client{
		Timeout:   20 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, //nolint:gosec // a server of our own
	}}
	t.Cleanup(c.client.CloseIdleConnections)
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	pub, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{
		"sa.key":     pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}),
		"sa.pub":     pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: pub}),
		"tokens.csv": []byte("token,admin,1,system:masters\nnobody,nobody,2\n"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c.writeKubeconfig(c.kubeconfig, "token")
	c.etcd = start(t, "etcd", "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380")
	c.api = start(t, cacheBin("kube-apiserver"), append([]string{
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--bind-address=0.0.0.0",
		"--advertise-address=" + nodeAddr, "--cert-dir=" + filepath.Join(dir, "certs"),
		"--service-cluster-ip-range=10.96.0.0/16", "--token-auth-file=" + filepath.Join(dir, "tokens.csv"),
		"--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + filepath.Join(dir, "sa.pub"),
		"--service-account-signing-key-file=" + filepath.Join(dir, "sa.key"),
		"--disable-admission-plugins=ServiceAccount,StorageObjectInUseProtection", "--endpoint-reconciler-type=none",
	}, flags...)...)
	c.ready()
	return c
}

func (c *cluster) ready() {
	c.t.Helper()
	eventually(c.t, 90*time.Second, func() error {
		b, err := c.do("GET", "/readyz", nil)
		if err == nil && string(b) != "ok" {
			err = fmt.Errorf("readyz says %q", b)
		}
		return err
	})
	eventually(c.t, 30*time.Second, func() error { _, err := c.do("GET", "/api/v1/namespaces/default", nil); return err })
}

func (c *cluster) writeKubeconfig(path, token string) {
	c.t.Helper()
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %q}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, apiURL, token)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
		c.t.Fatal(err)
	}
}

// do asks the API server; body is JSON, or a merge patch.
func (c *cluster) do(method, path string, body any) ([]byte, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(context.Background(), method, apiURL+path, r)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer token")
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, tail(b, 500))
	}
	return b, err
}

func (c *cluster) must(method, path string, body any) []byte {
	c.t.Helper()
	b, err := c.do(method, path, body)
	if err != nil {
		c.t.Fatal(err)
	}
	return b
}

type obj = map[string]any

const servicesPath = "/api/v1/namespaces/default/services"

// svcPort is a port of a Service; node 0 is any, or none.
func svcPort(name, proto string, number, node int) obj {
	p := obj{"name": name, "protocol": proto, "port": number}
	if node != 0 {
		p["nodePort"] = node
	}
	return p
}

func (c *cluster) service(name, kind string, spec obj, ports ...obj) {
	c.t.Helper()
	c.serviceIn("default", name, kind, spec, ports...)
}

func (c *cluster) serviceIn(ns, name, kind string, spec obj, ports ...obj) {
	c.t.Helper()
	s := obj{"type": kind, "ports": ports}
	for k, v := range spec {
		s[k] = v
	}
	c.must("POST", "/api/v1/namespaces/"+ns+"/services", obj{
		"apiVersion": "v1", "kind": "Service", "metadata": obj{"name": name, "labels": obj{"app": name}}, "spec": s,
	})
}

// endpoints makes one slice that serves the ports of a Service, by one pod.
func (c *cluster) endpoints(service, address string, ports ...obj) {
	c.t.Helper()
	c.must("POST", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", obj{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
		"metadata": obj{"name": service + "-1", "labels": obj{"kubernetes.io/service-name": service}},
		"endpoints": []obj{{"addresses": []string{address}, "conditions": obj{"ready": true},
			"targetRef": obj{"kind": "Pod", "name": service + "-pod", "namespace": "default"}}},
		"ports": ports,
	})
}

func (c *cluster) ingress(service string, ips ...string) {
	c.t.Helper()
	in := []obj{}
	for _, ip := range ips {
		in = append(in, obj{"ip": ip})
	}
	c.must("PATCH", servicesPath+"/"+service+"/status", obj{"status": obj{"loadBalancer": obj{"ingress": in}}})
}

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
	// Defect 33: what was there before the agent.
	c.service("before", "NodePort", nil, svcPort("a", "TCP", 80, 30000))
	src := kubeSource(t, kube.Options{Kubeconfigs: []string{c.kubeconfig}})
	r, _ := follow(t, src)
	const before = "tcp 0.0.0.0:30000 before"
	want(t, r, before)
	began := r.mark()

	t.Run("nothing serves this", func(t *testing.T) {
		b := find(r, "tcp 0.0.0.0:30000")
		if len(b.Dial) > 0 || !strings.Contains(b.Detail, "nothing serves this") {
			t.Errorf("without endpoints: dialled at %v, detail %q", b.Dial, b.Detail)
		}
		c.endpoints("before", "192.168.77.10", obj{"name": "a", "protocol": "TCP", "port": 8080})
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

	// Defect 28.
	t.Run("53/TCP with 53/UDP", func(t *testing.T) {
		c.service("dns", "LoadBalancer", nil, svcPort("t", "TCP", 53, 30053), svcPort("u", "UDP", 53, 30053))
		want(t, r, before, "tcp 0.0.0.0:30053 dns", "udp 0.0.0.0:30053 dns")
		c.ingress("dns", nodeAddr)
		want(t, r, before, "tcp 0.0.0.0:30053 dns", "udp 0.0.0.0:30053 dns",
			"tcp "+nodeAddr+":53 dns", "udp "+nodeAddr+":53 dns")
		c.must("PATCH", servicesPath+"/dns", obj{"spec": obj{"ports": []obj{svcPort("u", "UDP", 53, 30053)}}})
		want(t, r, before, "udp 0.0.0.0:30053 dns", "udp "+nodeAddr+":53 dns")
		c.must("DELETE", servicesPath+"/dns", nil)
		want(t, r, before)
	})

	// Defect 4, seen from the source: a port that is added forgets no other.
	t.Run("ports added and removed", func(t *testing.T) {
		c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
		want(t, r, before, "tcp 0.0.0.0:30080 web")
		mark := r.mark()
		c.must("PATCH", servicesPath+"/web", obj{"spec": obj{"ports": []obj{
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
		c.must("DELETE", servicesPath+"/web", nil)
		want(t, r, before)
		if w := r.warned(); len(w) > 0 {
			t.Errorf("warnings of a Service that is gone: %q", w)
		}
	})

	t.Run("type patched", func(t *testing.T) {
		c.service("web", "ClusterIP", nil, svcPort("a", "TCP", 80, 0))
		c.must("PATCH", servicesPath+"/web", obj{"spec": obj{"type": "NodePort", "ports": []obj{svcPort("a", "TCP", 80, 30080)}}})
		want(t, r, before, "tcp 0.0.0.0:30080 web")
		c.must("PATCH", servicesPath+"/web", obj{"spec": obj{"type": "ClusterIP", "ports": []obj{{"name": "a", "protocol": "TCP", "port": 80, "nodePort": nil}}}})
		want(t, r, before)
		c.must("DELETE", servicesPath+"/web", nil)
	})

	// Defect 32.
	t.Run("load balancer and external IPs", func(t *testing.T) {
		c.service("lb", "LoadBalancer", obj{"externalIPs": []string{"192.168.77.50"}}, svcPort("a", "TCP", 80, 30081))
		c.ingress("lb", nodeAddr, "192.168.77.60")
		want(t, r, before, "tcp 0.0.0.0:30081 lb", "tcp "+nodeAddr+":80 lb", "tcp 192.168.77.60:80 lb", "tcp 192.168.77.50:80 lb")
		c.ingress("lb", "192.168.77.60")
		want(t, r, before, "tcp 0.0.0.0:30081 lb", "tcp 192.168.77.60:80 lb", "tcp 192.168.77.50:80 lb")
		c.must("PATCH", servicesPath+"/lb", obj{"spec": obj{"loadBalancerSourceRanges": []string{"10.0.0.0/8"}}})
		eventually(t, 10*time.Second, func() error {
			if b := find(r, "tcp 192.168.77.60:80"); b.Withheld != "limited to source 10.0.0.0/8" {
				return fmt.Errorf("withheld: %q", b.Withheld)
			}
			return nil
		})
		c.must("DELETE", servicesPath+"/lb", nil)
		want(t, r, before)
	})

	t.Run("2,000 Services", func(t *testing.T) {
		keys := []string{before}
		for i := range 2000 {
			c.service(fmt.Sprintf("s%d", i), "NodePort", nil, svcPort("a", "TCP", 80, 30100+i))
			keys = append(keys, fmt.Sprintf("tcp 0.0.0.0:%d s%d", 30100+i, i))
		}
		want(t, r, keys...)
		// An agent that starts now, and one whose server is away, say the same.
		r2, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.kubeconfig}, Selector: "app in (s7, s8)"}))
		want(t, r2, "tcp 0.0.0.0:30107 s7", "tcp 0.0.0.0:30108 s8")
		stop()
		mark := r.mark()
		c.api.stop(syscall.SIGKILL)
		eventually(t, 20*time.Second, func() error {
			if r.staleness() == nil {
				return errors.New("not stale")
			}
			return nil
		})
		c.api.run()
		c.ready()
		eventually(t, 60*time.Second, func() error { return r.staleness() })
		want(t, r, keys...)
		if log := r.since(mark); len(log) > 0 {
			t.Errorf("a restart of the API server moved %d ports, %q first", len(log), log[0])
		}
		c.must("DELETE", servicesPath+"?labelSelector=app+notin+(before)", nil)
		want(t, r, before)
	})

	t.Run("namespaces", func(t *testing.T) {
		c.must("POST", "/api/v1/namespaces", obj{"apiVersion": "v1", "kind": "Namespace", "metadata": obj{"name": "other"}})
		c.serviceIn("other", "there", "NodePort", nil, svcPort("", "TCP", 80, 30200))
		want(t, r, before, "tcp 0.0.0.0:30200 there")
		r2, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.kubeconfig}, Namespaces: []string{"other"}}))
		want(t, r2, "tcp 0.0.0.0:30200 there")
		stop()
		r3, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.kubeconfig}, Namespaces: []string{"other", "default"}}))
		want(t, r3, "tcp 0.0.0.0:30200 there", before)
		stop()
		c.must("DELETE", "/api/v1/namespaces/other/services/there", nil)
		want(t, r, before)
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
			if err := r.staleness(); err == nil || !strings.Contains(err.Error(), text) {
				return fmt.Errorf("stale says %v, want %q", err, text)
			}
			return nil
		})
	}
	want(t, r) // no cluster is no ports, which is not stale
	if err := r.staleness(); err != nil {
		t.Errorf("stale before there is a kubeconfig: %v", err)
	}
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
	eventually(t, 30*time.Second, func() error { return r.staleness() })
	if log := r.since(mark); len(log) != 1 {
		t.Errorf("moved %q, want one appearance", log)
	}
	stop()
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
	c.writeKubeconfig(c.kubeconfig, "nobody")
	r, _ := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.kubeconfig}}))
	want(t, r, "tcp 0.0.0.0:30080 web")
	if b := find(r, "tcp 0.0.0.0:30080"); len(b.Dial) == 0 || strings.Contains(b.Detail, "nothing") {
		t.Errorf("dialled at %v, detail %q: endpoints are not known", b.Dial, b.Detail)
	}
	if w := r.warned(); !slices.ContainsFunc(w, func(s string) bool { return strings.Contains(s, "endpointslices") }) {
		t.Errorf("warnings are %q", w)
	}
}

// A real server in a pod's place is reached through a node port, a load
// balancer's address and an external IP, under both modes of kube-proxy.
func TestKubeProxy(t *testing.T) {
	for i, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			c := startCluster(t)
			pod := startPod(t, mode, fmt.Sprintf("192.168.77.%d", 10+i))
			proxyConf := filepath.Join(c.dir, "proxy.yaml")
			text := fmt.Sprintf("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: %s\n"+
				"hostnameOverride: node\nclusterCIDR: 10.244.0.0/16\nclientConnection: {kubeconfig: %q}\n"+
				"conntrack: {maxPerCore: 0}\n", mode, c.kubeconfig)
			if err := os.WriteFile(proxyConf, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			c.must("POST", "/api/v1/nodes", obj{"apiVersion": "v1", "kind": "Node", "metadata": obj{"name": "node"}})
			c.must("PATCH", "/api/v1/nodes/node/status", obj{"status": obj{"addresses": []obj{{"type": "InternalIP", "address": nodeAddr}}}})
			proxy := start(t, cacheBin("kube-proxy"), "--config", proxyConf)
			defer func() {
				proxy.stop(syscall.SIGTERM) // it would write its rules again
				_, _ = try(cacheBin("kube-proxy"), "--cleanup", "--config", proxyConf)
			}()

			ports := []obj{{"name": "t", "protocol": "TCP", "port": 8080}, {"name": "u", "protocol": "UDP", "port": 8080}}
			c.service("web", "LoadBalancer", obj{"externalIPs": []string{"192.168.77.50"}},
				svcPort("t", "TCP", 80, 30080), svcPort("u", "UDP", 80, 30080))
			c.ingress("web", "192.168.77.60")
			c.endpoints("web", pod, ports...)
			r, _ := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.kubeconfig}}))
			want(t, r, "tcp 0.0.0.0:30080 web", "udp 0.0.0.0:30080 web", "tcp 192.168.77.60:80 web", "udp 192.168.77.60:80 web",
				"tcp 192.168.77.50:80 web", "udp 192.168.77.50:80 web")
			eventually(t, 10*time.Second, func() error {
				if b := find(r, "tcp 0.0.0.0:30080"); len(b.Dial) == 0 {
					return errors.New("endpoints are not known yet")
				}
				return nil
			})
			for _, b := range r.bindings() {
				// Not the pod itself: what kube-proxy made must answer.
				b.Dial = slices.DeleteFunc(slices.Clone(b.Dial), func(a netip.AddrPort) bool { return a.Addr() == netip.MustParseAddr(pod) })
				eventually(t, 60*time.Second, func() error {
					got, err := reach(b)
					if err == nil && !strings.Contains(got, "hello from the pod") {
						err = fmt.Errorf("%s says %q", b.Key, got)
					}
					return err
				})
				// The node's own address answers in both modes, loopback only in one.
				if b.Port == 30080 && b.Protocol == port.TCP {
					b.Dial = []netip.AddrPort{netip.MustParseAddrPort(nodeAddr + ":30080")}
					eventually(t, 30*time.Second, func() error { _, err := reach(b); return err })
				}
			}
		})
	}
}

// startPod makes a network namespace with a server on port 8080, tcp and udp.
func startPod(t testing.TB, name, addr string) string {
	t.Helper()
	for _, c := range []string{
		"ip netns add " + name,
		"ip link add v" + name + " type veth peer name eth0 netns " + name,
		"ip link set v" + name + " master nodebr up",
		"ip -n " + name + " addr add " + addr + "/24 dev eth0",
		"ip -n " + name + " link set eth0 up",
		"ip -n " + name + " link set lo up",
		"ip -n " + name + " route add default via " + nodeAddr,
	} {
		run(t, "/bin/sh", "-c", c)
	}
	t.Cleanup(func() {
		// A thread may hold the namespace for a while; the link must not stay with it.
		_, _ = try("ip", "link", "del", "v"+name)
		_, _ = try("ip", "netns", "del", name)
	})
	inNamespace(t, name, func() error {
		l, err := net.Listen("tcp4", ":8080")
		if err != nil {
			return err
		}
		u, err := net.ListenPacket("udp4", ":8080")
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = l.Close(); _ = u.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, "hello from the pod")
				_ = c.Close()
			}
		}()
		go func() {
			b := make([]byte, 1500)
			for {
				_, from, err := u.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = u.WriteTo([]byte("hello from the pod"), from)
			}
		}()
		return nil
	})
	return addr
}

// inNamespace runs f on a thread in a network namespace.
func inNamespace(t testing.TB, name string, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		fd, err := os.Open("/run/netns/" + name)
		if err == nil {
			err = setns(int(fd.Fd()))
			_ = fd.Close()
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
