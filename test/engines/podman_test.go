// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/gvtools"
)

const podmanGateway = "gateway.containers.internal" // where Podman finds gvproxy

// podmanMachine is a guest like a Podman machine: Podman with netavark, and a tap device
// to a gvproxy outside. It has no marker yet.
type podmanMachine struct {
	t       testing.TB
	outside *netns.Space
}

func newPodmanMachine(t testing.TB) *podmanMachine {
	t.Helper()
	dir := t.TempDir()
	if err := gvtools.Build(dir); err != nil {
		t.Fatal(err)
	}
	outside, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = outside.Close() })
	m := &podmanMachine{t, outside}
	configurePodman(t)
	hosts := "127.0.0.1 localhost\n192.168.127.1 " + podmanGateway + "\n"
	if err := os.WriteFile("/etc/hosts", []byte(hosts), 0o644); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "network.sock")
	(&daemon{t: t, in: outside, args: gvtools.Proxy(dir, socket).Args}).start()
	(&daemon{t: t, args: gvtools.VM(dir, socket).Args}).start()
	eventually(t, func() error {
		if err := gvtools.Configure(); err != nil {
			return err
		}
		client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get("http://" + podmanGateway + "/services/forwarder/all")
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	})
	podmanImage(t)
	return m
}

// configurePodman has Podman keep all that it has in /run, with netavark.
func configurePodman(t testing.TB) {
	t.Helper()
	for path, text := range map[string]string{
		"/etc/containers/containers.conf": "[network]\nnetwork_backend=\"netavark\"\n[engine]\ncgroup_manager=\"cgroupfs\"\nevents_logger=\"file\"\nruntime=\"runc\"\n[containers]\nlog_driver=\"k8s-file\"\n",
		"/etc/containers/storage.conf":    "[storage]\ndriver=\"vfs\"\ngraphroot=\"/run/podman/storage\"\nrunroot=\"/run/podman/run\"\n",
		"/etc/containers/policy.json":     `{"default":[{"type":"insecureAcceptAnything"}]}`,
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
}

// podmanImage gives Podman an image with busybox.
func podmanImage(t testing.TB) {
	t.Helper()
	run(t, "podman", "load", "-q", "-i", imageArchive(t))
}

// serves waits until the host reaches the web server of a container.
func (m *podmanMachine) serves(address string) {
	m.t.Helper()
	eventually(m.t, func() error {
		c, err := m.outside.Dial("tcp", address)
		if err != nil {
			return err
		}
		got, err := ask(c)
		if err == nil && !strings.Contains(got, "HTTP/1.") {
			err = fmt.Errorf("it answers %q", got)
		}
		return err
	})
}

// Podman removes its entry and adds it again when a container is started again: it fails
// if the port is taken in between.
func TestReachPodmanMachine(t *testing.T) {
	m := newPodmanMachine(t)
	m.mark(t)
	m.restarts(m.agent(t), rounds.Of(t, "FAIRLEAD_PODMAN_RESTARTS", 5))
}

// An agent that does not know that it runs in a Podman machine sees entries of another
// program.
func TestPodmanUnknownToTheAgent(t *testing.T) {
	m := newPodmanMachine(t)
	control := m.agent(t)
	m.mark(t)
	m.restarts(control, rounds.Of(t, "FAIRLEAD_PODMAN_RESTARTS", 5))
}

// mark writes the file by which Podman knows that it runs in a machine.
func (m *podmanMachine) mark(t testing.TB) {
	t.Helper()
	if err := os.WriteFile("/etc/containers/podman-machine", []byte("qemu\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// agent starts an agent that has found the peer, and returns its control socket.
func (m *podmanMachine) agent(t testing.TB) (control string) {
	t.Helper()
	control = filepath.Join(t.TempDir(), "agent", "s")
	start(t, binary(), "agent", "--sink", "gvproxy=http://"+podmanGateway, "--bridge-loopback", "--source", "socket,nat", "--control", control)
	start(t, "/bin/busybox", "httpd", "-f", "-p", "127.0.0.1:8091", "-h", "/etc")
	eventually(t, func() error { return activeAt(control, 8091) })
	return control
}

// restarts runs a container and starts it again and again.
func (m *podmanMachine) restarts(control string, n int) {
	t := m.t
	t.Helper()
	run(t, "podman", "run", "-d", "--name", "web", "--cgroup-parent=/"+enclave.CgroupParent(), "--pull=never",
		"-p", "8090:80", "-p", "127.0.0.1:9999:80", "docker.io/library/"+enclave.Image, "httpd", "-f", "-p", "80", "-h", "/etc")
	t.Cleanup(func() { _, _ = try("podman", "rm", "-f", "-t", "0", "web") })
	served := func() {
		t.Helper()
		m.serves("127.0.0.1:8090")
		m.serves("127.0.0.1:9999")
		eventually(t, func() error { return activeAt(control, 8090, 9999) })
	}
	podman := func(round int, args ...string) {
		t.Helper()
		if _, err := try("podman", args...); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
	}
	served()
	for i := range n {
		podman(i, "restart", "-t", "0", "web")
		served()
		if i%2 == 1 {
			podman(i, "stop", "-t", "0", "web")
			podman(i, "start", "web")
			served()
		}
	}
	m.serves("127.0.0.1:8091") // which Podman does not open
	run(t, "podman", "rm", "-f", "-t", "0", "web")
	for _, a := range []string{"127.0.0.1:8090", "127.0.0.1:9999"} {
		eventually(t, func() error { return probe.WantClosed(func() (net.Conn, error) { return m.outside.Dial("tcp", a) }) })
	}
}

// activeAt returns an error unless all publications of these ports are active.
func activeAt(control string, numbers ...uint16) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	l, err := status.NewClient(control).List(ctx)
	if err != nil {
		return err
	}
	for _, n := range numbers {
		of := slices.Clone(l.Publications)
		of = slices.DeleteFunc(of, func(p status.Publication) bool { return p.Key.Port != n })
		if len(of) == 0 {
			return fmt.Errorf("port %d is not published", n)
		}
		for _, p := range of {
			if p.State != port.Active {
				return fmt.Errorf("%s is %s: %s (origins %+v)", p.Key, p.State, p.Reason, p.Origins)
			}
		}
	}
	return nil
}
