// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// person is a user of the guest who may have containers.
type person struct {
	t    testing.TB
	name string
	uid  int
}

// newPerson adds a user, who is not logged in.
func newPerson(t testing.TB, name string, uid int) *person {
	t.Helper()
	p := &person{t, name, uid}
	for path, line := range map[string]string{
		"/etc/passwd": fmt.Sprintf("%s:x:%d:%d::%s:/bin/sh\n", name, uid, uid, p.home()),
		"/etc/group":  fmt.Sprintf("%s:x:%d:\n", name, uid),
		"/etc/subuid": fmt.Sprintf("%s:%d:65536\n", name, uid<<16),
		"/etc/subgid": fmt.Sprintf("%s:%d:65536\n", name, uid<<16),
	} {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(line); errors.Join(err, f.Close()) != nil {
			t.Fatal(err)
		}
	}
	p.own(p.home())
	return p
}

func (p *person) home() string { return "/home/" + p.name }
func (p *person) run(path string) string {
	return filepath.Join("/run/user", strconv.Itoa(p.uid), path)
}
func (p *person) own(dir string) {
	p.t.Helper()
	p.must(errors.Join(os.MkdirAll(dir, 0o755), os.Chmod(dir, 0o700), os.Chown(dir, p.uid, p.uid)))
}
func (p *person) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// as is the beginning of a command that runs as the user.
func (p *person) as(args ...string) []string {
	id := strconv.Itoa(p.uid)
	return append([]string{
		"setpriv", "--reuid", id, "--regid", id, "--clear-groups", "env", "-C", p.home(), "HOME=" + p.home(), "XDG_RUNTIME_DIR=" + p.run(""),
	}, args...)
}

func (p *person) try(args ...string) (string, error) {
	all := p.as(args...)
	return try(all[0], all[1:]...)
}

func (p *person) do(args ...string) string {
	p.t.Helper()
	out, err := p.try(args...)
	p.must(err)
	return out
}

// listen listens at a socket of the user, as the user.
func (p *person) listen(path string) *net.UnixListener {
	p.t.Helper()
	var l *net.UnixListener
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), uintptr(p.uid), ^uintptr(0)); errno != 0 {
			done <- errno
			return
		}
		var err error
		l, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		done <- err
	}()
	p.must(<-done)
	return l
}

// rootlessKit starts an engine in namespaces of the user, by what its own script runs there.
func (p *person) rootlessKit(engine, inside string) *daemon {
	p.t.Helper()
	script := filepath.Join(p.home(), engine+".sh")
	p.must(os.WriteFile(script, []byte("set -e\n"+inside), 0o644))
	d := &daemon{t: p.t, args: p.as("rootlesskit", "--state-dir="+p.run(engine+"-rootless"), "--net=slirp4netns", "--mtu=65520",
		"--slirp4netns-sandbox=false", "--slirp4netns-seccomp=false", "--disable-host-loopback", "--port-driver=builtin",
		"--copy-up=/etc", "--copy-up=/run", "--copy-up=/var/lib", "--propagation=rslave", "sh", script)}
	return d.start()
}

