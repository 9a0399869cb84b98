// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// kubernetes is an API server with its etcd, for one test.
type kubernetes struct {
	*cluster.Cluster
	t         testing.TB
	etcd, api *daemon
}

type obj = cluster.Object

// startCluster starts etcd and kube-apiserver and waits until they answer.
func startCluster(t testing.TB, flags ...string) *kubernetes {
	t.Helper()
	made, err := cluster.New(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(made.Close)
	c := &kubernetes{Cluster: made, t: t}
	etcd, api := made.Etcd(), made.APIServer(enclave.NodeAddr, flags...)
	c.etcd = start(t, etcd[0], etcd[1:]...)
	// The API server gives up if there is none.
	c.etcd.ready(t, func() error { return c.EtcdAnswers(context.Background()) })
	c.api = start(t, api[0], api[1:]...)
	c.ready()
	return c
}

// in is the same cluster, for a subtest.
func (c *kubernetes) in(t testing.TB) *kubernetes {
	s := *c
	s.t = t
	return &s
}

func (c *kubernetes) ready() {
	c.t.Helper()
	c.api.ready(c.t, func() error { return c.Answers(context.Background()) })
}

// writeKubeconfig writes a kubeconfig for a token.
func (c *kubernetes) writeKubeconfig(path, token string) {
	c.t.Helper()
	c.writeKubeconfigFor(path, cluster.UserOf(token))
}

func (c *kubernetes) writeKubeconfigFor(path, user string) {
	c.t.Helper()
	if err := c.WriteKubeconfig(path, user); err != nil {
		c.t.Fatal(err)
	}
}

func (c *kubernetes) certificate(name string, end time.Time) (user string) {
	c.t.Helper()
	user, err := c.Certificate(name, end)
	if err != nil {
		c.t.Fatal(err)
	}
	return user
}

// patient retries a request while the API server cannot answer, because it is
// overloaded or waits for etcd. A retry that finds the request done succeeds.
func patient(ask func() error) error {
	deadline := time.Now().Add(limit())
	for again := false; ; again = true {
		err := ask()
		if err == nil {
			return nil
		}
		if no := (*cluster.Refusal)(nil); errors.As(err, &no) {
			done := no.Method == http.MethodPost && no.Code == http.StatusConflict ||
				no.Method == http.MethodDelete && no.Code == http.StatusNotFound
			if again && done {
				return nil
			}
			conflict := no.Method == http.MethodPatch && no.Code == http.StatusConflict // with a controller
			if !conflict && no.Code != http.StatusTooManyRequests && no.Code < 500 {
				return err
			}
		}
		if time.Now().After(deadline) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (c *kubernetes) must(method, path string, body any) {
	c.t.Helper()
	if err := patient(func() error { _, err := c.Do(context.Background(), method, path, body); return err }); err != nil {
		c.t.Fatal(err)
	}
}

// svcPort is a port of a Service; node 0 is any, or none.
func svcPort(name, proto string, number, node int) obj {
	return cluster.ServicePort(name, proto, number, node)
}

func (c *kubernetes) service(name, kind string, spec obj, ports ...obj) {
	c.t.Helper()
	c.serviceIn("default", name, kind, spec, ports...)
}

func (c *kubernetes) serviceIn(ns, name, kind string, spec obj, ports ...obj) {
	c.t.Helper()
	if err := c.tryService(ns, name, kind, spec, ports...); err != nil {
		c.t.Fatal(err)
	}
}

func (c *kubernetes) tryService(ns, name, kind string, spec obj, ports ...obj) error {
	return patient(func() error { return c.Service(context.Background(), ns, name, kind, spec, ports...) })
}

// endpoints makes one slice that serves the ports of a Service, by one pod.
func (c *kubernetes) endpoints(service, pod, address string, ports ...obj) {
	c.t.Helper()
	if err := c.tryEndpoints(service, pod, address, ports...); err != nil {
		c.t.Fatal(err)
	}
}

func (c *kubernetes) tryEndpoints(service, pod, address string, ports ...obj) error {
	return patient(func() error { return c.Slice(context.Background(), service, pod, address, ports...) })
}

func (c *kubernetes) ingress(service string, ips ...string) {
	c.t.Helper()
	in := []obj{}
	for _, ip := range ips {
		in = append(in, obj{"ip": ip})
	}
	c.must("PATCH", cluster.Services+"/"+service+"/status", obj{"status": obj{"loadBalancer": obj{"ingress": in}}})
}
