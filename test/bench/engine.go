// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

const (
	containerPublished = "ContainerPublished"
	containerHost      = "ContainerInGuestNetwork"
	serviceMessage     = "Service"
	kubeMemory         = "KubeMemory"
)

// Pollers list all that an API has.
const modeList1, modeList3 = "list-1s", "list-3s"

var listModes = []string{modeBPF, modeList1, modeList3}

func enginePart() part {
	return part{"engine", "engine", []measure{
		{name: containerPublished, title: "container starts → message with it as the owner of a published port", unit: "sec", modes: listModes},
		{name: containerHost, title: "container starts → message with it as the owner of a port in the guest's network", unit: "sec", modes: ownModes},
	}, inEnclave(containers)}
}

func kubePart() part {
	return part{"kube", "kube", []measure{
		{name: kubeMemory, title: "memory of an agent beside a Kubernetes API server", unit: "RSS-B", modes: []string{modeBPF}},
		{name: serviceMessage, title: "Service is created → message on the link", unit: "sec", modes: listModes},
	}, inEnclave(services)}
}

// listers adds pollers to waits.
func listers(ctx context.Context, waits map[string]wait, look func() bool) {
	waits[modeList1] = poller{modeList1, time.Second, look}.wait(ctx)
	waits[modeList3] = poller{modeList3, 3 * time.Second, look}.wait(ctx)
}

// containers starts containers that publish a port, and others that have the guest's
// network.
func containers(ctx context.Context, b *bench) {
	dir := b.tempDir()
	b.daemon(ctx, dir, enclave.Dockerd(), func() error { return exec.CommandContext(ctx, "docker", "version").Run() })
	docker(ctx, "load", "-i", must(enclave.ImageArchive(dir)))
	var guests []*guest
	for _, m := range modes {
		guests = append(guests, b.guestHere(ctx, m, "--docker-host", "unix://"+enclave.DockerSocket))
	}
	polled := b.of(14, 6, 1) // of all rounds, because pollers are slow
	for i := range b.of(104, 30, 2) {
		published, host := tcpKey(uint16(20_000+2*i)), tcpKey(uint16(20_001+2*i))
		name := fmt.Sprintf("bench-%d", i)
		waits := map[string]wait{modeBPF: guests[0].peer.expect(published, name)}
		if i < polled {
			listers(ctx, waits, func() bool {
				return strings.Contains(docker(ctx, "ps", "--format", "{{.Names}} {{.Ports}}"), name+" 127.")
			})
		}
		b.container(ctx, containerPublished, waits, name, "-p", published.AddrPort().String()+":80", enclave.Image, "httpd", "-f")
		waits = map[string]wait{}
		for _, g := range guests {
			if i < polled || g.mode.poll == 0 {
				waits[g.mode.name] = g.peer.expect(host, name)
			}
		}
		b.container(ctx, containerHost, waits, name, "--network", "host", enclave.Image, "httpd", "-f", "-p", host.AddrPort().String())
	}
	for _, g := range guests {
		g.check(ctx)
	}
}

// container starts a container, measures from the time that the engine notes, and
// removes it.
func (b *bench) container(ctx context.Context, measure string, waits map[string]wait, name string, args ...string) {
	check(schedule.Sleep(ctx, rand.N(300*time.Millisecond)))
	docker(ctx, append([]string{"run", "-d", "--name", name}, args...)...)
	began := must(time.Parse(time.RFC3339Nano, docker(ctx, "inspect", "-f", "{{.State.StartedAt}}", name)))
	b.seen(ctx, measure, 0, began, waits)
	docker(ctx, "rm", "-f", name)
}

// docker runs the engine's client and returns what it prints.
func docker(ctx context.Context, args ...string) string {
	return strings.TrimSpace(runIn(nil, exec.CommandContext(ctx, "docker", args...)))
}

// services creates Services with node ports, of an API server without kube-proxy.
func services(ctx context.Context, b *bench) {
	dir := b.tempDir()
	c := must(cluster.New(dir, nil))
	b.cleanup(c.Close)
	b.daemon(ctx, dir, c.Etcd(), func() error { return c.EtcdAnswers(ctx) })
	b.daemon(ctx, dir, c.APIServer(enclave.NodeAddr), func() error { return c.Answers(ctx) })
	g := b.guestHere(ctx, modes[0], "--kubeconfig", c.Kubeconfig)
	check(schedule.Sleep(ctx, b.lasting(5*time.Second, 5*time.Second, time.Second))) // what the start left to do
	b.add(kubeMemory, modeBPF, 0, memory(g.agent.used()))
	for i := range b.of(132, 46, 4) {
		n := 30_000 + i
		waits := map[string]wait{modeBPF: g.peer.expect(natKey(uint16(n)), "")}
		check(schedule.Sleep(ctx, 20*time.Millisecond+rand.N(100*time.Millisecond)))
		if i < b.of(12, 6, 1) { // pollers are slow
			listers(ctx, waits, func() bool {
				return strings.Contains(string(must(c.Do(ctx, "GET", cluster.Services, nil))), `"nodePort":`+strconv.Itoa(n))
			})
		}
		began := time.Now()
		check(c.Service(ctx, "default", fmt.Sprintf("s%d", n), "NodePort", nil, cluster.ServicePort("a", "TCP", 80, n)))
		b.seen(ctx, serviceMessage, 0, began, waits)
	}
	g.check(ctx)
}

// guestHere starts an agent in this namespace and connects to it.
func (b *bench) guestHere(ctx context.Context, m mode, flags ...string) *guest {
	g := b.newGuest(m, b.here())
	g.start(flags...)
	g.connect(ctx)
	return g
}

// daemon starts a program that lives until the part ends, and waits until it answers.
func (b *bench) daemon(ctx context.Context, dir string, args []string, answers func() error) {
	log := must(os.Create(filepath.Join(dir, filepath.Base(args[0])+".log")))
	defer func() { _ = log.Close() }()
	cmd := exec.Command(args[0], args[1:]...) // hack/provision-engines.sh provides it
	cmd.Stdout, cmd.Stderr = log, log
	b.start(b.here(), cmd)
	b.progress("waiting for %s", filepath.Base(args[0]))
	if err := eventually(ctx, answers); err != nil {
		text, _ := os.ReadFile(log.Name())
		check(fmt.Errorf("%s: %w\n%s", args[0], err, text[max(0, len(text)-1000):]))
	}
}

// here is the namespace of this process.
func (b *bench) here() *netns.Space {
	s := must(netns.Open("/proc/self/ns/net"))
	b.cleanup(func() { _ = s.Close() })
	return s
}
