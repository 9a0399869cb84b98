// SPDX-License-Identifier: Apache-2.0

//go:build linux

package enclave

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

// Image is the name of the image that ImageArchive makes.
const Image = "bb"

// ImageArchive makes an archive as `docker save` writes it, below dir: an image of
// one static binary that is a shell, a web server and more.
func ImageArchive(dir string) (tar string, err error) {
	layer := filepath.Join(dir, "layer.tar")
	if err := busyboxLayer(filepath.Join(dir, "root"), layer); err != nil {
		return "", err
	}
	b, err := os.ReadFile(layer)
	if err != nil {
		return "", err
	}
	diff := sha256.Sum256(b)
	config := fmt.Sprintf(`{"architecture":%q,"os":"linux","config":{"Cmd":["/bin/sleep","infinity"],"Env":["PATH=/bin"]},`+
		`"rootfs":{"type":"layers","diff_ids":["sha256:%x"]},"history":[{}]}`, runtime.GOARCH, diff)
	name := fmt.Sprintf("%x.json", sha256.Sum256([]byte(config)))
	manifest := fmt.Sprintf(`[{"Config":%q,"RepoTags":["docker.io/library/%s:latest"],"Layers":["layer.tar"]}]`, name, Image)
	if err := errors.Join(
		os.WriteFile(filepath.Join(dir, name), []byte(config), 0o600),
		os.WriteFile(filepath.Join(dir, "manifest.json"), []byte(manifest), 0o600),
	); err != nil {
		return "", err
	}
	tar = filepath.Join(dir, "image.tar")
	return tar, pack("-C", dir, "-cf", tar, name, "manifest.json", "layer.tar")
}

// busyboxLayer makes a file system at root, and an archive of it.
func busyboxLayer(root, tar string) error {
	b, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	for _, d := range []string{"bin", "proc", "sys", "dev", "etc", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(root, "bin/busybox"), b, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"sh", "sleep", "nc", "httpd", "cat", "echo", "true"} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil {
			return err
		}
	}
	return pack("-C", root, "--owner=0", "--group=0", "-cf", tar, ".")
}

func pack(args ...string) error {
	if out, err := exec.Command("tar", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("tar %q: %w: %s", args, err, out)
	}
	return nil
}
