// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"io"
	"os"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// imageName is that of deploy/kubernetes, which no registry has: a node to which nobody brought
// the image does not get one of somebody else.
const imageName = "fairlead.invalid/fairlead"

// image makes a container image of nothing but the program, in the form that
// `docker load`, `podman load` and `ctr image import` read.
func (r *release) image(s system, program string) error {
	layer, err := r.layer(program)
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	img, err = mutate.ConfigFile(img, &v1.ConfigFile{
		OS: s.os, Architecture: s.arch, Created: v1.Time{Time: r.time},
		RootFS: v1.RootFS{Type: "layers", DiffIDs: diffIDs(img)},
		Config: v1.Config{
			Entrypoint: []string{"/fairlead"}, Cmd: []string{"agent"}, Env: []string{"PATH=/"},
			Labels: map[string]string{
				"org.opencontainers.image.title":    "fairlead",
				"org.opencontainers.image.version":  r.version,
				"org.opencontainers.image.source":   "https://github.com/fairlead/fairlead",
				"org.opencontainers.image.licenses": "Apache-2.0",
			},
		},
	})
	if err != nil {
		return err
	}
	tag, err := name.NewTag(imageName + ":" + r.version)
	if err != nil {
		return err
	}
	return r.create(r.name(s, "_image.tar"), func(w io.Writer) error { return tarball.Write(tag, img, w) })
}

func diffIDs(img v1.Image) []v1.Hash {
	c, err := img.ConfigFile()
	if err != nil {
		return nil
	}
	return c.RootFS.DiffIDs
}

// layer is the file system of the image.
func (r *release) layer(program string) (v1.Layer, error) {
	b, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	t := tar.NewWriter(&out)
	for _, c := range []struct {
		header tar.Header
		data   []byte
	}{
		{tar.Header{Name: "fairlead", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(b))}, b},
		{tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, nil},
	} {
		c.header.ModTime = r.time
		if err := t.WriteHeader(&c.header); err != nil {
			return nil, err
		}
		if _, err := t.Write(c.data); err != nil {
			return nil, err
		}
	}
	if err := t.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(out.Bytes())), nil })
}
