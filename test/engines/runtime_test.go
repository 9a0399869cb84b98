// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/probe"
)

// onHost is the same peers, of which the host is asked and told what to do.
func (p *peers) onHost() *peers {
	s := *p
	s.control = p.hostControl
	return &s
}

// do runs a command of fairlead, and returns its output.
func (p *peers) do(args ...string) string {
	p.t.Helper()
	return run(p.t, binary(), append(args, "--control", p.control)...)
}

// outsideRun runs a command in the host's namespace, and returns its output.
func (p *peers) outsideRun(name string, args ...string) (out string, err error) {
	errRun := p.outside.Do(func() error {
		out, err = try(name, args...)
		return nil
	})
	return out, errors.Join(err, errRun)
}

// gets waits until curl on the host gets a text at a URL.
func (p *peers) gets(url, text string) {
	p.t.Helper()
	eventually(p.t, func() error {
		got, err := p.outsideRun("curl", "-sS", "--noproxy", "*", "--max-time", "10", url)
		if err == nil && !strings.Contains(got, text) {
			err = fmt.Errorf("%s says %q, want %q", url, got, text)
		}
		return err
	})
}

// getsAt is gets of a port of the loopback.
func (p *peers) getsAt(n int, text string) {
	p.t.Helper()
	p.gets(fmt.Sprintf("http://127.0.0.1:%d/", n), text)
}

// shutAt waits until nobody listens at an address of the host.
func (p *peers) shutAt(address string) {
	p.t.Helper()
	eventually(p.t, func() error {
		return probe.WantClosed(func() (net.Conn, error) { return p.outside.Dial("tcp", address) })
	})
}

// restarts kills the agent and then the host, runs each again, and checks after each.
func (p *peers) restarts(check func(when string)) {
	p.t.Helper()
	p.agent.Stop(syscall.SIGKILL)
	p.agent.run(p.t)
	check("restart of the agent")
	p.host.Stop(syscall.SIGKILL)
	p.host.run(p.t)
	check("restart of the host")
}

// restartDocker ends the engine, and with it its containers, and runs it again, which runs
// those again that have a policy for it.
func restartDocker(t testing.TB, d *daemon, names ...string) {
	t.Helper()
	d.Stop(syscall.SIGTERM)
	d.run(t)
	dockerReady(t, d)
	for _, name := range names {
		replaced(t, 0, dockerPID(name))
	}
}

// page is the image and command of a container whose web server, at port 80, says a text.
func page(says string) []string {
	return []string{"bb", "sh", "-c", "echo '" + says + "' >/tmp/index.html; exec httpd -f -p 80 -h /tmp"}
}

// servesAt runs a container that says its name at a port of the guest, and runs again with its engine.
func servesAt(t testing.TB, name string, n int, flags ...string) {
	t.Helper()
	args := append([]string{"--name", name, "--restart", "always", "-p", fmt.Sprintf("127.0.0.1:%d:80", n)}, flags...)
	drun(t, append(args, page("this is "+name)...)...)
}

