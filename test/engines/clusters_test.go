// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// second starts another API server beside the one of c, with objects of its own in c's etcd, and
// writes its kubeconfig to path.
func (c *kubernetes) second(path string) *kubernetes {
	c.t.Helper()
	const at = "127.0.0.1:7443"
	made, err := cluster.New(c.t.TempDir(), func(network, _ string) (net.Conn, error) { return net.Dial(network, at) })
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(made.Close)
	api := made.APIServer(enclave.NodeAddr, "--secure-port=7443", "--etcd-prefix=/second", "--service-cluster-ip-range=10.97.0.0/16")
	s := &kubernetes{Cluster: made, t: c.t, etcd: c.etcd, api: start(c.t, api[0], api[1:]...)}
	s.ready()
	b, err := os.ReadFile(made.Kubeconfig)
	if err == nil {
		b = bytes.ReplaceAll(b, []byte(cluster.URL), []byte("https://"+at))
		err = errors.Join(os.WriteFile(path+".new", b, 0o600), os.Rename(path+".new", path))
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

// inCluster waits until a port's owner is a Service of a cluster.
func (p *peers) inCluster(key, service, name string) {
	p.t.Helper()
	eventually(p.t, func() error {
		if o := p.active(key).Owner; o.Kind != port.OwnerService || o.Name != service || o.Cluster != name {
			return fmt.Errorf("%s is owned by %s %q of cluster %q, want Service %q of cluster %q", key, o.Kind, o.Name, o.Cluster, service, name)
		}
		return nil
	})
}

// Two clusters are followed at once, and a client on the host reaches both, through restarts of
// the agent and the host. While one is down the other is right, and a second kubeconfig of one
// counts once.
func TestTwoClusters(t *testing.T) {
	c := startCluster(t)
	dir := t.TempDir()
	first, same, second := filepath.Join(dir, "first.yaml"), filepath.Join(dir, "same.yaml"), filepath.Join(dir, "second.yaml")
	c.writeKubeconfig(first, "token")
	c.writeKubeconfig(same, "token")
	c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
	p := startPeers(t, "--source", "socket,nat,kube", "--kubeconfig", first+","+same+","+second, "--forwards-file", filepath.Join(dir, "forwards.json"))
	p.inCluster("tcp 0.0.0.0:30080", "web", "")

	other := c.second(second)
	other.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30090))
	p.inCluster("tcp 0.0.0.0:30090", "web", "second")
	p.inCluster("tcp 0.0.0.0:30080", "web", "first")
	p.forward("add", "svc/default/web:80", "--to", "18080")
	p.rule("forward svc/default/web:80/tcp", port.Pending, "svc/default/web is in 2 clusters: default/web of cluster first, default/web of cluster second")

	pod := startPod(t, "192.168.77.10")
	for _, of := range []*kubernetes{c, other} {
		of.endpoints("web", "server", pod, obj{"name": "a", "protocol": "TCP", "port": cluster.PodPort})
	}
	reached := func(string) {
		t.Helper()
		p.inCluster("tcp 0.0.0.0:30080", "web", "first")
		p.inCluster("tcp 0.0.0.0:30090", "web", "second")
		p.reach("tcp 0.0.0.0:30080", podSays)
		p.reach("tcp 0.0.0.0:30090", podSays)
	}
	reached("")
	p.restarts(reached)

	other.api.Stop(syscall.SIGKILL)
	eventually(t, func() error {
		if s := p.source("kube:second"); s.State != "stale" {
			return fmt.Errorf("kube:second is %+v, want it stale", s)
		}
		return nil
	})
	c.service("more", "NodePort", nil, svcPort("a", "TCP", 80, 30081))
	p.inCluster("tcp 0.0.0.0:30081", "more", "first")
	p.inCluster("tcp 0.0.0.0:30080", "web", "first")
	if s := p.source("kube"); s.State != "live" {
		t.Errorf("kube is %+v while another cluster is down, want it live", s)
	}
	l, err := p.list()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range l.Sources {
		if s.Name == "kube:first" || s.Name == "kube:same" {
			t.Errorf("the source %+v is listed, though another one follows its cluster", s)
		}
	}

	other.api.run(t)
	other.api.ready(t, func() error { return other.Answers(context.Background()) })
	other.service("back", "NodePort", nil, svcPort("a", "TCP", 80, 30091))
	p.inCluster("tcp 0.0.0.0:30091", "back", "second")
}
