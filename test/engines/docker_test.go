// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/docker"
	"github.com/fairlead/fairlead/internal/source/engine"
)

const dockerSocket = "/run/docker.sock"

// dockerd starts Debian's engine and waits until it answers.
func dockerd(t testing.TB, args ...string) *daemon {
	t.Helper()
	d := start(t, "dockerd", append([]string{
		"--host=unix://" + dockerSocket, "--cgroup-parent=/" + cgroupParent(),
		"--pidfile=/run/docker.pid", "--exec-root=/run/docker-exec",
	}, args...)...)
	dockerReady(t)
	return d
}

func dockerReady(t testing.TB) {
	t.Helper()
	eventually(t, 60*time.Second, func() error { _, err := try("docker", "version"); return err })
}

// busyboxImage makes an image of one static binary.
func busyboxImage(t testing.TB) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	b, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "bin/busybox"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sh", "sleep", "nc", "httpd", "cat", "echo"} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	tar := filepath.Join(t.TempDir(), "busybox.tar")
	run(t, "tar", "-C", root, "-cf", tar, ".")
	return tar
}

func dockerImage(t testing.TB) {
	t.Helper()
	run(t, "docker", "import", busyboxImage(t), "bb")
}

func dockerSource(t testing.TB, grace time.Duration) *docker.Source {
	t.Helper()
	s, err := docker.New(docker.Options{
		Hosts:  []string{"unix://" + dockerSocket},
		Logger: logger(t), Retry: engine.Retry{Grace: grace},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func drun(t testing.TB, args ...string) string {
	t.Helper()
	return run(t, "docker", append([]string{"run", "-d", "--network", "v4"}, args...)...)
}

func TestDockerScenarios(t *testing.T) {
	d := dockerd(t)
	dockerImage(t)
	run(t, "docker", "network", "create", "v4")
	src := dockerSource(t, time.Hour)
	r, _ := follow(t, src)
	want(t, r)

	t.Run("run, kill -9 and --rm leave nothing", func(t *testing.T) {
		drun(t, "--name", "web", "--rm", "-p", "127.0.0.1:8080:80", "bb", "sleep", "600")
		want(t, r, "tcp 127.0.0.1:8080 web")
		run(t, "docker", "kill", "web")
		want(t, r)
	})
	fmt.Println(d.log)
	_ = syscall.SIGKILL
}
