// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/program"
)

// agent runs the program with the listener sink beside the engine.
func agent(t *testing.T) *status.Client {
	t.Helper()
	binary, err := program.Path(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	control := filepath.Join(dir, "run", "c")
	start(t, binary, "agent", "--sink", "listener", "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket,
		"--control", control, "--log-level", "debug")
	c := status.NewClient(control)
	eventually(t, func() error {
		l, err := list(c)
		if err == nil && !l.Ready() {
			err = fmt.Errorf("not ready: %+v", l.Sources)
		}
		return err
	})
	return c
}

func list(c *status.Client) (status.List, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return c.List(ctx)
}

// state returns the listener sink's state of a port at 127.0.0.1.
func state(c *status.Client, n uint16) (port.State, string) {
	l, err := list(c)
	if err != nil {
		return 0, err.Error()
	}
	for _, p := range l.Publications {
		for _, o := range p.Outcomes {
			if p.Key.Protocol == port.TCP && p.Key.Port == n && strings.HasPrefix(o.HostAddress, "127.0.0.1:") {
				return o.State, o.Reason
			}
		}
	}
	return 0, "not there"
}

// Docker writes its rules before it starts docker-proxy: a placeholder that opened in
// between would hold the proxy's port, and the container would not start.
func TestPlaceholderYieldsToDockerRun(t *testing.T) {
	const runs, workers, most = 200, 2, 8 * time.Minute
	dockerd(t)
	dockerImage(t)
	c := agent(t)
	var wg sync.WaitGroup
	var ran, other atomic.Int64
	began := time.Now()
	for w := range workers {
		wg.Go(func() {
			for i := w; i < runs && time.Since(began) < most; i += workers {
				// Ports are reused, to meet what an earlier container left behind.
				n, name := 8000+i%50, fmt.Sprintf("run%d", i)
				_, err := try("docker", "run", "-d", "--name", name, "--stop-timeout", "0", "-p", fmt.Sprintf("%d:80", n), "bb")
				switch {
				case err == nil:
					ran.Add(1)
				case strings.Contains(err.Error(), "address already in use"), strings.Contains(err.Error(), "already allocated"):
					t.Errorf("run %d: %v", i, err)
				default: // no word of the port
					other.Add(1)
					t.Logf("run %d: %v", i, err)
				}
				// Under load the engine stops waiting for the end of a process that it
				// killed.
				for tries := 0; tries < 5; tries++ {
					if _, err := try("docker", "rm", "-f", name); err == nil {
						break
					}
				}
			}
		})
	}
	wg.Wait()
	if t.Logf("%d ran, in %v", ran.Load(), time.Since(began).Round(time.Second)); other.Load() > ran.Load()/10 {
		t.Errorf("%d could not be run for other reasons", other.Load())
	}
	drun(t, "--name", "last", "-p", "8999:80", "bb")
	eventually(t, func() error {
		if s, why := state(c, 8999); s != port.Active {
			return fmt.Errorf("8999 is %v: %s", s, why)
		}
		return nil
	})
}

// Without docker-proxy nothing listens: the placeholder opens once Docker reports that
// the container runs, and serves.
func TestDockerWithoutProxyUsesPlaceholder(t *testing.T) {
	dockerd(t, "--userland-proxy=false")
	dockerImage(t)
	c := agent(t)
	drun(t, "--name", "web", "-p", "8000:80", "bb", "httpd", "-f", "-p", "80", "-h", "/etc")
	eventually(t, func() error {
		if s, why := state(c, 8000); s != port.Active {
			return fmt.Errorf("8000 is %v: %s", s, why)
		}
		return nil
	})
	eventually(t, func() error {
		conn, err := net.DialTimeout("tcp", "127.0.0.1:8000", 2*time.Second)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := conn.Write([]byte("GET /passwd HTTP/1.0\r\n\r\n")); err != nil {
			return err
		}
		b := make([]byte, 4096)
		n, err := conn.Read(b)
		if err == nil && !strings.Contains(string(b[:n]), "HTTP/1.") {
			err = fmt.Errorf("answer %q", b[:n])
		}
		return err
	})
	// The next container can have the port at once, apart from the hold-down, which a
	// command is rarely fast enough to meet.
	eventually(t, func() error {
		dockerClear(t)
		_, err := try("docker", "run", "-d", "--name", "web", "-p", "8000:80", "bb")
		return err
	})
}
