// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// activated is a service that is started for each connection to its socket while it does
// not run, as systemd does by a .socket unit.
type activated struct {
	mu     sync.Mutex
	cmd    *exec.Cmd // nil while it does not run
	starts int
}

// activate listens at path, and starts the service until the test ends.
func activate(t testing.TB, path string, args ...string) *activated {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	return activateBy(t, l, args...)
}

// activateBy is activate with a listener.
func activateBy(t testing.TB, l *net.UnixListener, args ...string) *activated {
	t.Helper()
	socket, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "service.log"))
	if err != nil {
		t.Fatal(err)
	}
	a, ended, done := new(activated), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			fds := []unix.PollFd{{Fd: int32(socket.Fd()), Events: unix.POLLIN}}
			if n, err := unix.Poll(fds, 100); err != nil && !errors.Is(err, unix.EINTR) || n == 0 {
				select {
				case <-ended:
					return
				default:
					continue
				}
			}
			// exec keeps the pid.
			cmd := exec.Command("/bin/sh", append([]string{"-c", `LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"`, "sh"}, args...)...)
			cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = []*os.File{socket}, log, log
			a.mu.Lock()
			err := cmd.Start()
			if a.starts++; err == nil {
				a.cmd = cmd
			}
			a.mu.Unlock()
			if err != nil {
				t.Error(err)
				return
			}
			_ = cmd.Wait()
			a.mu.Lock()
			a.cmd = nil
			a.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		close(ended)
		a.kill()
		<-done
		_ = errors.Join(l.Close(), socket.Close())
		if b, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("%s:\n%s", strings.Join(args, " "), tail(b, 4000))
		}
		_ = log.Close()
	})
	return a
}

// kill ends the service the hard way, if it runs.
func (a *activated) kill() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cmd != nil {
		_ = a.cmd.Process.Signal(syscall.SIGKILL)
	}
}

func (a *activated) runs() (now bool, starts int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.cmd != nil, a.starts
}

// sourceIs waits until a source is live, with this text in its method.
func sourceIs(t testing.TB, c *status.Client, name, method string) {
	t.Helper()
	eventually(t, func() error {
		l, err := list(c)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(l.Sources, func(s status.Source) bool { return s.Name == name })
		if i < 0 || l.Sources[i].State != "live" || !strings.Contains(l.Sources[i].Method, method) {
			return fmt.Errorf("the sources are %+v, want %s live with %q", l.Sources, name, method)
		}
		return nil
	})
}

// wantOrigin waits until a port has an origin of that source.
func wantOrigin(t testing.TB, c *status.Client, slot, source string) {
	t.Helper()
	eventually(t, func() error {
		l, err := list(c)
		if err != nil {
			return err
		}
		for _, p := range l.Publications {
			if p.Key.Slot().String() == slot && slices.ContainsFunc(p.Origins, func(o status.Origin) bool { return o.Source == source }) {
				return nil
			}
		}
		return fmt.Errorf("%s has no origin of %s", slot, source)
	})
}