// What was added at run time is so through restarts of the agent, the host and the engine:
// ports of containers at another host port, denied and moved from a port that is in
// use. What is closed is never open meanwhile, and all of it is undone.
func TestDockerForwardsAtRunTime(t *testing.T) {
	d := dockerd(t)
	dockerImage(t)
	dir := t.TempDir()
	p := startPeersWith(t, []string{"--forwards-file", filepath.Join(dir, "host-forwards.json")}, "--source", "socket,nat,docker",
		"--docker-host", "unix://"+dockerSocket, "--forwards-file", filepath.Join(dir, "forwards.json"))
	host := p.onHost()
	other, err := p.outside.Listen("tcp4", "127.0.0.1:8040") // of another program on the host
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	ports := map[string]int{"led": 8000, "asleep": 8010, "denied": 8030, "crowded": 8040}
	var names []string
	for name, n := range ports {
		names = append(names, name)
		servesAt(t, name, n)
		if name != "crowded" {
			p.getsAt(n, "this is "+name)
		}
	}
	p.state("tcp 127.0.0.1:8040", port.Conflict)

	held, err := p.outside.Dial("tcp", "127.0.0.1:8010")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Close() }()
	p.forward("add", "8000", "--to", "18000")
	p.do("deny", "--owner", "asleep")
	host.do("deny", "8030")
	host.forward("add", "8040", "--on-conflict", "next")
	_ = held.SetReadDeadline(time.Now().Add(limit()))
	if _, err := io.Copy(io.Discard, held); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a connection outlives the denial of its port")
	}

	closed := []string{"asleep", "denied"}
	var probes []*prober
	check := func(when string) {
		t.Helper()
		p.getsAt(18000, "this is led")
		p.shut(8000)
		p.getsAt(8041, "this is crowded")
		for _, name := range closed {
			key := fmt.Sprintf("tcp 127.0.0.1:%d", ports[name])
			host.state(key, port.Denied)
			p.state(key, port.Denied)
			p.shut(uint16(ports[name]))
		}
		for _, b := range probes {
			b.closed(t, when)
		}
	}
	check("the commands")
	for _, name := range closed {
		probes = append(probes, p.probe(fmt.Sprintf("127.0.0.1:%d", ports[name])))
	}
	_ = other.Close() // the crowded port stays where its users know it
	p.restarts(check)
	restartDocker(t, d, names...)
	check("restart of the engine")
	for _, b := range probes {
		b.end()
		t.Logf("%d connections to a closed port were tried", b.tried.Load())
	}

	p.forward("rm", "8000")
	p.do("allow", "--owner", "asleep")
	host.do("allow", "8030")
	host.forward("rm", "8040")
	undone := func(string) {
		t.Helper()
		for name, n := range ports {
			p.getsAt(n, "this is "+name)
		}
		p.shut(18000)
		p.shut(8041)
		for _, of := range []*peers{p, host} {
			if out := of.forward("ls"); out != "Nothing was added." {
				t.Errorf("left of the rules:\n%s", out)
			}
		}
	}
	undone("")
	p.restarts(undone)
}

// A container's port that is exposed is open to other machines, and containers are reached by
// their own names and those of labels, through restarts of the agent, the host and the engine.
func TestDockerExposedAndNamed(t *testing.T) {
	const lan = "192.0.2.10"
	d := dockerd(t)
	dockerImage(t)
	dir := t.TempDir()
	p := startPeersWith(t, []string{"--bind", "asked", "--names", "127.0.0.1:80", "--forwards-file", filepath.Join(dir, "host-forwards.json")},
		"--config", obeyLabels(t), "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
	host := p.onHost()
	for _, args := range []string{"link add lan0 type veth peer name far0", "link set far0 up", "addr add " + lan + "/24 dev lan0", "link set lan0 up"} {
		if _, err := p.outsideRun("ip", strings.Fields(args)...); err != nil {
			t.Fatal(err)
		}
	}
	servesAt(t, "web", 8000)
	servesAt(t, "front", 8010, "-l", "fairlead.name=shop")
	p.getsAt(8000, "this is web")
	p.shutAt(lan + ":8000")

	expose := func(flags ...string) string {
		t.Helper()
		out, err := p.outsideRun(binary(), append([]string{"expose", "8000", "--control", host.control}, flags...)...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if out := expose("--for", "2h"); !strings.Contains(out, "  "+lan+":8000\n") {
		t.Errorf("expose says\n%s", out)
	}
	check := func(string) {
		t.Helper()
		p.gets("http://"+lan+":8000/", "this is web")
		p.getsAt(8000, "this is web")
		p.getsAt(8010, "this is front")
		p.shutAt(lan + ":8010")
		p.gets("http://web.localhost/", "this is web")
		p.gets("http://front.localhost/", "this is front")
		p.gets("http://shop.localhost/", "this is front")
		for _, of := range []*peers{p, host} {
			of.prints("port 8000/tcp: open to other machines until ", "ls")
		}
		host.prints("shop.localhost", "ls", "--names")
	}
	check("")
	p.restarts(check)
	restartDocker(t, d, "web", "front")
	check("")

	expose("--end")
	p.shutAt(lan + ":8000")
	p.getsAt(8000, "this is web")
	run(t, "docker", "rm", "-f", "front")
	p.gets("http://shop.localhost/", "Nothing that is published has this name")
	p.gets("http://web.localhost/", "this is web")
}
