// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestArchitectureIsChecked(t *testing.T) {
	good := options{arch: "arm64", kernels: "6.12", memory: minMemory, cpus: 1, timeout: 1, testTimeout: 1, accel: "auto"}
	if err := good.validate(); err != nil {
		t.Error(err)
	}
	for name, spoil := range map[string]func(*options){
		"unknown": func(o *options) { o.arch = "s390x" },
		"kvm":     func(o *options) { o.accel = "kvm" },
		"system":  func(o *options) { o.system = "systemd" },
	} {
		o := good
		spoil(&o)
		if err := o.validate(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// The libraries of a program are found without running it, with those that they load.
func TestLibraries(t *testing.T) {
	native := architectures()[0]
	got, err := native.libraryFiles("/", []string{"/bin/sh"})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"libc.so.6", "ld-linux"} {
		if !slices.ContainsFunc(got, func(p string) bool { return strings.Contains(p, want) }) {
			t.Errorf("no %s in %q", want, got)
		}
	}
	if _, err := native.libraryFiles(t.TempDir(), []string{"/bin/sh"}); err == nil {
		t.Error("a program that is absent has libraries")
	}
	if _, err := native.library("/", "libabsent.so.1"); err == nil {
		t.Error("a library that is absent was found")
	}
}

// In an unpacked tree, /bin is a directory of its own.
func TestLocate(t *testing.T) {
	tree := t.TempDir()
	for _, dir := range []string{"usr/bin", "bin"} {
		if err := os.MkdirAll(filepath.Join(tree, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"usr/bin/a", "bin/b"} {
		if err := os.WriteFile(filepath.Join(tree, file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{"/usr/bin/a": "usr/bin/a", "/usr/bin/b": "bin/b", "/usr/bin/c": ""} {
		got, err := locate(tree, path)
		if want != "" {
			want = filepath.Join(tree, want)
		}
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
}

func TestReportNamesTheProcessor(t *testing.T) {
	for release, want := range map[string]string{"6.12.117+deb12-cloud-amd64": "6.12", "6.12.117+deb12-cloud-arm64": "6.12 arm64", "x": "x"} {
		if got := (&column{release: release}).title(); got != want {
			t.Errorf("%s: %q, want %q", release, got, want)
		}
	}
}
