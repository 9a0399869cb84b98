// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

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
	mrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/bench/report"
)

const (
	kubeMeasure = "Service is created → message on the link"
	kubeRSS     = "memory of an agent beside a Kubernetes API server (RSS)"
)

// kubeModes are the agent, which watches, and pollers, which list all Services.
var kubeModes = []struct {
	name string
	poll time.Duration
}{{modeBPF, 0}, {"list 1 s", time.Second}, {"list 3 s", 3 * time.Second}}

func kubePart() Part {
	return Part{
		Section: report.Section{
			Name: "kube", Title: "How soon a Service is there",
			About: `A Service with a node port is created at a real API server (with etcd). fairlead's agent watches;
its polling mode does too, so it is compared with pollers that the benchmark brings: they list all Services each second or
each three, and publish nothing. All see the same Service. The clock starts when the request is sent.

How soon a container's port bears its name is not measured here: an engine wants mounts and cgroups of its own,
which only the tests against real engines give it.`,
		},
		Run: kubeServices,
	}
}

func kubeServices(ctx context.Context, e *Env) error {
	c, err := startCluster(ctx, e)
	if err != nil {
		return err
	}
	defer c.close()
	g := c.guest
	if err := g.begin(e.Program, "--kubeconfig", c.kubeconfig); err != nil {
		return err
	}
	by, err := g.ready(ctx)
	if err != nil {
		return err
	}
	p, err := newPeer(ctx, g)
	if err != nil {
		return err
	}
	defer p.close()
	if err := pause(ctx, e.For(5*time.Second, 5*time.Second, time.Second)); err != nil { // what the start left to do
		return err
	}
	used, err := g.used()
	if err != nil {
		return err
	}
	e.Value(report.Cell{Measure: kubeRSS, Mode: modeBPF, Unit: "B", By: by, Extra: map[string]float64{"of it anonymous, MB": float64(used.own) / 1e6}}, float64(used.rss))
	samples := make([][]float64, len(kubeModes))
	failed := make([]error, len(kubeModes))
	// The agent alone has many samples; some are seen by the pollers too.
	polled := e.Of(12, 6, 1)
	for i := range polled + e.Of(120, 40, 3) {
		n := uint16(30000 + i)
		said := p.expect(port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n})
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
		seen := make([]chan time.Time, len(kubeModes))
		if i < polled {
			for j, m := range kubeModes[1:] {
				seen[j+1] = make(chan time.Time, 1)
				go func() {
					defer close(seen[j+1])
					at, err := c.poll(ctx, n, m.poll)
					if failed[j+1] = errors.Join(failed[j+1], err); err == nil {
						seen[j+1] <- at
					}
				}()
			}
			if err := pause(ctx, mrand.N(100*time.Millisecond)); err != nil {
				return err
			}
		}
		began := time.Now()
		if err := c.service(ctx, n); err != nil {
			return err
		}
		at, err := p.wait(ctx, said)
		if err != nil {
			return fmt.Errorf("node port %d: %w", n, err)
		}
		samples[0] = append(samples[0], at.Sub(began).Seconds())
		for j, s := range seen {
			if s == nil {
				continue
			}
			if at, ok := <-s; ok {
				samples[j] = append(samples[j], at.Sub(began).Seconds())
			}
		}
	}
	failed[0] = g.check(ctx)
	for i, m := range kubeModes {
		cell := report.Cell{Measure: kubeMeasure, Mode: m.name, Unit: "s"}
		if failed[i] != nil {
			e.Fail(cell, failed[i])
			continue
		}
		e.Samples(cell, samples[i])
	}
	return ctx.Err()
}

// cluster is an API server with its etcd, and a guest without an agent yet, all
// in one namespace.
type cluster struct {
	guest      *guest
	kubeconfig string
	client     *http.Client
}

const kubeURL = "https://127.0.0.1:6443"

// kubeAPIServer is where hack/provision-engines.sh puts it.
func kubeAPIServer() (string, error) {
	dir := os.Getenv("FAIRLEAD_CACHE")
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		dir = filepath.Join(base, "fairlead")
	}
	path := filepath.Join(dir, "bin", "kube-apiserver")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("no API server, which hack/provision-engines.sh builds: %w", err)
	}
	return path, nil
}

