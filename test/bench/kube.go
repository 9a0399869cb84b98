// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

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
	reachProxy = "a client in the guest, by kube-proxy's rule alone"
	reachHost  = "a client on the host, which comes when that is answered"
	reachEarly = "a client on the host, which tries from the beginning"
	reachAPI   = "of all: the API server's answer"
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

func services(ctx context.Context, b *bench) error {
	c, err := startCluster(ctx, b)
	if err != nil {
		return err
	}
	if c.linked, err = c.agent(ctx); err != nil {
		return err
	}
	if c.linked.peer, err = newPeer(ctx, c.linked.link); err != nil {
		return err
	}
	if err := schedule.Sleep(ctx, b.lasting(5*time.Second, 5*time.Second, time.Second)); err != nil { // what the start left to do
		return err
	}
	used, err := c.linked.used()
	if err != nil {
		return err
	}
	b.add(kubeRSS, modeBPF, 0, float64(used.RSS))
	b.extra(kubeRSS, modeBPF, 0, anonymous, float64(used.Anon)/1e6)
	polled, reached := b.of(12, 6, 1), b.of(40, 12, 2)
	if err := c.serveNodes(ctx, reached); err != nil {
		return err
	}
	for i := range b.of(132, 46, 4) {
		if err := c.sample(ctx, uint16(firstNodePort+i), i < polled, i < reached); err != nil {
			return fmt.Errorf("node port %d: %w", firstNodePort+i, err)
		}
	}
	return errors.Join(c.linked.check(ctx), c.hosted.check(ctx))
}

// startCluster starts the API server, and waits until it answers.
func startCluster(ctx context.Context, b *bench) (*kubernetes, error) {
	dir, err := b.tempDir()
	if err != nil {
		return nil, err
	}
	c := &kubernetes{b: b}
	if c.Cluster, err = cluster.New(dir, nil); err != nil {
		return nil, err
	}
	b.cleanup(c.Close)
	if _, err := b.daemon(dir, c.Etcd()); err != nil {
		return nil, err
	}
	log, err := b.daemon(dir, c.APIServer(enclave.NodeAddr))
	if err != nil {
		return nil, err
	}
	b.progress("waiting for the API server")
	if err := eventually(ctx, func() error { return c.Answers(ctx) }); err != nil {
		return nil, log.tail(err)
	}
	return c, nil
}

// agent starts an agent that watches the cluster.
func (c *kubernetes) agent(ctx context.Context) (*guest, error) {
	here, err := netns.Open("/proc/self/ns/net")
	if err != nil {
		return nil, err
	}
	g, err := c.b.newGuest(modes[0], here)
	if err == nil {
		err = g.start("--kubeconfig", c.Kubeconfig)
	}
	if err == nil {
		err = g.ready(ctx)
	}
	return g, err
}

// serveNodes makes the first n Services answer: with a pod that is their endpoint,
// kube-proxy, and an agent with a host peer.
func (c *kubernetes) serveNodes(ctx context.Context, n int) error {
	here, err := netns.Open("/proc/self/ns/net")
	if err != nil {
		return err
	}
	c.b.cleanup(func() { _ = here.Close() })
	pod, err := cluster.NewPod(here, "nodebr", enclave.NodeAddr, podAddr)
	if err != nil {
		return err
	}
	c.b.cleanup(pod.Close)
	for i := range n {
		if err := c.endpoint(ctx, uint16(firstNodePort+i)); err != nil {
			return err
		}
	}
	proxy, err := c.Proxy(ctx, enclave.NodeAddr, "nftables")
	if err != nil {
		return err
	}
	log, err := c.b.daemon(c.Dir, proxy)
	if err != nil {
		return err
	}
	if c.hosted, err = c.agent(ctx); err != nil {
		return err
	}
	if err := c.hosted.startHost(); err != nil {
		return err
	}
	// When one more Service answers, all that started is ready.
	const extra = firstNodePort + 2000
	if err := errors.Join(c.endpoint(ctx, extra), c.create(ctx, extra)); err != nil {
		return err
	}
	if _, err := c.answer(ctx, c.linked.space, enclave.NodeAddr, extra); err != nil {
		return log.tail(err)
	}
	_, err = c.answer(ctx, c.hosted.outside, "127.0.0.1", extra)
	return err
}

