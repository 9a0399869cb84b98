// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/containerd"
	"github.com/fairlead/fairlead/internal/source/engine"
)

const containerdSocket = "/run/containerd/containerd.sock"

// startContainerd starts Debian's containerd and waits until it answers.
func startContainerd(t testing.TB) *daemon {
	t.Helper()
	config := filepath.Join(t.TempDir(), "config.toml")
	// One directory for the daemon's own data, so that a test finds none of another's.
	root := filepath.Join("/var/lib/containerd", filepath.Base(filepath.Dir(config)))
	text := "version = 2\nroot = \"" + root + "\"\nstate = \"/run/containerd\"\n[grpc]\n  address = \"" + containerdSocket + "\"\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	d := start(t, "containerd", "--config", config)
	containerdReady(t)
	return d
}

func containerdReady(t testing.TB) {
	t.Helper()
	eventually(t, 60*time.Second, func() error { _, err := try("ctr", "version"); return err })
}

func nerdctl(t testing.TB, args ...string) string {
	t.Helper()
	return run(t, cacheBin("nerdctl"), args...)
}

// nrun runs a container of nerdctl in the background.
func nrun(t testing.TB, args ...string) string {
	t.Helper()
	return nerdctl(t, append([]string{"run", "-d", "--cgroup-parent", "/" + cgroupParent()}, args...)...)
}

func containerdSource(t testing.TB, grace time.Duration) *containerd.Source {
	t.Helper()
	s, err := containerd.New(containerd.Options{
		Sockets: []string{containerdSocket}, Logger: logger(t), Retry: engine.Retry{Grace: grace},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestContainerdScenarios(t *testing.T) {
	startContainerd(t)
	nerdctl(t, "load", "-i", imageArchive(t))
	r, _ := follow(t, containerdSource(t, time.Hour))
	want(t, r)

	t.Run("run and kill", func(t *testing.T) {
		nrun(t, "--name", "web", "-p", "127.0.0.1:8080:80", "bb", "sh", "-c", "echo hi >/tmp/x; httpd -f -p 80 -h /tmp")
		want(t, r, "tcp 127.0.0.1:8080 web")
		for _, b := range r.bindings() {
			t.Logf("%+v", b)
		}
		t.Log(try("sh", "-c", "cat /var/lib/cni/results/*; grep . /proc/self/mountinfo | grep cgroup; cat /proc/$(pidof sleep)/cgroup"))
		t.Log(reach(r.bindings()[0]))
		nerdctl(t, "kill", "web")
		want(t, r)
	})
}
