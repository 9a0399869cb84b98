// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
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
	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/netns"
)

const (
	kubeMeasure = "Service is created → message on the link"
	kubeReach   = "Service is created → a server behind it answers"
	kubeRSS     = "memory of an agent beside a Kubernetes API server (RSS)"
)

// kubeModes are the agent, which watches, and pollers, which list all Services.
var kubeModes = []struct {
	name string
	poll time.Duration
}{{modeBPF, 0}, {modeList1, time.Second}, {modeList3, 3 * time.Second}}

// The pollers of what no kernel tells: they ask an API for all there is.
const (
	modeList1 = "list 1 s"
	modeList3 = "list 3 s"
)

// The steps of kubeReach: the whole, and what of it is others'.
const (
	reachProxy = "a client in the guest, by kube-proxy's rule alone"
	reachHost  = "a client on the host, which comes when that is answered"
	reachEarly = "a client on the host, which tries from the beginning"
	reachAPI   = "of all: the API server's answer"
)

func kubePart() Part {
	return Part{
		Section: report.Section{
			Name: "kube", Title: "How soon a Service is there",
			About: `A Service with a node port is created at a real API server (with etcd), beside a real kube-proxy (nftables), and its
endpoint, which was there before, is a real server in a namespace of its own. The clock starts when the request is sent:
what happens before the API server has answered counts, and its answer is shown beside.

fairlead's agent watches Services in each of its modes, so that its polling mode is none here: it is compared with pollers
that the benchmark brings, which list all Services each second or each three, and publish nothing. All see the same Service.

The second table is about use. A client in the guest dials the node port until the server answers: that is when kube-proxy's
rule is there, with or without fairlead, and its time is kube-proxy's. Clients on the host dial the port of a host peer until the
server answers them: one comes when the rule is there, and what it needs beyond the first line is fairlead's. The other tries all
the time, and so comes between the message and the rule: the agent then dials the Service's own address, which nothing
serves yet, and beside it the node port 250 ms later.`,
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
	if err := g.begin(e.Program, "--kubeconfig", c.Kubeconfig); err != nil {
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
	if err := c.serveNodes(ctx, e); err != nil {
		return err
	}
	s := &kubeSamples{cluster: c, peer: p, told: make([][]float64, len(kubeModes)), failed: make([]error, len(kubeModes))}
	// The agent alone has many samples; some are reached too, and some of them are
	// seen by the pollers.
	polled, reached := e.Of(12, 6, 1), e.Of(40, 12, 2)
	for i := range e.Of(132, 46, 4) {
		if err := s.one(ctx, uint16(kubeFirst+i), i < polled, i < reached); err != nil {
			return err
		}
	}
	s.failed[0] = g.check(ctx)
	for i, m := range kubeModes {
		cell := report.Cell{Measure: kubeMeasure, Mode: m.name, Unit: "s"}
		if s.failed[i] != nil {
			e.Fail(cell, s.failed[i])
			continue
		}
		e.Samples(cell, s.told[i])
	}
	for i, step := range []string{reachProxy, reachHost, reachEarly, reachAPI} {
		cell := report.Cell{Measure: kubeReach, Mode: step, Unit: "s"}
		if err := c.hosted.check(ctx); (step == reachHost || step == reachEarly) && err != nil {
			e.Fail(cell, err)
			continue
		}
		e.Samples(cell, s.reach[i])
	}
	return ctx.Err()
}

// kubeFirst is the first node port; its Services are not all made.
const kubeFirst = 30000

// kubeSamples are of Services, in the order of kubeModes and of the steps.
type kubeSamples struct {
	cluster *kubernetes
	peer    *peer
	told    [][]float64
	failed  []error
	reach   [4][]float64
}

// one creates a Service and takes the times of all who see it.
func (s *kubeSamples) one(ctx context.Context, n uint16, polled, reached bool) error {
	c := s.cluster
	said := s.peer.expect(port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n})
	// kube-proxy writes rules once a second at most: it is met when it may.
	wait := 20 * time.Millisecond
	if reached {
		wait = 1200 * time.Millisecond
	}
	if err := pause(ctx, wait+mrand.N(100*time.Millisecond)); err != nil {
		return err
	}
	seen := make([]chan time.Time, len(kubeModes))
	for j, m := range kubeModes[1:] {
		if !polled {
			break
		}
		seen[j+1] = make(chan time.Time, 1)
		go func() {
			defer close(seen[j+1])
			at, err := c.poll(ctx, n, m.poll)
			if s.failed[j+1] = errors.Join(s.failed[j+1], err); err == nil {
				seen[j+1] <- at
			}
		}()
	}
	if polled {
		if err := pause(ctx, mrand.N(100*time.Millisecond)); err != nil {
			return err
		}
	}
	began := time.Now()
	answers := make(chan error, 2)
	var proxy, later, early time.Time
	if reached {
		guest, host := netip.AddrPortFrom(netip.MustParseAddr(kubeNode), n), netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), n)
		go func() {
			var err error
			if proxy, err = answer(ctx, c.guest.space, guest, cluster.Says); err == nil {
				later, err = answer(ctx, c.hosted.outside, host, cluster.Says)
			}
			answers <- err
		}()
		go func() {
			var err error
			early, err = answer(ctx, c.hosted.outside, host, cluster.Says)
			answers <- err
		}()
	}
	if err := c.Service(ctx, "default", fmt.Sprintf("s%d", n), "NodePort", nil, cluster.ServicePort("a", "TCP", 80, int(n))); err != nil {
		return err
	}
	made := time.Now()
	at, err := s.peer.wait(ctx, said)
	if err != nil {
		return fmt.Errorf("node port %d: %w", n, err)
	}
	s.told[0] = append(s.told[0], at.Sub(began).Seconds())
	if reached {
		if err := errors.Join(<-answers, <-answers); err != nil {
			return fmt.Errorf("node port %d: %w", n, err)
		}
		for i, at := range []time.Time{proxy, later, early, made} {
			s.reach[i] = append(s.reach[i], at.Sub(began).Seconds())
		}
	}
	for j, c := range seen {
		if c == nil {
			continue
		}
		if at, ok := <-c; ok {
			s.told[j] = append(s.told[j], at.Sub(began).Seconds())
		}
	}
	return nil
}

