// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// The image has the program and nothing else to run, and its bytes depend on nothing but
// the program, the version and the time of the commit.
func TestImageIsMinimalAndReproducible(t *testing.T) {
	program := filepath.Join(t.TempDir(), "fairlead")
	if err := os.WriteFile(program, []byte("a program"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := system{"linux", "amd64"}
	build := func() (path string, content []byte) {
		r := &release{out: t.TempDir(), version: "v1.2.3", time: time.Unix(1700000000, 0).UTC()}
		if err := r.image(s, program); err != nil {
			t.Fatal(err)
		}
		path = filepath.Join(r.out, "fairlead_1.2.3_linux_amd64_image.tar")
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return path, content
	}
	path, one := build()
	if _, two := build(); !bytes.Equal(one, two) {
		t.Error("two builds differ")
	}
	list, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(path) })
	if err != nil || len(list) != 1 || !slices.Equal(list[0].RepoTags, []string{"fairlead.invalid/fairlead:v1.2.3"}) {
		t.Errorf("tags of the archive: %+v, %v", list, err)
	}
	img, err := tarball.ImageFromPath(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.OS != "linux" || config.Architecture != "amd64" || !slices.Equal(config.Config.Entrypoint, []string{"/fairlead"}) {
		t.Errorf("%+v", config)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = content.Close() }()
	var names []string
	for files := tar.NewReader(content); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if want := []string{"fairlead", "tmp/"}; !slices.Equal(names, want) {
		t.Errorf("the image has %q, want %q", names, want)
	}
}
