// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/probe"
)

// publishes checks both directions, and a denial, with containers of one engine.
func publishes(t *testing.T, flags []string, run func(args ...string) (string, error)) {
	dir := t.TempDir()
	socket, config := filepath.Join(dir, "run", "publish.sock"), filepath.Join(dir, "agent.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `
publish:
  socket: %s
  allow:
  - {match: {name: web}, guestPorts: 5432, hostPorts: 3000}
`, socket), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp4", "127.0.0.1:5432")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "from the guest")
			_ = c.Close()
		}
	}()
	p := startPeers(t, append(flags, "--config", config)...)
	eventually(t, func() error { _, err := os.Stat(socket); return err })
	in := func(name string, command ...string) []string {
		return append([]string{"--name", name, "-v", socket + ":/run/fairlead/publish.sock:ro", "-v", binary() + ":/fairlead:ro", "bb"}, command...)
	}
	if _, err := run(append([]string{"run", "--rm"}, in("version", "/fairlead", "--version")...)...); err != nil {
		t.Fatal(err)
	}
	const server = "nc -ll -p 8000 -e echo from the container & while ! /fairlead publish 8000 --to-host --as 3000; do sleep 0.1; done"
	if _, err := run(append([]string{"run", "-d"}, in("web", "sh", "-c", server)...)...); err != nil {
		t.Fatal(err)
	}
	if _, err := run("exec", "-d", "web", "sh", "-c", "while ! /fairlead publish 5432; do sleep 0.1; done"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		out, err := run("exec", "web", "sh", "-c", "nc 127.0.0.1 5432 </dev/null")
		if err == nil && out != "from the guest" {
			err = fmt.Errorf("the container read %q", out)
		}
		return err
	})
	host := func() (net.Conn, error) { return p.outside.Dial("tcp4", "127.0.0.1:3000") }
	eventually(t, func() error {
		c, err := host()
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(limit()))
		if got, err := io.ReadAll(c); string(got) != "from the container\n" {
			return fmt.Errorf("the host read %q, %v", got, err)
		}
		return nil
	})
	// The engine reports a container that has just started a moment later.
	eventually(t, func() error {
		_, err := run(append([]string{"run", "--rm"}, in("db", "/fairlead", "publish", "5432")...)...)
		if err == nil || !strings.Contains(err.Error(), `policy: no entry of publish.allow matches container "db"`) {
			return fmt.Errorf("the other container: %v", err)
		}
		return nil
	})
	if _, err := run("kill", "web"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return probe.WantClosed(host) })
}

func TestPublishFromDocker(t *testing.T) {
	dockerd(t)
	dockerImage(t)
	publishes(t, []string{"--source", "socket,docker", "--docker-host", "unix://" + dockerSocket}, func(args ...string) (string, error) { return try("docker", args...) })
}

func TestPublishFromNerdctl(t *testing.T) {
	startContainerd(t)
	containerdImage(t)
	publishes(t, []string{"--source", "socket,containerd", "--containerd-socket", containerdSocket}, func(args ...string) (string, error) { return nerdctl("default", args...) })
}