// answer dials until somebody answers with text, and says when.
func answer(ctx context.Context, from *netns.Space, to netip.AddrPort, text string) (at time.Time, err error) {
	err = from.Do(func() error {
		for end := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
			got, err := hear(to)
			if err == nil && got == text {
				at = time.Now()
				return nil
			}
			if ctx.Err() != nil || time.Now().After(end) {
				return errors.Join(fmt.Errorf("%s does not answer within %v: it says %q", to, limit, got), err, ctx.Err())
			}
		}
	})
	return at, err
}

// hear returns what whoever listens there says to a client.
func hear(to netip.AddrPort) (string, error) {
	c, err := net.DialTimeout("tcp4", to.String(), time.Second)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	b, err := io.ReadAll(c)
	return string(b), err
}

// kubernetes is a cluster, and a guest without an agent yet, all in one namespace.
type kubernetes struct {
	*cluster.Cluster
	guest  *guest
	hosted *guest // beside it, with a host peer
	pod    *cluster.Pod
	dir    string
}

// kubeNode is the address of the guest, on a network of its own.
const kubeNode = "192.168.77.1"

// startCluster starts it and waits until it answers; the caller closes it.
func startCluster(ctx context.Context, e *Env) (_ *kubernetes, err error) {
	dir, err := e.Dir()
	if err != nil {
		return nil, err
	}
	c := &kubernetes{dir: dir}
	if c.guest, err = newSpaces(dir, modes[0]); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if err := c.guest.space.Do(func() error {
		for _, args := range []string{"link add node type bridge", "addr add " + kubeNode + "/24 dev node", "link set node up", "route add default via 192.168.77.254"} {
			if out, err := exec.CommandContext(ctx, "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", args, err, out)
			}
		}
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) // of this namespace, as it is this thread's
	}); err != nil {
		return nil, err
	}
	if c.Cluster, err = cluster.New(dir, c.guest.space.Dial); err != nil {
		return nil, err
	}
	for _, args := range [][]string{c.Etcd(), c.APIServer(kubeNode)} {
		if err := c.quiet(args); err != nil {
			return nil, err
		}
	}
	e.Progress("waiting for the API server")
	for range 4 { // it takes longer where the machine has much to do
		if err = eventually(ctx, func() error { return c.Answers(ctx) }); err == nil {
			return c, nil
		}
	}
	return nil, errors.Join(err, c.said(c.APIServer("")[0]))
}

