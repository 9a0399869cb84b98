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
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// cluster is an API server with its etcd.
type cluster struct {
	t          testing.TB
	dir        string
	etcd, api  *daemon
	kubeconfig string
	client     *http.Client
	caKey      *rsa.PrivateKey // signs client certificates
	ca         *x509.Certificate
}

const apiURL = "https://127.0.0.1:6443"

// startCluster starts etcd and kube-apiserver and waits until they answer. The
// token "token" may do everything, "nobody" nothing.
func startCluster(t testing.TB, flags ...string) *cluster {
	t.Helper()
	dir := t.TempDir()
	c := &cluster{t: t, dir: dir, kubeconfig: filepath.Join(dir, "kubeconfig"), client: &http.Client{
		Timeout: 2 * time.Minute, // to delete 2,000 Services at once
		Transport: &http.Transport{
			TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // a server of our own
			MaxIdleConnsPerHost: 8,                                     // a handshake costs more than a request
		},
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
	c.caKey = key
	c.ca = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	ca, err := x509.CreateCertificate(rand.Reader, c.ca, c.ca, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca}), 0o600); err != nil {
		t.Fatal(err)
	}
	c.writeKubeconfig(c.kubeconfig, "token")
	c.etcd = start(t, "etcd", "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380")
	c.api = start(t, cacheBin("kube-apiserver"), append([]string{
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--bind-address=0.0.0.0",
		"--advertise-address=" + nodeAddr, "--cert-dir=" + filepath.Join(dir, "certs"),
		"--service-cluster-ip-range=10.96.0.0/16", "--token-auth-file=" + filepath.Join(dir, "tokens.csv"),
		"--client-ca-file=" + filepath.Join(dir, "ca.pem"), "--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + filepath.Join(dir, "sa.pub"),
		"--service-account-signing-key-file=" + filepath.Join(dir, "sa.key"),
		"--disable-admission-plugins=ServiceAccount,StorageObjectInUseProtection", "--endpoint-reconciler-type=none",
		"--delete-collection-workers=8",
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
	c.writeKubeconfigFor(path, fmt.Sprintf("{token: %q}", token))
}

func (c *cluster) writeKubeconfigFor(path, user string) {
	c.t.Helper()
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: u, user: %s}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, apiURL, user)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
		c.t.Fatal(err)
	}
}

// certificate is a user of a kubeconfig: a client certificate of name's, which
// the server's authority signed, that ends at a time.
func (c *cluster) certificate(name string, end time.Time) (user string) {
	c.t.Helper()
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: end, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, tmpl, c.ca, &c.caKey.PublicKey, c.caKey)
	if err != nil {
		c.t.Fatal(err)
	}
	encode := func(kind string, b []byte) string {
		return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}))
	}
	return fmt.Sprintf("{client-certificate-data: %s, client-key-data: %s}",
		encode("CERTIFICATE", cert), encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(c.caKey)))
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

const (
	servicesPath  = "/api/v1/namespaces/default/services"
	endpointsPath = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
)

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
	if err := c.tryService(ns, name, kind, spec, ports...); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) tryService(ns, name, kind string, spec obj, ports ...obj) error {
	s := obj{"type": kind, "ports": ports}
	for k, v := range spec {
		s[k] = v
	}
	_, err := c.do("POST", "/api/v1/namespaces/"+ns+"/services", obj{
		"apiVersion": "v1", "kind": "Service", "metadata": obj{"name": name, "labels": obj{"app": name}}, "spec": s,
	})
	return err
}

// endpoints makes one slice that serves the ports of a Service, by one pod.
func (c *cluster) endpoints(service, pod, address string, ports ...obj) {
	c.t.Helper()
	if err := c.tryEndpoints(service, pod, address, ports...); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) tryEndpoints(service, pod, address string, ports ...obj) error {
	_, err := c.do("POST", endpointsPath, obj{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
		"metadata": obj{"name": service + "-1", "labels": obj{"kubernetes.io/service-name": service}},
		"endpoints": []obj{{"addresses": []string{address}, "conditions": obj{"ready": true},
			"targetRef": obj{"kind": "Pod", "name": pod, "namespace": "default"}}},
		"ports": ports,
	})
	return err
}

func (c *cluster) ingress(service string, ips ...string) {
	c.t.Helper()
	in := []obj{}
	for _, ip := range ips {
		in = append(in, obj{"ip": ip})
	}
	c.must("PATCH", servicesPath+"/"+service+"/status", obj{"status": obj{"loadBalancer": obj{"ingress": in}}})
}
