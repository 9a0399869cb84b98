// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// Ports of engines, from enginePort on, and how many objects each has.
const (
	containerdPort = enginePort + 100
	nodePort       = enginePort + 200
	objects        = 4
)

// engine is a real engine.
type engine struct {
	name    string
	needs   []string // programs
	flags   []string // of the agent
	setUp   func() error
	change  func(*rand.Rand) // one operation; it may fail
	answers func() error
	ports   func() (endpoints, error) // by the engine's word
	begin   func() (*process, error)
	main    *process
	others  []*process
}

// cgroupParent holds the cgroups of an enclave, so that it removes them; "" outside of one.
func cgroupParent() string {
	if enclave.Dir() == "" {
		return ""
	}
	return enclave.CgroupParent()
}

// startEngines starts those of these that are installed.
func (c *chaos) startEngines(names []string) error {
	for _, e := range []*engine{c.docker(), c.containerd(), c.kube()} {
		if !slices.Contains(names, e.name) {
			continue
		}
		if missing := slices.IndexFunc(e.needs, func(p string) bool { _, err := exec.LookPath(p); return err != nil }); missing >= 0 {
			fmt.Fprintf(os.Stderr, "chaos: without %s: there is no %s (hack/provision-engines.sh)\n", e.name, e.needs[missing])
			continue
		}
		c.engines = append(c.engines, e) // also if it fails, to be ended
		if err := e.setUp(); err != nil {
			return fmt.Errorf("set up %s: %w", e.name, err)
		}
		c.result.Engines[e.name] = 0
	}
	return nil
}

// run starts the engine until it answers. An engine ends if its parts do not answer each
// other in time.
func (e *engine) run() error {
	for deadline := time.Now().Add(5 * patience); ; time.Sleep(100 * time.Millisecond) {
		if e.main == nil || e.main.Ended() {
			var err error
			if e.main, err = e.begin(); err != nil {
				return err
			}
		}
		err := e.answers()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s does not answer: %w", e.name, err)
		}
	}
}

func (e *engine) restart(sig os.Signal, change func() error) error {
	e.main.Stop(sig)
	if err := change(); err != nil {
		return err
	}
	return e.run()
}

func (e *engine) close() {
	for _, p := range append([]*process{e.main}, e.others...) {
		if p != nil {
			p.Signal(syscall.SIGCONT)
			p.Stop(syscall.SIGKILL)
		}
	}
}

// operate does a random operation on one of some containers.
func operate(rng *rand.Rand, port int, run func(args ...string)) {
	n := rng.IntN(objects)
	name := fmt.Sprint("c", n)
	switch rng.IntN(6) {
	case 0, 1:
		run("run", "-d", "--name", name, "-p", fmt.Sprint(port+n, ":80"), enclave.Image)
	case 2:
		run("kill", name)
	case 3:
		run("start", name)
	case 4:
		run("restart", "-t", "0", name)
	default:
		run("rm", "-f", name)
	}
}

func (c *chaos) docker() *engine {
	e := &engine{name: "docker", needs: []string{"dockerd", "docker"}, flags: []string{"--docker-host", "unix://" + enclave.DockerSocket}}
	command := enclave.Dockerd()
	e.begin = func() (*process, error) { return c.start(c.guest, command[0], command[1:]...) }
	e.answers = func() error { _, err := c.command("", "docker", "version"); return err }
	e.setUp = func() error {
		tar, err := enclave.ImageArchive(c.dir)
		if err != nil {
			return err
		}
		if err := e.run(); err != nil {
			return err
		}
		_, err = c.command("", "docker", "load", "-i", tar)
		return err
	}
	e.change = func(rng *rand.Rand) {
		operate(rng, enginePort, func(args ...string) { _, _ = c.command("", "docker", args...) })
	}
	e.ports = func() (endpoints, error) {
		out, err := c.command("", "docker", "ps", "--format", "{{.Ports}}")
		return published(out), err
	}
	return e
}

// published reads ports as engines list them: "0.0.0.0:8000->80/tcp, :::8000->80/tcp".
func published(list string) endpoints {
	out := endpoints{}
	for field := range strings.FieldsFuncSeq(list, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' }) {
		at, inner, ok := strings.Cut(field, "->")
		colon := strings.LastIndexByte(at, ':')
		if !ok || colon < 0 {
			continue
		}
		_, network, _ := strings.Cut(inner, "/")
		if a, err := netip.ParseAddrPort("[" + strings.Trim(at[:colon], "[]") + "]" + at[colon:]); err == nil {
			out[endpoint{network, netip.AddrPortFrom(a.Addr().Unmap(), a.Port())}] = true
		} else if a, err := netip.ParseAddrPort(at); err == nil {
			out[endpoint{network, a}] = true
		}
	}
	return out
}