// rootless lets users run containers in this enclave.
func rootless(t testing.TB) {
	t.Helper()
	for _, err := range []error{
		unix.Mount("tmpfs", "/home", "tmpfs", 0, ""),
		unix.Mknod("/run/tun", unix.S_IFCHR|0o666, int(unix.Mkdev(10, 200))), os.Chmod("/run/tun", 0o666),
		unix.Mount("/run/tun", "/dev/net/tun", "", unix.MS_BIND, ""),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""),
		os.MkdirAll("/run/user", 0o755), os.MkdirAll("/etc/containers", 0o755),
		os.WriteFile("/etc/containers/containers.conf", []byte("[engine]\ncgroup_manager=\"cgroupfs\"\nevents_logger=\"file\"\nruntime=\"runc\"\n[containers]\nlog_driver=\"k8s-file\"\n"), 0o644),
		os.WriteFile("/etc/containers/storage.conf", []byte("[storage]\ndriver=\"vfs\"\n"), 0o644),
		os.WriteFile("/etc/containers/policy.json", []byte(`{"default":[{"type":"insecureAcceptAnything"}]}`), 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// heldBy waits until a port's owner is a container that a user's engine names.
func heldBy(t testing.TB, c *status.Client, number uint16, name string, held port.Held, rule string) {
	t.Helper()
	eventually(t, func() error {
		l, err := list(c)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(l.Publications, func(p status.Publication) bool { return p.Key.Port == number })
		if i < 0 {
			return fmt.Errorf("port %d is not there", number)
		}
		p := l.Publications[i]
		if o := p.Owner; o.Kind != port.OwnerContainer || o.Name != name || o.Held == nil || *o.Held != held || len(o.Labels) > 0 || p.Rule != rule {
			return fmt.Errorf("%s is owned by %+v, held %+v, decided by %q; want %s, %+v, %q", p.Key, o, o.Held, p.Rule, name, held, rule)
		}
		return nil
	})
}

// Containers of a user's Docker and Podman, which are found when the user logs in, are the
// owners of the ports that rootlesskit and rootlessport hold, through restarts of the agent, the
// host and their engine, and beside another user whose socket does not answer. A client on the
// host reaches them. Rules that allow do not believe their names.
func TestUsersEngines(t *testing.T) {
	rootless(t)
	rules := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(rules, []byte("labels: true\nrules:\n- {name: web, match: {owner: container, name: web}, action: allow, hostPort: 9999}\n"+
		"- {name: secret, match: {owner: container, name: secret}, action: deny}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, c := readyPeers(t, "--source", "socket,nat,docker,podman,users", "--config", rules)
	sourceIs(t, c, "users", "no user's engine")

	alice := newPerson(t, "alice", 4711)
	alice.own(alice.run(""))
	alice.own(alice.run("podman"))
	image := filepath.Join(alice.home(), "bb.tar")
	b, err := os.ReadFile(imageArchive(t))
	alice.must(errors.Join(err, os.WriteFile(image, b, 0o644)))
	alice.do("podman", "load", "-q", "-i", image)
	service := activateBy(t, alice.listen(alice.run("podman/podman.sock")), alice.as("podman", "system", "service", "--time", "1")...)
	dockerd := alice.rootlessKit("dockerd", "rm -f /run/docker /run/containerd /run/xtables.lock\n"+
		"exec dockerd --host=unix://"+alice.run("docker.sock")+" --storage-driver=vfs --live-restore\n")
	docker := func(args ...string) []string {
		return append([]string{"docker", "-H", "unix://" + alice.run("docker.sock")}, args...)
	}
	answers := func() error { _, err := alice.try(docker("version")...); return err }
	dockerd.ready(t, answers)
	alice.do(docker("load", "-i", image)...)
	sourceIs(t, c, "users", "docker 20")

	serve := []string{"httpd", "-f", "-p", "80", "-h", "/etc"}
	podman := port.Held{Engine: "podman", User: "alice", Process: "rootlessport"}
	kit := port.Held{Engine: "docker", User: "alice", Process: "rootlesskit"}
	alice.do(append([]string{"podman", "run", "-d", "--name", "web", "--label", "fairlead.expose=no", "--pull=never", "-p", "8090:80", "docker.io/library/" + enclave.Image}, serve...)...)
	t.Cleanup(func() { _, _ = alice.try("podman", "rm", "-f", "-t", "0", "web") })
	alice.do(docker(append([]string{"run", "-d", "--name", "own", "-p", "127.0.0.1:8091:80", enclave.Image}, serve...)...)...)
	alice.do(docker(append([]string{"run", "-d", "--name", "secret", "-p", "8092:80", enclave.Image}, serve...)...)...)
	t.Cleanup(func() { _, _ = alice.try(docker("rm", "-f", "own", "secret")...) })
	closed := p.probe("127.0.0.1:8092")
	all := func(when string) {
		t.Helper()
		heldBy(t, c, 8090, "web", podman, "default") // not the rule that allows by name, and not the label
		heldBy(t, c, 8091, "own", kit, "default")
		heldBy(t, c, 8092, "secret", kit, "rule 2 (secret)")
		p.getsAt(8090, "404")
		p.getsAt(8091, "404")
		closed.closed(t, when)
	}
	all("start")
	p.restarts(all)

	mallory := newPerson(t, "mallory", 4712)
	mallory.own(mallory.run(""))
	silent := mallory.listen(mallory.run("docker.sock"))
	defer func() { _ = silent.Close() }()
	eventually(t, func() error {
		l, err := list(c)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(l.Sources, func(s status.Source) bool { return s.Name == "users" })
		if s := l.Sources[i]; s.State != "stale" || !strings.Contains(s.Error, "docker of mallory") || strings.Contains(s.Error, "alice") {
			return fmt.Errorf("%s: %s", s.State, s.Error)
		}
		return nil
	})
	service.kill()
	all("restart of the service")
	run(t, "rm", "-r", mallory.run(""))
	sourceIs(t, c, "users", "of alice")
	all("end of the other user")
	dockerd.Stop(syscall.SIGTERM) // and the ports of its containers with it
	p.shut(8091)
	dockerd.run(t)
	dockerd.ready(t, answers)
	alice.do(docker("restart", "-t", "0", "own", "secret")...)
	all("restart of the user's Docker")
	closed.end()
	alice.do("podman", "rm", "-f", "-t", "0", "web")
	sourceIs(t, c, "users", "asleep")
	eventually(t, func() error {
		if now, starts := service.runs(); now {
			return fmt.Errorf("the service runs, after %d starts", starts)
		}
		return nil
	})
}

// Containers of nerdctl in a user's containerd are named and reached too, through restarts of the
// agent, the host and the engine.
func TestUsersContainerd(t *testing.T) {
	rootless(t)
	p, c := readyPeers(t, "--source", "socket,nat,containerd,users")
	sourceIs(t, c, "users", "no user's engine")

	alice := newPerson(t, "alice", 4711)
	alice.own(alice.run(""))
	image, tool := filepath.Join(alice.home(), "bb.tar"), filepath.Join(alice.home(), "nerdctl")
	for to, from := range map[string]string{image: imageArchive(t), tool: enclave.Tool("nerdctl")} {
		b, err := os.ReadFile(from)
		alice.must(errors.Join(err, os.WriteFile(to, b, 0o755)))
	}
	// As containerd-rootless.sh of nerdctl has it, but for the CRI.
	engine := alice.rootlessKit("containerd", "rm -f /run/containerd /run/xtables.lock /var/lib/containerd /var/lib/cni\n"+
		"mount_own() { mkdir -p $1 $2; mount --bind $1 $2; }\n"+
		"mount_own $XDG_RUNTIME_DIR/containerd /run/containerd\n"+
		"mount_own $HOME/.local/share/containerd /var/lib/containerd\n"+
		"mount_own $HOME/.local/share/cni /var/lib/cni\n"+
		"echo 'disabled_plugins = [\"io.containerd.grpc.v1.cri\"]' >$HOME/containerd.toml\n"+
		"exec containerd --config $HOME/containerd.toml\n")
	nerdctl := func(args ...string) []string { return append([]string{tool, "--snapshotter", "native"}, args...) }
	engine.ready(t, func() error { _, err := alice.try(nerdctl("ps")...); return err })
	alice.do(nerdctl("load", "-i", image)...)
	sourceIs(t, c, "users", "containerd 1")
	alice.do(nerdctl("run", "-d", "--name", "web", "-p", "8093:80", enclave.Image, "httpd", "-f", "-p", "80", "-h", "/etc")...)
	held := port.Held{Engine: "containerd", User: "alice", Process: "rootlesskit"}
	check := func(string) {
		t.Helper()
		heldBy(t, c, 8093, "web", held, "default")
		p.getsAt(8093, "404")
	}
	check("")
	p.restarts(check)
	engine.Stop(syscall.SIGKILL)
	engine.run(t)
	engine.ready(t, func() error { _, err := alice.try(nerdctl("ps")...); return err })
	alice.do(nerdctl("rm", "-f", "web")...)
	alice.do(nerdctl("run", "-d", "--name", "again", "-p", "127.0.0.1:8093:80", enclave.Image, "httpd", "-f", "-p", "80", "-h", "/etc")...)
	heldBy(t, c, 8093, "again", held, "default")
	p.getsAt(8093, "404")
	alice.do(nerdctl("rm", "-f", "again")...)
	p.shut(8093)
}
