// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package observe

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/program"
)

// binary is the program under test.
var binary string

// listenVariable makes the test binary, under whatever name it was copied to, a
// server at the address in it: a process of the guest with a name of our choice.
const listenVariable = "FAIRLEAD_TEST_LISTEN"

func TestMain(m *testing.M) {
	if at := os.Getenv(listenVariable); at != "" {
		l, err := net.Listen("tcp", at)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		echo.Serve(l) // until it is killed
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "fairlead-observe-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if binary, err = program.Path(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

type process = program.Process

func start(t *testing.T, in *netns.Space, cmd *exec.Cmd) *process {
	t.Helper()
	return program.Start(t, program.Command{Cmd: cmd, In: in, End: syscall.SIGTERM})
}

// rig is a guest with an agent and a host with a host peer.
type rig struct {
	t              *testing.T
	dir            string
	guest, outside *netns.Space
	control        string // the agent's control socket
	agentFlags     []string
	hostFlags      []string
	agent, host    *process
}

// Where agent and host peer show their metrics, and the agent its page.
const (
	agentMetrics = "127.0.0.1:9464"
	hostMetrics  = "127.0.0.1:9465"
	pageAddr     = "127.0.0.1:7420"
)

func newRig(t *testing.T, agentFlags ...string) *rig {
	t.Helper()
	r := &rig{t: t, dir: t.TempDir(), agentFlags: agentFlags}
	r.control = filepath.Join(r.dir, "c", "s")
	for _, s := range []**netns.Space{&r.guest, &r.outside} {
		space, err := netns.New()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = space.Close() })
		*s = space
	}
	return r
}

func (r *rig) startAgent() {
	r.t.Helper()
	args := append([]string{
		"agent", "--link", "unix://" + filepath.Join(r.dir, "l", "s"), "--control", r.control,
		"--metrics-addr", agentMetrics, "--web-addr", pageAddr,
	}, r.agentFlags...)
	r.agent = start(r.t, r.guest, exec.Command(binary, args...))
}

func (r *rig) start() *rig {
	r.t.Helper()
	r.startAgent()
	args := append([]string{
		"host", "--connect", "unix://" + filepath.Join(r.dir, "l", "s"),
		"--control", filepath.Join(r.dir, "h", "s"), "--metrics-addr", hostMetrics,
	}, r.hostFlags...)
	r.host = start(r.t, r.outside, exec.Command(binary, args...))
	r.ready()
	return r
}

func (r *rig) ready() {
	r.t.Helper()
	wait.Within(r.t, limit(), "the agent is ready", func() error {
		l, err := r.client().List(r.t.Context())
		if err == nil && (!l.Ready() || len(l.Sources) == 0) {
			err = fmt.Errorf("sources %+v", l.Sources)
		}
		return err
	})
}

func (r *rig) client() *status.Client { return status.NewClient(r.control) }

// pageURL is the address of the page, with its token.
func (r *rig) pageURL() string {
	r.t.Helper()
	var url string
	wait.Within(r.t, limit(), "the page is there", func() (err error) {
		url, err = r.client().WebURL(r.t.Context())
		if err == nil && url == "" {
			err = fmt.Errorf("no address")
		}
		return err
	})
	return url
}

// listen opens a port in the guest.
func (r *rig) listen(address string) net.Listener {
	r.t.Helper()
	l, err := r.guest.Listen("tcp", address)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = l.Close() })
	go echo.Serve(l)
	return l
}

// named runs a server in the guest whose process has the given name.
func (r *rig) named(name, address string) *process {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	dir, err := os.MkdirTemp(r.dir, "bin")
	if err != nil {
		r.t.Fatal(err)
	}
	b, err := os.ReadFile(self)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name), b, 0o755)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	// In a place of its own, so that its path is short and always the same.
	cmd := exec.Command("sh", "-c", `mount --bind "$1" /mnt && exec "/mnt/$2"`, "sh", dir, name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.Env = append(os.Environ(), listenVariable+"="+address)
	return start(r.t, r.guest, cmd)
}

// limit is how long is waited for a browser, or for Prometheus, which are slow to start.
func limit() time.Duration { return 3 * wait.Limit() }

// relay carries connections to address in one namespace to the same address in
// another, until the test ends.
func relay(t *testing.T, from, to *netns.Space, address string) {
	t.Helper()
	l, err := from.Listen("tcp", address)
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
			go func() {
				defer c.Close()
				d, err := to.Dial("tcp", address)
				if err != nil {
					return
				}
				defer d.Close()
				go func() { _, _ = io.Copy(d, c); _ = d.Close() }()
				_, _ = io.Copy(c, d)
			}()
		}
	}()
}

// tool returns the path of a program that hack/provision.sh browser installs.
func tool(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("FAIRLEAD_CACHE")
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		dir = filepath.Join(cache, "fairlead")
	}
	path := filepath.Join(dir, "prometheus", name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run hack/provision.sh browser", err)
	}
	return path
}

// command runs a program to its end in the namespace of the test itself.
func command(t *testing.T, stdin io.Reader, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit())
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = stdin
	out, err := cmd.CombinedOutput()
	return string(out), err
}