func (c *chaos) containerd() *engine {
	const socket = "/run/elsewhere/containerd.sock"
	e := &engine{name: "containerd", needs: []string{"containerd", enclave.Tool("nerdctl")}, flags: []string{"--containerd-socket", socket}}
	config := filepath.Join(c.dir, "containerd.toml")
	nerdctl := func(args ...string) (string, error) {
		if args[0] == "run" {
			args = slices.Insert(args, 1, "--cgroup-parent", "/"+cgroupParent(), "--stop-timeout", "0")
		}
		return c.command("", enclave.Tool("nerdctl"), append([]string{"-a", socket}, args...)...)
	}
	e.begin = func() (*process, error) { return c.start(c.guest, "containerd", "--config", config) }
	e.answers = func() error { _, err := c.command("", "ctr", "-a", socket, "version"); return err }
	e.setUp = func() error {
		text := fmt.Sprintf("version = 2\nroot = \"/var/lib/containerd/chaos\"\nstate = \"/run/containerd\"\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\n  address = %q\n", socket)
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			return err
		}
		dir := filepath.Join(c.dir, "image")
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		tar, err := enclave.ImageArchive(dir)
		if err != nil {
			return err
		}
		if err := e.run(); err != nil {
			return err
		}
		_, err = nerdctl("load", "-i", tar)
		return err
	}
	e.change = func(rng *rand.Rand) {
		operate(rng, containerdPort, func(args ...string) { _, _ = nerdctl(args...) })
	}
	e.ports = func() (endpoints, error) {
		out, err := nerdctl("ps", "--format", "{{.Ports}}")
		return published(out), err
	}
	return e
}

func (c *chaos) kube() *engine {
	e := &engine{name: "kube", needs: []string{"etcd", enclave.Tool("kube-apiserver")}}
	dir := filepath.Join(c.dir, "kube")
	e.flags = []string{"--kubeconfig", filepath.Join(dir, "kubeconfig")}
	var k *cluster.Cluster
	e.begin = func() (*process, error) {
		args := k.APIServer(enclave.NodeAddr, fmt.Sprintf("--service-node-port-range=%d-%d", nodePort, nodePort+objects))
		return c.start(c.guest, args[0], args[1:]...)
	}
	e.answers = func() error {
		ctx, cancel := context.WithTimeout(c.ctx, patience)
		defer cancel()
		return k.Answers(ctx)
	}
	e.setUp = func() (err error) {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		if k, err = cluster.New(dir, nil); err != nil {
			return err
		}
		etcd := k.Etcd()
		p, err := c.start(c.guest, etcd[0], etcd[1:]...)
		if err != nil {
			return err
		}
		e.others = append(e.others, p)
		for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
			if err = k.EtcdAnswers(c.ctx); err == nil {
				return e.run()
			}
		}
		return err
	}
	e.change = func(rng *rand.Rand) { changeService(c.ctx, k, rng) }
	e.ports = func() (endpoints, error) { return nodePorts(c.ctx, k) }
	return e
}

// changeService creates or removes one of some Services.
func changeService(ctx context.Context, k *cluster.Cluster, rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	n := rng.IntN(objects)
	name := fmt.Sprint("s", n)
	if rng.IntN(2) == 0 {
		_, _ = k.Do(ctx, http.MethodDelete, cluster.Services+"/"+name, nil)
		_, _ = k.Do(ctx, http.MethodDelete, cluster.Endpoints+"/"+name+"-1", nil)
		return
	}
	_ = k.Service(ctx, "default", name, "NodePort", nil, cluster.ServicePort("a", "TCP", 80, nodePort+n))
	_ = k.Slice(ctx, name, "pod", "192.168.77.10", cluster.Object{"name": "a", "protocol": "TCP", "port": 8080})
}

func nodePorts(ctx context.Context, k *cluster.Cluster) (endpoints, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	b, err := k.Do(ctx, http.MethodGet, cluster.Services, nil)
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []struct {
			Spec struct{ Ports []struct{ NodePort uint16 } }
		}
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, err
	}
	out := endpoints{}
	for _, s := range list.Items {
		for _, p := range s.Spec.Ports {
			if p.NodePort != 0 {
				out[endpoint{"tcp", netip.AddrPortFrom(netip.IPv4Unspecified(), p.NodePort)}] = true
			}
		}
	}
	return out, nil
}