// Podman's containers are named though its service runs only while one of them does, and by
// rules that name them. A client on the host reaches them, and one that publishes nothing by its
// name, through restarts of the agent, the host and the service. A pod is named where it
// publishes, not its containers.
func TestPodmanService(t *testing.T) {
	configurePodman(t)
	podmanImage(t)
	const socket = "/run/podman/podman.sock"
	service := activate(t, socket, "podman", "system", "service", "--time", "1")
	rules := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(rules, []byte("rules:\n- {match: {owner: container, name: 'secret*'}, action: deny}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, c := readyPeers(t, "--source", "socket,nat,docker,podman", "--config", rules, "--forwards-file", filepath.Join(t.TempDir(), "forwards.json"))
	asleep := func() {
		t.Helper()
		sourceIs(t, c, "podman", "asleep")
		eventually(t, func() error {
			if now, starts := service.runs(); now {
				return fmt.Errorf("the service runs, after %d starts", starts)
			}
			return nil
		})
	}
	asleep()
	_, before := service.runs()
	time.Sleep(3 * time.Second)
	if _, starts := service.runs(); starts != before {
		t.Errorf("the service was started %d times though no container runs", starts-before)
	}

	podman := func(name string, args ...string) {
		t.Helper()
		run(t, "podman", append([]string{"run", "-d", "--name", name, "--cgroup-parent=/" + enclave.CgroupParent(), "--pull=never"}, args...)...)
		t.Cleanup(func() { _, _ = try("podman", "rm", "-f", "-t", "0", name) })
	}
	image := "docker.io/library/" + enclave.Image
	podman("web", "-p", "8090:80", image, "httpd", "-f", "-p", "80", "-h", "/etc")
	wantOwner(t, c, "8090/tcp", port.OwnerContainer, "web")
	wantOrigin(t, c, "8090/tcp", "podman")
	podman("host", "--network", "host", image, "httpd", "-f", "-p", "8091", "-h", "/etc")
	wantOwner(t, c, "8091/tcp", port.OwnerContainer, "host")
	podman("secret", "-p", "8092:80", image, "httpd", "-f", "-p", "80", "-h", "/etc")
	wantOwner(t, c, "8092/tcp", port.OwnerContainer, "secret")
	podman("inner", image, "sh", "-c", "nc -ll -p 8000 -e echo this is inner")
	p.forward("add", "inner:8000", "--to", "18000")
	pod := func(name, publish string) {
		t.Helper()
		t.Cleanup(func() { _, _ = try("podman", "pod", "rm", "-f", "-t", "0", name) })
		run(t, "podman", "pod", "create", "--name", name, "--infra-image", image, "--infra-command", "/bin/sleep 10000",
			"--cgroup-parent=/"+enclave.CgroupParent(), "-p", publish)
		podman(name+"-web", "--pod", name, image, "httpd", "-f", "-p", "80", "-h", "/etc")
	}
	pod("shop", "8093:80")
	pod("secretpod", "8094:80")
	podman("base", "-p", "8095:81", image, "sleep", "10000")
	podman("side", "--network", "container:base", image, "httpd", "-f", "-p", "81", "-h", "/etc")
	closed, closedPod := p.probe("127.0.0.1:8092"), p.probe("127.0.0.1:8094")
	check := func(when string) {
		t.Helper()
		p.getsAt(8090, "404")
		p.getsAt(8091, "404")
		p.says(18000, "this is inner")
		wantOwner(t, c, "8090/tcp", port.OwnerContainer, "web")
		for n, owner := range map[int]string{8093: "shop", 8095: "base"} { // whose the network is
			p.getsAt(n, "404")
			wantOwner(t, c, fmt.Sprintf("%d/tcp", n), port.OwnerContainer, owner)
		}
		p.state("tcp 0.0.0.0:8092", port.Denied)
		p.state("tcp 0.0.0.0:8094", port.Denied)
		closed.closed(t, when)
		closedPod.closed(t, when)
	}
	check("start")
	p.restarts(check)

	_, before = service.runs()
	service.kill()
	eventually(t, func() error {
		if _, starts := service.runs(); starts == before {
			return errors.New("the service was not started again")
		}
		return nil
	})
	sourceIs(t, c, "podman", "podman 4")
	check("restart of the service")
	closed.end()
	closedPod.end()

	run(t, "podman", "pod", "rm", "-f", "-t", "0", "shop", "secretpod")
	run(t, "podman", "rm", "-f", "-t", "0", "side") // before base, whose network it is in
	run(t, "podman", "rm", "-f", "-t", "0", "base", "web", "host", "secret", "inner")
	for _, n := range []uint16{8090, 8091, 8093, 8095, 18000} {
		p.shut(n)
	}
	p.forward("rm", "inner:8000")
	asleep()
}
