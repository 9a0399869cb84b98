// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package cluster is a Kubernetes API server with its etcd and kube-proxy for
// tests and benchmarks: their command lines, and a client. The caller runs them,
// in one network namespace. hack/provision-engines.sh provides the programs.
package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/fairlead/fairlead/test/kit/enclave"
)

// URL is where the API server listens.
const URL = "https://127.0.0.1:6443"

// Paths of the API.
const (
	Services  = "/api/v1/namespaces/default/services"
	Endpoints = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
)

// Object is a request's body, as JSON.
type Object = map[string]any

// Cluster is the files of a cluster and a client.
type Cluster struct {
	Dir        string
	Kubeconfig string // of "token"

	client *http.Client
	key    *rsa.PrivateKey // signs client certificates
	ca     *x509.Certificate
}

// New writes keys, certificates and tokens to dir. The token "token" may do everything,
// "nobody" nothing. The client connects by dial, if not nil. The caller closes the
// cluster.
func New(dir string, dial func(network, addr string) (net.Conn, error)) (*Cluster, error) {
	t := &http.Transport{
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // a server of our own
		MaxIdleConnsPerHost: 8,                                     // a handshake costs more than a request
	}
	if dial != nil {
		t.DialContext = func(_ context.Context, network, addr string) (net.Conn, error) { return dial(network, addr) }
	}
	c := &Cluster{
		Dir: dir, Kubeconfig: filepath.Join(dir, "kubeconfig"),
		client: &http.Client{Timeout: 2 * time.Minute, Transport: t}, // to delete 2,000 Services at once
	}
	var err error
	if c.key, err = rsa.GenerateKey(rand.Reader, 2048); err != nil {
		return nil, err
	}
	pub, err := x509.MarshalPKIXPublicKey(&c.key.PublicKey)
	if err != nil {
		return nil, err
	}
	c.ca = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	ca, err := x509.CreateCertificate(rand.Reader, c.ca, c.ca, &c.key.PublicKey, c.key)
	if err != nil {
		return nil, err
	}
	for name, b := range map[string][]byte{
		"sa.key":     encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(c.key)),
		"sa.pub":     encode("PUBLIC KEY", pub),
		"ca.pem":     encode("CERTIFICATE", ca),
		"tokens.csv": []byte("token,admin,1,system:masters\nnobody,nobody,2\n"),
	} {
		if err := os.WriteFile(c.path(name), b, 0o600); err != nil {
			return nil, err
		}
	}
	return c, c.WriteKubeconfig(c.Kubeconfig, UserOf("token"))
}

func encode(kind string, b []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b})
}

// Close closes the client's idle connections.
func (c *Cluster) Close() { c.client.CloseIdleConnections() }

func (c *Cluster) path(name string) string { return filepath.Join(c.Dir, name) }

// Etcd is the command line of etcd.
func (c *Cluster) Etcd() []string {
	return []string{
		"etcd", "--data-dir", c.path("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380",
	}
}

// APIServer is the command line of kube-apiserver on a node with that address, for a
// cluster without pods of its own.
func (c *Cluster) APIServer(node string, flags ...string) []string {
	return append(c.apiServer(node, "--disable-admission-plugins=ServiceAccount,StorageObjectInUseProtection",
		"--endpoint-reconciler-type=none", "--delete-collection-workers=8"), flags...)
}

func (c *Cluster) apiServer(node string, flags ...string) []string {
	return append([]string{
		enclave.Tool("kube-apiserver"),
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--bind-address=0.0.0.0",
		"--advertise-address=" + node, "--cert-dir=" + c.path("certs"),
		"--service-cluster-ip-range=10.96.0.0/16", "--token-auth-file=" + c.path("tokens.csv"),
		"--client-ca-file=" + c.path("ca.pem"), "--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.path("sa.pub"),
		"--service-account-signing-key-file=" + c.path("sa.key"),
	}, flags...)
}

// Proxy makes a node with that address if there is none, writes a configuration for kube-proxy and
// returns its command line. mode is iptables or nftables.
func (c *Cluster) Proxy(ctx context.Context, node, mode string) ([]string, error) {
	conf := c.path("proxy.yaml")
	text := fmt.Sprintf("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: %s\n"+
		"hostnameOverride: node\nclusterCIDR: 10.244.0.0/16\nclientConnection: {kubeconfig: %q}\n"+
		"conntrack: {maxPerCore: 0}\n", mode, c.Kubeconfig)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return nil, err
	}
	_, err := c.Do(ctx, http.MethodPost, "/api/v1/nodes", Object{"apiVersion": "v1", "kind": "Node", "metadata": Object{"name": "node"}})
	if no := (*Refusal)(nil); err != nil && (!errors.As(err, &no) || no.Code != http.StatusConflict) {
		return nil, err
	}
	_, err = c.Do(ctx, http.MethodPatch, "/api/v1/nodes/node/status",
		Object{"status": Object{"addresses": []Object{{"type": "InternalIP", "address": node}}}})
	return []string{enclave.Tool("kube-proxy"), "--config", conf}, err
}