// endpoint creates the endpoint of a Service that may come later.
func (c *kubernetes) endpoint(ctx context.Context, n uint16) error {
	return c.Slice(ctx, fmt.Sprintf("s%d", n), "server", podAddr, cluster.Object{"name": "a", "protocol": "TCP", "port": cluster.PodPort})
}

// create creates a Service with a node port.
func (c *kubernetes) create(ctx context.Context, n uint16) error {
	return c.Service(ctx, "default", fmt.Sprintf("s%d", n), "NodePort", nil, cluster.ServicePort("a", "TCP", 80, int(n)))
}

// sample creates a Service and measures all who see it.
func (c *kubernetes) sample(ctx context.Context, n uint16, polled, reached bool) error {
	message := c.linked.peer.expect(natKey(n), "")
	// kube-proxy writes rules once a second at most: it must not have to wait.
	wait := 20 * time.Millisecond
	if reached {
		wait = 1200 * time.Millisecond
	}
	if err := schedule.Sleep(ctx, wait+rand.N(100*time.Millisecond)); err != nil {
		return err
	}
	waits := map[string]func(context.Context) (time.Time, error){modeBPF: message}
	for mode, every := range listEvery {
		if polled {
			waits[mode] = pollEach(ctx, every, func(ctx context.Context) (bool, error) { return c.listed(ctx, n) })
		}
	}
	began := time.Now()
	clients, ctx := errgroup.WithContext(ctx)
	if reached {
		clients.Go(func() error {
			at, err := c.answer(ctx, c.linked.space, enclave.NodeAddr, n)
			if err != nil {
				return err
			}
			c.b.add(serviceReached, reachProxy, 0, at.Sub(began).Seconds())
			at, err = c.answer(ctx, c.hosted.outside, "127.0.0.1", n)
			c.b.add(serviceReached, reachHost, 0, at.Sub(began).Seconds())
			return err
		})
		clients.Go(func() error {
			at, err := c.answer(ctx, c.hosted.outside, "127.0.0.1", n)
			c.b.add(serviceReached, reachEarly, 0, at.Sub(began).Seconds())
			return err
		})
	}
	if err := c.create(ctx, n); err != nil {
		return err
	}
	if reached {
		c.b.add(serviceReached, reachAPI, 0, time.Since(began).Seconds())
	}
	for mode, wait := range waits {
		at, err := wait(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", mode, err)
		}
		c.b.add(serviceMessage, mode, 0, at.Sub(began).Seconds())
	}
	return clients.Wait()
}

// listed reports whether a Service with the node port is listed.
func (c *kubernetes) listed(ctx context.Context, n uint16) (bool, error) {
	all, err := c.Do(ctx, http.MethodGet, cluster.Services, nil)
	return bytes.Contains(all, fmt.Appendf(nil, `"nodePort":%d`, n)), err
}

// answer dials until the pod answers, and returns when.
func (c *kubernetes) answer(ctx context.Context, from *netns.Space, host string, n uint16) (at time.Time, err error) {
	to := netip.AddrPortFrom(netip.MustParseAddr(host), n).String()
	err = from.Do(func() error {
		for end := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
			if ask(to) == cluster.Says {
				at = time.Now()
				return nil
			}
			if ctx.Err() != nil || time.Now().After(end) {
				return errors.Join(fmt.Errorf("%s does not answer", to), ctx.Err())
			}
		}
	})
	return at, err
}

// ask returns what a server sends to a client.
func ask(to string) string {
	c, err := net.DialTimeout("tcp4", to, time.Second)
	if err != nil {
		return ""
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	b, _ := io.ReadAll(c)
	return string(b)
}