// quiet starts a program in the guest with its output in a file: it would be in the way.
func (c *kubernetes) quiet(args []string) error {
	log := filepath.Join(c.dir, filepath.Base(args[0])+".log")
	err := c.guest.start(c.guest.space, "/bin/sh", append([]string{"-c", `exec "$0" "$@" >"` + log + `" 2>&1`}, args...)...)
	if err != nil {
		return fmt.Errorf("%s, which hack/provision-engines.sh provides: %w", args[0], err)
	}
	return nil
}

// said is the end of what a program put out.
func (c *kubernetes) said(program string) error {
	b, err := os.ReadFile(filepath.Join(c.dir, filepath.Base(program)+".log"))
	if err != nil {
		return err
	}
	return fmt.Errorf("the end of its output:\n%s", b[max(0, len(b)-1000):])
}

// serveNodes starts what makes Services answer: a pod with the endpoint of each
// node port, kube-proxy, and an agent with a host peer.
func (c *kubernetes) serveNodes(ctx context.Context, e *Env) (err error) {
	const address = "192.168.77.10"
	if c.pod, err = cluster.NewPod(c.guest.space, "node", kubeNode, address); err != nil {
		return err
	}
	for i := range e.Of(40, 12, 2) {
		ports := cluster.Object{"name": "a", "protocol": "TCP", "port": cluster.PodPort}
		if err := c.Slice(ctx, fmt.Sprintf("s%d", kubeFirst+i), "server", address, ports); err != nil {
			return err
		}
	}
	proxy, err := c.Proxy(ctx, kubeNode, "nftables")
	if err != nil {
		return err
	}
	if err := c.quiet(proxy); err != nil {
		return err
	}
	if c.hosted, err = c.guest.beside(filepath.Join(c.dir, "hosted"), modes[0]); err != nil {
		return err
	}
	if err := c.hosted.begin(e.Program, "--kubeconfig", c.Kubeconfig); err != nil {
		return err
	}
	if err := c.hosted.start(c.hosted.outside, e.Program, "host", "--link-token=", "--connect", c.hosted.link,
		"--control", filepath.Join(c.dir, "host", "s"), "--log-level", "error"); err != nil {
		return err
	}
	if _, err := c.hosted.ready(ctx); err != nil {
		return err
	}
	// One more Service: what starts has settled when it is answered.
	n := uint16(kubeFirst + 2000)
	if err := c.Slice(ctx, fmt.Sprintf("s%d", n), "server", address, cluster.Object{"name": "a", "protocol": "TCP", "port": cluster.PodPort}); err != nil {
		return err
	}
	if err := c.Service(ctx, "default", fmt.Sprintf("s%d", n), "NodePort", nil, cluster.ServicePort("a", "TCP", 80, int(n))); err != nil {
		return err
	}
	for range 3 {
		if _, err = answer(ctx, c.guest.space, netip.AddrPortFrom(netip.MustParseAddr(kubeNode), n), cluster.Says); err == nil {
			_, err = answer(ctx, c.hosted.outside, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), n), cluster.Says)
			return err
		}
	}
	return errors.Join(err, c.said(proxy[0]))
}

func (c *kubernetes) close() {
	if c.Cluster != nil {
		c.Close()
	}
	if c.hosted != nil {
		c.hosted.close()
	}
	if c.pod != nil {
		c.pod.Close()
	}
	for _, p := range c.guest.procs {
		_ = p.Process.Kill() // a server would see all its watches out
	}
	c.guest.close()
}

// poll lists all Services until one has the node port, from a moment of its own
// within an interval on, and says when.
func (c *kubernetes) poll(ctx context.Context, n uint16, every time.Duration) (time.Time, error) {
	for next := mrand.N(every); ; next = every {
		if err := pause(ctx, next); err != nil {
			return time.Time{}, err
		}
		b, err := c.Do(ctx, http.MethodGet, cluster.Services, nil)
		if err != nil {
			return time.Time{}, err
		}
		if bytes.Contains(b, fmt.Appendf(nil, `"nodePort":%d`, n)) {
			return time.Now(), nil
		}
	}
}
