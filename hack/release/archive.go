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
	link string // what it is a symbolic link to, instead of from
}

// archive makes the archive for people who install by hand.
func (r *release) archive(s system, program string) error {
	list := []content{
		{from: program, to: filepath.Base(program), mode: 0o755},
		{from: filepath.Join(r.repo, "LICENSE"), to: "LICENSE", mode: 0o644},
		{from: filepath.Join(r.repo, "README.md"), to: "README.md", mode: 0o644},
		{from: filepath.Join(r.repo, "CHANGELOG.md"), to: "CHANGELOG.md", mode: 0o644},
		{from: filepath.Join(r.work, "NOTICES"), to: "NOTICES", mode: 0o644},
	}
	if s.os != "windows" {
		for _, dir := range []string{"man", "completion"} {
			files, err := os.ReadDir(filepath.Join(r.work, dir))
			if err != nil {
				return err
			}
			for _, f := range files {
				list = append(list, content{from: filepath.Join(r.work, dir, f.Name()), to: path.Join(dir, f.Name()), mode: 0o644})
			}
		}
	}
	if s.os == "linux" {
		list = append(list,
			content{from: filepath.Join(filepath.Dir(program), "fairlead-run"), to: "fairlead-run", mode: 0o755},
			content{from: filepath.Join(r.repo, "deploy/systemd/fairlead-agent.service"), to: "systemd/fairlead-agent.service", mode: 0o644},
			content{from: filepath.Join(r.repo, "deploy/systemd/fairlead-run.service"), to: "systemd/fairlead-run.service", mode: 0o644},
			content{from: filepath.Join(r.repo, "deploy/openrc/fairlead-agent"), to: "openrc/fairlead-agent", mode: 0o755},
			// The drop-in for Rancher Desktop's agent is fairlead by another name.
			content{to: "rancher-desktop-guestagent", mode: 0o777, link: filepath.Base(program)})
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
		h := &tar.Header{Name: path.Join(top, c.to), Mode: c.mode, ModTime: r.time, Format: tar.FormatUSTAR}
		var b []byte
		if c.link != "" {
			h.Typeflag, h.Linkname = tar.TypeSymlink, c.link
		} else if b, err = os.ReadFile(c.from); err != nil {
			return err
		}
		h.Size = int64(len(b))
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
