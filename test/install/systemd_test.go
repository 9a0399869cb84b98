// SPDX-License-Identifier: Apache-2.0

//go:build linux && boot

package install

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

const (
	service = "fairlead-agent"
	account = "dev" // whose host peer it is
)

// as is a script that runs a command as a user whom systemd runs services for.
func as(user, command string) string {
	return fmt.Sprintf("runuser -u %[1]s -- env HOME=/home/%[1]s XDG_RUNTIME_DIR=/run/user/$(id -u %[1]s) %[2]s", user, command)
}

func asUser(command string) string { return as(account, command) }

// addUser makes a user whose services run without a session.
func addUser(t *testing.T, name string) {
	t.Helper()
	sh(t, "useradd --create-home --shell /bin/sh "+name+" && loginctl enable-linger "+name)
	wait.Until(t, "the user's services run", func() error {
		_, err := try("systemctl is-active user@$(id -u " + name + ")")
		return err
	})
}

// property is one of the agent's unit.
func property(t *testing.T, name string) string {
	t.Helper()
	return sh(t, "systemctl show -P "+name+" "+service)
}

// TestSystemdPackage takes the deb through its life: install, start, serve a host, upgrade,
// remove, purge.
func TestSystemdPackage(t *testing.T) {
	addUser(t, account)
	before := listFiles(t)
	config := ""
	t.Cleanup(func() { // for the other tests, where this one failed
		_, _ = try("set +e; " + asUser("systemctl --user disable --now fairlead-host") + "; dpkg -P fairlead; rm -rf /etc/systemd/system/" + service + ".service.d; systemctl daemon-reload")
	})

	step(t, "install", func(t *testing.T) {
		sh(t, "dpkg -i "+built(t, "old", "fairlead_*.deb"))
		if state, _ := try("systemctl is-active " + service); state != "" {
			t.Errorf("the package starts the agent: %s", state)
		}
		refused(t, "systemctl is-enabled "+service, "disabled")
		refused(t, "fairlead agent install", "belongs to a package")
	})
	step(t, "start", func(t *testing.T) {
		sh(t, "systemctl enable --now "+service)
		if state := property(t, "ActiveState"); state != "active" {
			t.Errorf("the agent is %s", state)
		}
		wantVersion(t, oldVersion)
		wantDoctor(t, "fairlead doctor -v", noHost)
		l, err := net.Listen("tcp4", "0.0.0.0:8123")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		waitForPort(t, "fairlead ls", 8123, "pending") // no host is there
		t.Log(sh(t, "fairlead ls"))
	})
	step(t, "hardening", wantHardened)
	step(t, "programs", wantPrograms)

	// From here on the guest is a network namespace: agent and host do not serve each
	// other within one.
	sh(t, "ip netns add guest && ip -n guest link set lo up && mkdir -p /etc/systemd/system/"+service+".service.d")
	sh(t, "printf '[Service]\nNetworkNamespacePath=/run/netns/guest\n' >/etc/systemd/system/"+service+".service.d/guest.conf && systemctl daemon-reload")
	guest, err := netns.Open("/run/netns/guest")
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	step(t, "host peer of a user", func(t *testing.T) {
		id := sh(t, "id -u "+account)
		config = sh(t, "cat /etc/fairlead/agent.yaml") + "\nallowUIDs: [" + id + "]\nlinkToken: /var/lib/fairlead/token\n"
		if err := os.WriteFile("/etc/fairlead/agent.yaml", []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
		sh(t, "systemctl restart "+service)
		// An emulated machine takes long to restart the agent: longer than the default of grace.
		sh(t, asUser(`sh -ec 'mkdir -p ~/.config/fairlead && printf "grace: 10m\nlinkToken: %s\n" ~/.local/state/fairlead/token >~/.config/fairlead/host.yaml'`))
		sh(t, asUser("fairlead host pair --from - --link-token /home/"+account+"/.local/state/fairlead/token </var/lib/fairlead/token"))
		sh(t, asUser("systemctl --user enable --now fairlead-host"))
		l, err := guest.Listen("tcp4", "0.0.0.0:8123")
		if err != nil {
			t.Fatal(err)
		}
		serveEcho(t, l)
		waitForPort(t, asUser("fairlead ls"), 8123, "active")
		if err := askEcho(); err != nil {
			t.Error(err)
		}
		wantDoctor(t, "nsenter --net=/run/netns/guest fairlead doctor -v")
	})
	step(t, "upgrade", func(t *testing.T) {
		l, err := guest.Listen("tcp4", "0.0.0.0:8123")
		if err != nil {
			t.Fatal(err)
		}
		serveEcho(t, l)
		waitForPort(t, asUser("fairlead ls"), 8123, "active")
		wait.Until(t, "the port answers", askEcho)
		token, pid := sh(t, "cat /var/lib/fairlead/token"), property(t, "MainPID")
		c := startClient()
		sh(t, "dpkg -i "+built(t, "new", "fairlead_*.deb"))
		wantVersion(t, newVersion)
		if property(t, "MainPID") == pid {
			t.Error("the agent was not restarted")
		}
		waitForPort(t, asUser("fairlead ls"), 8123, "active")
		wait.Until(t, "the port answers", askEcho)
		c.stop(t)
		if got := sh(t, "cat /var/lib/fairlead/token"); got != token {
			t.Error("the token is another")
		}
		if b, err := os.ReadFile("/etc/fairlead/agent.yaml"); err != nil || string(b) != config {
			t.Errorf("%v, agent.yaml is\n%s", err, b)
		}
		sh(t, "systemctl is-enabled "+service)
		// The host's program was replaced under it: it runs the new one from its next start.
		sh(t, asUser("systemctl --user restart fairlead-host"))
		waitForPort(t, asUser("fairlead ls"), 8123, "active")
		wait.Until(t, "the port answers", askEcho)
	})
	step(t, "remove", func(t *testing.T) {
		sh(t, asUser("systemctl --user disable --now fairlead-host"))
		sh(t, "dpkg -r fairlead")
		if state := property(t, "ActiveState"); state != "inactive" {
			t.Errorf("the agent is %s", state)
		}
		sh(t, "test ! -e /usr/bin/fairlead && test ! -e /etc/systemd/system/multi-user.target.wants/fairlead-agent.service")
		sh(t, "test -s /etc/fairlead/agent.yaml && test -s /var/lib/fairlead/token")
	})
	step(t, "purge", func(t *testing.T) {
		sh(t, "dpkg -P fairlead")
		sh(t, "rm -r /etc/systemd/system/"+service+".service.d && systemctl daemon-reload && ip netns del guest")
		wantFiles(t, before)
		sh(t, "test ! -e /run/fairlead")
		if state := property(t, "LoadState"); state != "not-found" {
			t.Errorf("the unit is %s", state)
		}
	})
}

// wantHardened fails if the agent that runs has more than its unit leaves it.
func wantHardened(t *testing.T) {
	pid := property(t, "MainPID")
	t.Log(sh(t, "systemd-analyze security --no-pager "+service+" | tail -1"))
	status := make(map[string]string)
	for line := range strings.Lines(sh(t, "cat /proc/"+pid+"/status")) {
		key, value, _ := strings.Cut(line, ":")
		status[key] = strings.TrimSpace(value)
	}
	for key, want := range map[string]string{"NoNewPrivs": "1", "Seccomp": "2", "Umask": "0077"} {
		if status[key] != want {
			t.Errorf("%s is %q, want %q", key, status[key], want)
		}
	}
	unit := sh(t, "busctl get-property org.freedesktop.systemd1 /org/freedesktop/systemd1/unit/fairlead_2dagent_2eservice org.freedesktop.systemd1.Service CapabilityBoundingSet")
	allowed, err := strconv.ParseUint(strings.TrimPrefix(unit, "t "), 10, 64)
	if err != nil || allowed == 0 || allowed == 1<<64-1 {
		t.Fatalf("bounding set of the unit: %q, %v", unit, err)
	}
	for _, set := range []string{"CapBnd", "CapPrm", "CapEff", "CapInh", "CapAmb"} {
		if has, err := strconv.ParseUint(status[set], 16, 64); err != nil || has&^allowed != 0 {
			t.Errorf("%s is %x, %v, want no more than %x", set, has, err, allowed)
		}
	}
	sh(t, `awk '$5 == "/" { print $6; exit }' /proc/`+pid+`/mountinfo | grep -qw ro`)
	sh(t, "touch /tmp/shared && test ! -e /proc/"+pid+"/root/tmp/shared")
}

// wantPrograms has the package fairlead-run run a program for a user, with and without a
// terminal, and within the limits of its entry.
func wantPrograms(t *testing.T) {
	defer func() { sh(t, "dpkg -P fairlead-run && test ! -e /run/fairlead-run && systemctl daemon-reload") }()
	sh(t, "dpkg -i "+built(t, "old", "fairlead-run_*.deb"))
	refused(t, "systemctl is-enabled fairlead-run", "disabled")
	sum := func(path string) string { return sh(t, "sha256sum "+path+" | cut -d ' ' -f 1") }
	config := "allow:\n" +
		"  - {name: tty, users: [" + account + "], path: /usr/bin/tty, sha256: " + sum("/usr/bin/tty") + ", user: nobody, tty: true}\n" +
		"  - {name: tail, users: [" + account + "], path: /usr/bin/tail, sha256: " + sum("/usr/bin/tail") + ", args: [/dev/zero], user: nobody, memory: 32MiB, processes: 8}\n" +
		"  - {name: sleep, users: [" + account + "], path: /usr/bin/sleep, sha256: " + sum("/usr/bin/sleep") + ", args: ['100'], user: nobody, time: 1s}\n"
	if err := os.WriteFile("/etc/fairlead/run.yaml", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	sh(t, "systemctl enable --now fairlead-run")
	asUserWhenServed := "for i in $(seq 300); do test -S /run/fairlead-run/run.sock && break; sleep 0.1; done; " + asUser("fairlead-run tty </dev/null")
	refused(t, asUserWhenServed, "not a tty")
	if out := sh(t, asUser(`script -qec "fairlead-run -t tty" /dev/null`)); !strings.Contains(out, "/dev/pts/") {
		t.Errorf("with a terminal: %q", out)
	}
	refused(t, asUser("fairlead-run tail -- /dev/zero"), "killed for its limit of memory")
	refused(t, asUser("fairlead-run sleep -- 100"), "killed for its limit of time")
	refused(t, asUser("fairlead-run other"), "policy")
	sh(t, "systemctl restart fairlead-run")
	refused(t, asUserWhenServed, "not a tty")
}

// askEcho asks the port that the host peer opened.
func askEcho() error {
	conn, err := net.DialTimeout("tcp", "127.0.0.1:8123", time.Minute)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("hello")); err != nil {
		return err
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(conn, b); err != nil || string(b) != "hello" {
		return fmt.Errorf("got %q: %w", b, err)
	}
	return nil
}

// client connects in a loop.
type client struct {
	end, ended chan struct{}

	// From here on valid once ended is closed.
	served, failed int
	refused        []error
	gap            time.Duration // the longest between two answers
}

func startClient() *client {
	c := &client{end: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(c.ended)
		last := time.Now()
		for {
			select {
			case <-c.end:
				return
			case <-time.After(20 * time.Millisecond):
			}
			switch err := askEcho(); {
			case err == nil:
				c.served++
				c.gap = max(c.gap, time.Since(last))
				last = time.Now()
			case errors.Is(err, syscall.ECONNREFUSED):
				c.refused = append(c.refused, err)
			default:
				c.failed++
			}
		}
	}()
	return c
}

// readyTimeout is how long a starting agent waits for engines before it reports ports to
// the host. It waits longer, up to 20 s, for its first reading of sockets and NAT rules.
const readyTimeout = 3 * time.Second

// stop fails the test if the port was closed at any time, unless an agent that was
// restarted was ready too late to prevent that, as in an emulated machine on a busy one.
func (c *client) stop(t *testing.T) {
	t.Helper()
	close(c.end)
	<-c.ended
	start, startErr := strconv.Atoi(property(t, "ExecMainStartTimestampMonotonic"))
	active, activeErr := strconv.Atoi(property(t, "ActiveEnterTimestampMonotonic"))
	if err := errors.Join(startErr, activeErr); err != nil {
		t.Fatal(err)
	}
	took := time.Duration(active-start) * time.Microsecond
	t.Logf("%d connections served, %d refused, %d reset, longest pause %v; the agent was ready after %v",
		c.served, len(c.refused), c.failed, c.gap.Round(time.Millisecond), took.Round(time.Millisecond))
	if len(c.refused) > 0 && took < readyTimeout || c.served == 0 {
		t.Errorf("%d connections were refused: the port was closed", len(c.refused))
	}
}

// TestSystemdAgentInstall has the agent of an archive started by systemd.
func TestSystemdAgentInstall(t *testing.T) {
	before := listFiles(t)
	installArchive(t, "old")
	step(t, "install", func(t *testing.T) {
		t.Log(sh(t, "fairlead agent install -- --log-level debug"))
		wantVersion(t, oldVersion)
		if state := property(t, "ActiveState"); state != "active" {
			t.Errorf("the agent is %s", state)
		}
		sh(t, "systemctl is-enabled "+service)
		l, err := net.Listen("tcp4", "0.0.0.0:8124")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		waitForPort(t, "fairlead ls", 8124, "pending")
		if log := sh(t, "fairlead config loglevel get"); !strings.Contains(log, "debug") {
			t.Errorf("the log level is %q, not that of the flags", log)
		}
	})
	step(t, "hardening", wantHardened)
	step(t, "update", func(t *testing.T) {
		installArchive(t, "new")
		sh(t, "fairlead agent install -- --log-level debug")
		wantVersion(t, newVersion)
	})
	step(t, "uninstall", func(t *testing.T) {
		t.Log(sh(t, "fairlead agent uninstall"))
		if state := property(t, "LoadState"); state != "not-found" {
			t.Errorf("the unit is %s", state)
		}
		t.Log(sh(t, "fairlead agent uninstall"))
		wantFiles(t, before, "/usr/local/bin/fairlead", "/etc/fairlead", "/var/lib/fairlead")
		sh(t, "rm -rf /usr/local/bin/fairlead /etc/fairlead /var/lib/fairlead /run/fairlead")
	})
	step(t, "program of a user", func(t *testing.T) {
		sh(t, "install -D -o nobody "+built(t, "new", "*.tar.gz")+" /opt/x/fairlead && tar -C /opt/x --strip-components 1 -xzf /opt/x/fairlead && chown nobody /opt/x/fairlead")
		refused(t, "/opt/x/fairlead agent install", "users other than root can change")
		sh(t, "rm -r /opt/x")
		wantFiles(t, before)
	})
}

// TestSystemdHostInstall has the host peer of an archive started for an ordinary user.
func TestSystemdHostInstall(t *testing.T) {
	const user = "dev2"
	addUser(t, user)
	before := listFiles(t)
	installArchive(t, "new")
	t.Log(sh(t, as(user, "fairlead host install")))
	sh(t, as(user, "systemctl --user is-active fairlead-host"))
	wait.Until(t, "the host peer answers", func() error {
		_, err := try(as(user, "fairlead ls"))
		return err
	})
	t.Log(sh(t, as(user, "fairlead host uninstall")))
	refused(t, as(user, "systemctl --user is-active fairlead-host"), "inactive")
	// Without a user bus nobody stops it, and nothing is left that starts it again.
	sh(t, as(user, "fairlead host install"))
	refused(t, "runuser -u "+user+" -- env HOME=/home/"+user+" fairlead host uninstall", "`systemctl --user stop fairlead-host.service`")
	sh(t, as(user, "systemctl --user is-active fairlead-host")+" && "+as(user, "systemctl --user stop fairlead-host.service"))
	sh(t, "test -z \"$(find /home/"+user+"/.config/systemd -name 'fairlead*')\"")
	sh(t, "rm /usr/local/bin/fairlead")
	wantFiles(t, before)
}
