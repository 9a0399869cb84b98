// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// content is a file of an archive or a package.
type content struct {
	from string // path on this machine
	to   string // path in the archive
	mode int64
}

// archive makes the archive for people who install by hand.
func (r *release) archive(s system, program string) error {
	list := []content{
		{program, filepath.Base(program), 0o755},
		{filepath.Join(r.repo, "LICENSE"), "LICENSE", 0o644},
		{filepath.Join(r.repo, "README.md"), "README.md", 0o644},
		{filepath.Join(r.repo, "CHANGELOG.md"), "CHANGELOG.md", 0o644},
		{filepath.Join(r.work, "NOTICES"), "NOTICES", 0o644},
	}
	if s.os != "windows" {
		for _, dir := range []string{"man", "completion"} {
			files, err := os.ReadDir(filepath.Join(r.work, dir))
			if err != nil {
				return err
			}
			for _, f := range files {
				list = append(list, content{filepath.Join(r.work, dir, f.Name()), path.Join(dir, f.Name()), 0o644})
			}
		}
	}
	if s.os == "linux" {
		list = append(list,
			content{filepath.Join(r.repo, "deploy/systemd/fairlead-agent.service"), "systemd/fairlead-agent.service", 0o644},
			content{filepath.Join(r.repo, "deploy/openrc/fairlead-agent"), "openrc/fairlead-agent", 0o755})
	}
	slices.SortFunc(list, func(a, b content) int { return strings.Compare(a.to, b.to) })
	top := r.name(s, "")
	if s.os == "windows" {
		return r.create(top+".zip", func(w io.Writer) error { return r.zip(w, top, list) })
	}
	return r.create(top+".tar.gz", func(w io.Writer) error { return r.tar(w, top, list) })
}

func (r *release) tar(w io.Writer, top string, list []content) error {
	z, err := gzip.NewWriterLevel(w, gzip.BestCompression)
	if err != nil {
		return err
	}
	t := tar.NewWriter(z)
	for _, c := range list {
		b, err := os.ReadFile(c.from)
		if err != nil {
			return err
		}
		h := &tar.Header{Name: path.Join(top, c.to), Mode: c.mode, Size: int64(len(b)), ModTime: r.time, Format: tar.FormatUSTAR}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		if _, err := t.Write(b); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), z.Close())
}

func (r *release) zip(w io.Writer, top string, list []content) error {
	z := zip.NewWriter(w)
	for _, c := range list {
		b, err := os.ReadFile(c.from)
		if err != nil {
			return err
		}
		f, err := z.CreateHeader(&zip.FileHeader{Name: path.Join(top, c.to), Method: zip.Deflate, Modified: r.time})
		if err != nil {
			return err
		}
		if _, err := f.Write(b); err != nil {
			return err
		}
	}
	return z.Close()
}
