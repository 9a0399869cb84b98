// SPDX-License-Identifier: Apache-2.0

//go:build linux && boot

package install

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// apk is a package of Alpine's, unpacked: gzip streams of a signature, the scripts and
// the files (Alpine's apk-package(5)).
type apk struct {
	scripts string   // directory of .pre-install and so on
	files   []string // absolute
	data    string   // directory
}

// openAPK unpacks a package. Debian has no apk, so the test does by hand what that does
// with a package's files and scripts.
func openAPK(t *testing.T, path string) apk {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// The streams are one archive: only the last ends with tar's mark of the end.
	z, err := gzip.NewReader(bufio.NewReader(f))
	if err != nil {
		t.Fatal(err)
	}
	a := apk{scripts: t.TempDir(), data: t.TempDir()}
	archive := tar.NewReader(z)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return a
		}
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(a.data, h.Name)
		if strings.HasPrefix(h.Name, ".") {
			to = filepath.Join(a.scripts, h.Name)
		}
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(to, 0o755)
		case tar.TypeReg:
			err = a.write(to, archive, h)
		default:
			t.Fatalf("%s has type %c", h.Name, h.Typeflag)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (a *apk) write(to string, from io.Reader, h *tar.Header) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	b, err := io.ReadAll(from)
	if err != nil {
		return err
	}
	if !strings.HasPrefix(h.Name, ".") {
		a.files = append(a.files, "/"+h.Name)
	}
	return os.WriteFile(to, b, h.FileInfo().Mode().Perm())
}

// copyFiles puts the package's files where they belong. It keeps an agent.yaml that is
// there, as apk does with a changed file of /etc.
func (a apk) copyFiles(t *testing.T) {
	t.Helper()
	for _, path := range a.files {
		if _, err := os.Stat(path); err == nil && strings.HasSuffix(path, ".yaml") {
			continue
		}
		// A program that runs is replaced, not written to.
		sh(t, "install -D -m $(stat -c %a "+a.data+path+") "+a.data+path+" "+path)
	}
}

// script runs one, if the package has it.
func (a apk) script(t *testing.T, name string) {
	t.Helper()
	path := filepath.Join(a.scripts, name)
	if _, err := os.Stat(path); err == nil {
		sh(t, "chmod +x "+path+" && "+path)
	}
}

// TestOpenRCAPK runs the files and scripts of the apk: install, start, upgrade, remove.
func TestOpenRCAPK(t *testing.T) {
	before := listFiles(t)
	older, newer := openAPK(t, built(t, "old", "*.apk")), openAPK(t, built(t, "new", "*.apk"))
	pid := 0
	step(t, "install", func(t *testing.T) {
		older.script(t, ".pre-install")
		older.copyFiles(t)
		older.script(t, ".post-install")
		if out, err := try("rc-service fairlead-agent status"); err == nil {
			t.Errorf("the package starts the agent: %s", out)
		}
	})
	step(t, "start", func(t *testing.T) {
		sh(t, "rc-update add fairlead-agent default && rc-service fairlead-agent start")
		wantVersion(t, oldVersion)
		pid = agentPID(t, "/usr/bin/fairlead", 0)
	})
	step(t, "upgrade", func(t *testing.T) {
		sh(t, "echo 'logLevel: debug' >>/etc/fairlead/agent.yaml")
		newer.script(t, ".pre-upgrade")
		newer.copyFiles(t)
		newer.script(t, ".post-upgrade")
		wantVersion(t, newVersion)
		agentPID(t, "/usr/bin/fairlead", pid)
		sh(t, "grep -q debug /etc/fairlead/agent.yaml && fairlead config loglevel get | grep -q debug")
	})
	step(t, "remove", func(t *testing.T) {
		newer.script(t, ".pre-deinstall")
		wait.Until(t, "the agent has ended", func() error {
			_, err := try("! pgrep -f '^/usr/bin/fairlead agent'")
			return err
		})
		refused(t, "rc-update show default | grep fairlead-agent", "")
		sh(t, "rm -r "+strings.Join(newer.files, " "))
		newer.script(t, ".post-deinstall")
		sh(t, "rm -rf /etc/fairlead /var/lib/fairlead")
		for _, path := range newer.files { // and the directories that came with it
			for dir := filepath.Dir(path); !before[dir]; dir = filepath.Dir(dir) {
				_ = os.Remove(dir)
			}
		}
		wantFiles(t, before)
	})
}
