// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/cluster"
)

// obeyLabels returns a configuration that obeys labels and denies port 9229.
func obeyLabels(t *testing.T) (config string) {
	t.Helper()
	config = filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(config, []byte("labels: true\nrules:\n  - match: {ports: 9229}\n    action: deny\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return config
}

// at waits until a publication is open at one port of the host, by a rule.
func (p *peers) at(key string, n uint16, rule string) {
	p.t.Helper()
	eventually(p.t, func() error {
		pub := p.active(key)
		if pub.Rule != rule || len(pub.HostAddresses) != 1 || pub.HostAddresses[0].Port() != n {
			return fmt.Errorf("%s is at %s by %s, want port %d by %s", key, pub.HostAddresses, pub.Rule, n, rule)
		}
		return nil
	})
}

// Labels of containers close and move ports, also after restarts of the agent, the host and
// the engine, and what one asks for yields to the port's own publication.
func TestDockerLabels(t *testing.T) {
	p := startPeers(t, "--config", obeyLabels(t), "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
	d := dockerd(t)
	dockerImage(t)
	closed := p.probe("127.0.0.1:8200")
	drun(t, append([]string{"--name", "closed", "-p", "127.0.0.1:8200:8200", "-l", "fairlead.expose=no"}, deniedServer...)...)
	drun(t, append([]string{"--name", "moved", "-p", "127.0.0.1:8201:8200", "-l", "fairlead.host-port=18201", "-l", "fairlead.expose=all"}, deniedServer...)...)
	drun(t, append([]string{"--name", "greedy", "-p", "127.0.0.1:8202:8200", "-l", "fairlead.host-port=9229"}, deniedServer...)...)
	check := func(when string) {
		t.Helper()
		p.state("tcp 127.0.0.1:8200", port.Denied)
		p.at("tcp 127.0.0.1:8201", 18201, "label fairlead.host-port: 18201")
		p.reach("tcp 127.0.0.1:8201", "HTTP/1.")
		p.at("tcp 127.0.0.1:8202", 8202, "default")
		closed.closed(t, when)
	}
	check("start")
	moved, greedy := p.active("tcp 127.0.0.1:8201"), p.active("tcp 127.0.0.1:8202")
	if want := `container "moved": label fairlead.expose: "all": wider than the configuration allows; it has no effect`; !slices.Contains(moved.Warnings, want) {
		t.Errorf("warnings %q, want %q", moved.Warnings, want)
	}
	if want := `host port 9229 is denied by rule 1`; !strings.Contains(strings.Join(greedy.Warnings, ""), want) {
		t.Errorf("warnings %q, want %q", greedy.Warnings, want)
	}
	p.agent.Stop(syscall.SIGTERM)
	p.agent.run(t)
	check("restart of the agent")
	p.host.Stop(syscall.SIGTERM)
	p.host.run(t)
	check("restart of the host")
	d.Stop(syscall.SIGTERM)
	d.run(t)
	dockerReady(t, d)
	for _, name := range []string{"closed", "moved", "greedy"} {
		run(t, "docker", "restart", "-t", "0", name)
	}
	check("restart of the engine")

	// The container that publishes the port by itself goes first, though it comes later.
	drun(t, append([]string{"--name", "own", "-p", "127.0.0.1:18201:8200"}, deniedServer...)...)
	p.at("tcp 127.0.0.1:18201", 18201, "default")
	p.state("tcp 127.0.0.1:8201", port.Conflict)
	run(t, "docker", "rm", "-f", "own")
	check("end of the other container")
	closed.end()
	t.Logf("%d connections to the closed port were tried", closed.tried.Load())
}

// Annotations of Services do as labels, as soon as they are changed. One that asks for more than
// the configuration allows has no effect, and a warning names it, also after restarts of the
// agent and the host.
func TestKubeAnnotations(t *testing.T) {
	c := startCluster(t)
	p := startPeers(t, "--config", obeyLabels(t), "--source", "kube", "--kubeconfig", c.Kubeconfig)
	c.service("web", "NodePort", nil, svcPort("a", "TCP", 80, 30080))
	p.at("tcp 0.0.0.0:30080", 30080, "default")
	annotate := func(v obj) {
		c.must("PATCH", cluster.Services+"/web", obj{"metadata": obj{"annotations": v}})
	}
	annotate(obj{"fairlead.host-port": "30080=8080, 30081=8081"})
	p.at("tcp 0.0.0.0:30080", 8080, "label fairlead.host-port: 30080=8080, 30081=8081")
	annotate(obj{"fairlead.expose": "no"})
	p.state("tcp 0.0.0.0:30080", port.Denied)
	annotate(obj{"fairlead.expose": nil, "fairlead.host-port": nil})
	p.at("tcp 0.0.0.0:30080", 30080, "default")

	c.endpoints("web", "server", startPod(t, "192.168.77.10"), obj{"name": "a", "protocol": "TCP", "port": cluster.PodPort})
	const service = `service "default/web": label or annotation `
	greedy := func(warning string) func(string) {
		return func(string) {
			t.Helper()
			p.warns("tcp 0.0.0.0:30080", service+warning+"; it has no effect")
			p.at("tcp 0.0.0.0:30080", 30080, "default")
			p.reach("tcp 0.0.0.0:30080", podSays)
			p.shut(9229)
		}
	}
	annotate(obj{"fairlead.expose": "all"})
	greedy(`fairlead.expose: "all": wider than the configuration allows`)("")
	annotate(obj{"fairlead.expose": nil, "fairlead.host-port": "9229"})
	denied := greedy(`fairlead.host-port: "9229": host port 9229 is denied by rule 1`)
	denied("")
	p.restarts(denied)
	annotate(obj{"fairlead.host-port": nil})
	p.warns("tcp 0.0.0.0:30080", "")
}

// warns waits until a publication has one warning or, for "", none at all.
func (p *peers) warns(key, text string) {
	p.t.Helper()
	eventually(p.t, func() error {
		if got := strings.Join(p.active(key).Warnings, "\n"); got != text {
			return fmt.Errorf("%s has the warnings %q, want %q", key, got, text)
		}
		return nil
	})
}

// A node of a kind cluster is recognised, and explain shows which labels decide and which
// have no effect.
func TestDockerExplainsLabels(t *testing.T) {
	p := startPeers(t, "--config", obeyLabels(t), "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
	dockerd(t)
	dockerImage(t)
	drun(t, append([]string{
		"--name", "dev-control-plane", "-p", "127.0.0.1:8203:8200", "-l", "io.x-k8s.kind.cluster=dev",
		"-l", "fairlead.host-port=16443", "-l", "fairlead.expose=maybe",
	}, deniedServer...)...)
	p.at("tcp 127.0.0.1:8203", 16443, "label fairlead.host-port: 16443")
	var text string
	eventually(t, func() (err error) {
		text, err = try(binary(), "explain", "8203", "--control", p.control)
		return err
	})
	t.Log(text)
	for _, want := range []string{
		", of the kind cluster dev", "label fairlead.host-port: 16443: allow, host port 16443",
		`container "dev-control-plane": label fairlead.expose: "maybe": want yes, no, loopback or all; it has no effect`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
	if ls := run(t, binary(), "ls", "--control", p.control); !strings.Contains(ls, "port 8203/tcp: label fairlead.host-port: 16443") {
		t.Errorf("ls:\n%s", ls)
	}
	doctor, _ := try(binary(), "doctor", "--control", p.control, "--config", obeyLabels(t))
	if !strings.Contains(doctor, `label fairlead.expose: "maybe"`) {
		t.Errorf("doctor:\n%s", doctor)
	}
}
