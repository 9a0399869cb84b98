// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/netns"
)

const (
	kubeRSS        = "memory of an agent beside a Kubernetes API server (RSS)"
	serviceMessage = "Service is created → message on the link"
	serviceReached = "Service is created → a server behind it answers"
)

// The clients of serviceReached; the first has nothing to do with fairlead.
const (
	reachProxy = "client in the guest, through kube-proxy alone"
	reachHost  = "client on the host, after the guest got its answer"
	reachEarly = "client on the host, trying from the beginning"
	reachAPI   = "API server's response (included above)"
)

func kubePart() part {
	return part{"kube", "kube", []measure{
		{name: kubeRSS, unit: "B", modes: []string{modeBPF}},
		{name: serviceMessage, unit: "s", modes: listModes},
		{name: serviceReached, unit: "s", modes: []string{reachProxy, reachHost, reachEarly, reachAPI}},
	}, inEnclave(services)}
}

// kubernetes is a cluster, an agent whose link the benchmark holds, and one with a host
// peer.
type kubernetes struct {
	*cluster.Cluster
	b              *bench
	linked, hosted *guest
}

// firstNodePort is the node port of the first Service.
const firstNodePort = 30_000

const podAddr = "192.168.77.10"

func services(ctx context.Context, b *bench) {
	c := startCluster(ctx, b)
	c.linked = c.agent(ctx)
	c.linked.peer = must(newPeer(ctx, c.linked.link))
	check(schedule.Sleep(ctx, b.lasting(5*time.Second, 5*time.Second, time.Second))) // what the start left to do
	used := c.linked.used()
	b.add(kubeRSS, modeBPF, 0, float64(used.RSS))
	b.extra(kubeRSS, modeBPF, 0, anonymous, float64(used.Anon)/1e6)
	polled, reached := b.of(12, 6, 1), b.of(40, 12, 2)
	c.serveNodes(ctx, reached)
	for i := range b.of(132, 46, 4) {
		c.sample(ctx, uint16(firstNodePort+i), i < polled, i < reached)
	}
	c.linked.check(ctx)
	c.hosted.check(ctx)
}

// startCluster starts the API server, and waits until it answers.
func startCluster(ctx context.Context, b *bench) *kubernetes {
	dir := b.tempDir()
	c := &kubernetes{Cluster: must(cluster.New(dir, nil)), b: b}
	b.cleanup(c.Close)
	b.daemon(ctx, dir, c.Etcd(), func() error { return c.EtcdAnswers(ctx) })
	b.daemon(ctx, dir, c.APIServer(enclave.NodeAddr), func() error { return c.Answers(ctx) })
	return c
}

// agent starts an agent that watches the cluster.
func (c *kubernetes) agent(ctx context.Context) *guest {
	g := c.b.newGuest(modes[0], must(netns.Open("/proc/self/ns/net")))
	g.start("--kubeconfig", c.Kubeconfig)
	g.ready(ctx)
	return g
}

// serveNodes makes the first n Services answer: with a pod that is their endpoint,
// kube-proxy, and an agent with a host peer.
func (c *kubernetes) serveNodes(ctx context.Context, n int) {
	here := must(netns.Open("/proc/self/ns/net"))
	c.b.cleanup(func() { _ = here.Close() })
	c.b.cleanup(must(cluster.NewPod(here, "nodebr", enclave.NodeAddr, podAddr)).Close)
	for i := range n {
		c.endpoint(ctx, uint16(firstNodePort+i))
	}
	c.hosted = c.agent(ctx)
	c.hosted.startHost()
	// When one more Service answers, all that started is ready.
	const extra = firstNodePort + 2000
	c.endpoint(ctx, extra)
	c.create(ctx, extra)
	c.b.daemon(ctx, c.Dir, must(c.Proxy(ctx, enclave.NodeAddr, "nftables")), func() error {
		return attempt(func() { c.answer(ctx, c.linked.space, enclave.NodeAddr, extra) })
	})
	c.answer(ctx, c.hosted.outside, "127.0.0.1", extra)
}

// endpoint creates the endpoint of a Service that may come later.
func (c *kubernetes) endpoint(ctx context.Context, n uint16) {
	check(c.Slice(ctx, fmt.Sprintf("s%d", n), "server", podAddr, cluster.Object{"name": "a", "protocol": "TCP", "port": cluster.PodPort}))
}

// create creates a Service with a node port.
func (c *kubernetes) create(ctx context.Context, n uint16) {
	check(c.Service(ctx, "default", fmt.Sprintf("s%d", n), "NodePort", nil, cluster.ServicePort("a", "TCP", 80, int(n))))
}

// sample creates a Service and measures all who see it.
func (c *kubernetes) sample(ctx context.Context, n uint16, polled, reached bool) {
	waits := map[string]wait{modeBPF: c.linked.peer.expect(natKey(n), "")}
	// kube-proxy writes rules once a second at most: it must not have to wait.
	pause := 20 * time.Millisecond
	if reached {
		pause = 1200 * time.Millisecond
	}
	check(schedule.Sleep(ctx, pause+rand.N(100*time.Millisecond)))
	for mode, every := range listEvery {
		if polled {
			waits[mode] = pollEach(ctx, every, func() bool { return c.listed(ctx, n) })
		}
	}
	began := time.Now()
	took := func(mode string, at time.Time) { c.b.add(serviceReached, mode, 0, at.Sub(began).Seconds()) }
	clients := []func(context.Context){func(ctx context.Context) {
		c.create(ctx, n)
		if reached {
			took(reachAPI, time.Now())
		}
		for mode, seen := range waits {
			c.b.add(serviceMessage, mode, 0, seen(ctx).Sub(began).Seconds())
		}
	}}
	if reached {
		clients = append(clients, func(ctx context.Context) {
			took(reachProxy, c.answer(ctx, c.linked.space, enclave.NodeAddr, n))
			took(reachHost, c.answer(ctx, c.hosted.outside, "127.0.0.1", n))
		}, func(ctx context.Context) {
			took(reachEarly, c.answer(ctx, c.hosted.outside, "127.0.0.1", n))
		})
	}
	together(ctx, clients, func(ctx context.Context, client func(context.Context)) { client(ctx) })
}

// listed reports whether a Service with the node port is listed.
func (c *kubernetes) listed(ctx context.Context, n uint16) bool {
	return bytes.Contains(must(c.Do(ctx, http.MethodGet, cluster.Services, nil)), fmt.Appendf(nil, `"nodePort":%d`, n))
}

// answer dials until the pod answers, and returns when.
func (c *kubernetes) answer(ctx context.Context, from *netns.Space, host string, n uint16) (at time.Time) {
	to := netip.AddrPortFrom(netip.MustParseAddr(host), n).String()
	inside(from, func() {
		for end := time.Now().Add(limit); said(to) != cluster.Says; {
			if time.Now().After(end) {
				check(fmt.Errorf("%s does not answer", to))
			}
			check(schedule.Sleep(ctx, time.Millisecond))
		}
		at = time.Now()
	})
	return at
}

// said returns what a server sends to a client.
func said(to string) string {
	c, err := net.DialTimeout("tcp4", to, time.Second)
	if err != nil {
		return ""
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	b, _ := io.ReadAll(c)
	return string(b)
}