// startCluster starts it and waits until it answers; the caller closes it.
func startCluster(ctx context.Context, e *Env) (_ *cluster, err error) {
	server, err := kubeAPIServer()
	if err != nil {
		return nil, err
	}
	dir, err := e.Dir()
	if err != nil {
		return nil, err
	}
	c := &cluster{kubeconfig: filepath.Join(dir, "kubeconfig")}
	if c.guest, err = newSpaces(dir, modes[0]); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if err := c.guest.space.Do(func() error {
		for _, args := range []string{"link add node type bridge", "addr add 192.168.77.1/24 dev node", "link set node up", "route add default via 192.168.77.254"} {
			if out, err := exec.CommandContext(ctx, "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", args, err, out)
			}
		}
		return nil
	}); err != nil {
		return nil, err
	}
	if err := writeCluster(dir, c.kubeconfig); err != nil {
		return nil, err
	}
	// Their logs would be in the way; what they cannot do shows as no answer.
	quiet := func(name string, args ...string) error {
		return c.guest.start(c.guest.space, "/bin/sh", append([]string{"-c", `exec "$0" "$@" >"` + filepath.Join(dir, "log") + `" 2>&1`, name}, args...)...)
	}
	if err := errors.Join(
		quiet("etcd", "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--listen-client-urls", "http://127.0.0.1:2379",
			"--advertise-client-urls", "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380"),
		quiet(server, "--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--bind-address=0.0.0.0", "--advertise-address=192.168.77.1",
			"--cert-dir="+filepath.Join(dir, "certs"), "--service-cluster-ip-range=10.96.0.0/16", "--token-auth-file="+filepath.Join(dir, "tokens.csv"),
			"--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+filepath.Join(dir, "sa.pub"),
			"--service-account-signing-key-file="+filepath.Join(dir, "sa.key"), "--disable-admission-plugins=ServiceAccount,StorageObjectInUseProtection",
			"--endpoint-reconciler-type=none"),
	); err != nil {
		return nil, err
	}
	c.client = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // a server of our own
		DialContext: func(_ context.Context, network, addr string) (net.Conn, error) {
			return c.guest.space.Dial(network, addr)
		},
	}}
	e.Progress("waiting for the API server")
	for range 4 { // it takes longer where the machine has much to do
		if err = eventually(ctx, func() error { _, err := c.do(ctx, http.MethodGet, "/api/v1/namespaces/default", nil); return err }); err == nil {
			return c, nil
		}
	}
	return nil, err
}

// writeCluster writes what the server and its clients know each other by.
func writeCluster(dir, kubeconfig string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	pub, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	for path, b := range map[string][]byte{
		filepath.Join(dir, "sa.key"):     pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}),
		filepath.Join(dir, "sa.pub"):     pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: pub}),
		filepath.Join(dir, "tokens.csv"): []byte("token,admin,1,system:masters\n"),
		kubeconfig: fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: token}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, kubeURL),
	} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) close() {
	if c.client != nil {
		c.client.CloseIdleConnections()
	}
	for _, p := range c.guest.procs {
		_ = p.Process.Kill() // a server would see all its watches out
	}
	c.guest.close()
}

// do asks the API server; body, if any, is sent as JSON.
func (c *cluster) do(ctx context.Context, method, path string, body any) ([]byte, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, kubeURL+path, bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer token")
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %.300s", method, path, resp.Status, got)
	}
	return got, err
}

// service creates a Service with a node port.
func (c *cluster) service(ctx context.Context, n uint16) error {
	_, err := c.do(ctx, http.MethodPost, "/api/v1/namespaces/default/services", map[string]any{
		"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": fmt.Sprintf("s%d", n)},
		"spec": map[string]any{"type": "NodePort", "ports": []any{map[string]any{"name": "a", "protocol": "TCP", "port": 80, "nodePort": n}}},
	})
	return err
}

// poll lists all Services until one has the node port, from a moment of its own
// within an interval on, and says when.
func (c *cluster) poll(ctx context.Context, n uint16, every time.Duration) (time.Time, error) {
	for next := mrand.N(every); ; next = every {
		if err := pause(ctx, next); err != nil {
			return time.Time{}, err
		}
		b, err := c.do(ctx, http.MethodGet, "/api/v1/services", nil)
		if err != nil {
			return time.Time{}, err
		}
		if bytes.Contains(b, fmt.Appendf(nil, `"nodePort":%d`, n)) {
			return time.Now(), nil
		}
	}
}