// EtcdAnswers returns why etcd does not answer yet, nil if it does.
func (c *Cluster) EtcdAnswers(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:2379/health", nil)
	if err != nil {
		return err
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd says %s", resp.Status)
	}
	return nil
}

// Answers returns why the API server does not answer yet, nil if it does.
func (c *Cluster) Answers(ctx context.Context) error {
	b, err := c.Do(ctx, http.MethodGet, "/readyz", nil)
	if err == nil && string(b) != "ok" {
		err = fmt.Errorf("readyz says %q", b)
	}
	if err == nil {
		_, err = c.Do(ctx, http.MethodGet, "/api/v1/namespaces/default", nil)
	}
	return err
}

// UserOf is the user of a kubeconfig that has a token.
func UserOf(token string) string { return fmt.Sprintf("{token: %q}", token) }

// Certificate is the user of a kubeconfig that has a client certificate of name's,
// which the server's authority signed, that ends at a time.
func (c *Cluster) Certificate(name string, end time.Time) (user string, err error) {
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: end, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, tmpl, c.ca, &c.key.PublicKey, c.key)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("{client-certificate-data: %s, client-key-data: %s}",
		base64.StdEncoding.EncodeToString(encode("CERTIFICATE", cert)),
		base64.StdEncoding.EncodeToString(encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(c.key)))), nil
}

// WriteKubeconfig writes a kubeconfig, or replaces one in one step.
func (c *Cluster) WriteKubeconfig(path, user string) error {
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: u, user: %s}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, URL, user)
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path))
}

// Refusal is an error response of the API server.
type Refusal struct {
	Method, Path string
	Code         int    // of HTTP
	Text         string // the end of what it says
}

// Error implements error.
func (r *Refusal) Error() string {
	return fmt.Sprintf("%s %s: %d %s: %s", r.Method, r.Path, r.Code, http.StatusText(r.Code), r.Text)
}

// Do sends a request to the API server; body is JSON, or with PATCH a merge patch. If
// the server refuses, the error is a *Refusal.
func (c *Cluster) Do(ctx context.Context, method, path string, body any) ([]byte, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, URL+path, r)
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
		err = &Refusal{Method: method, Path: path, Code: resp.StatusCode, Text: string(b[max(0, len(b)-500):])}
	}
	return b, err
}

// ServicePort is a port of a Service; node 0 is any, or none.
func ServicePort(name, proto string, number, node int) Object {
	p := Object{"name": name, "protocol": proto, "port": number}
	if node != 0 {
		p["nodePort"] = node
	}
	return p
}

// Service creates a Service in a namespace, with spec beside its ports.
func (c *Cluster) Service(ctx context.Context, ns, name, kind string, spec Object, ports ...Object) error {
	s := Object{"type": kind, "ports": ports}
	for k, v := range spec {
		s[k] = v
	}
	_, err := c.Do(ctx, http.MethodPost, "/api/v1/namespaces/"+ns+"/services", Object{
		"apiVersion": "v1", "kind": "Service", "metadata": Object{"name": name, "labels": Object{"app": name}}, "spec": s,
	})
	return err
}

// Slice creates an EndpointSlice with one pod for the ports of a Service.
func (c *Cluster) Slice(ctx context.Context, service, pod, address string, ports ...Object) error {
	_, err := c.Do(ctx, http.MethodPost, Endpoints, Object{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
		"metadata": Object{"name": service + "-1", "labels": Object{"kubernetes.io/service-name": service}},
		"endpoints": []Object{{"addresses": []string{address}, "conditions": Object{"ready": true},
			"targetRef": Object{"kind": "Pod", "name": pod, "namespace": "default"}}},
		"ports": ports,
	})
	return err
}
