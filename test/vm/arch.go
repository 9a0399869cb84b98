// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// architecture is a kind of processor that machines can have.
type architecture struct {
	name      string   // GOARCH
	suffix    string   // of the directories of its kernels
	provision string   // the section of hack/provision.sh that fetches what it needs
	qemu      string   // the emulator
	board     []string // its options
	port      []string // options for the second serial port, whose chardev is tty1
	console   string   // the kernel's names of the two serial ports
	tests     string
	cpu       string // to emulate
	libraries string // where Debian has libraries, below /lib and /usr/lib
}

// architectures are those that there are, this machine's first.
func architectures() []architecture {
	return []architecture{
		{
			name: "amd64", provision: "vm", qemu: "qemu-system-x86_64", port: []string{"-serial", "chardev:tty1"},
			console: "ttyS0", tests: "ttyS1", cpu: "max", libraries: "x86_64-linux-gnu",
		},
		{
			name: "arm64", suffix: "-arm64", provision: "arm64", qemu: "qemu-system-aarch64",
			board: []string{"-M", "virt,gic-version=3"}, port: []string{"-device", "pci-serial,chardev=tty1"},
			// Without pauth-impdef, signing pointers takes most of the time.
			console: "ttyAMA0", tests: "ttyS0", cpu: "max,pauth-impdef=on", libraries: "aarch64-linux-gnu",
		},
	}
}

// findArchitecture returns the architecture with that name.
func findArchitecture(name string) (architecture, error) {
	var names []string
	for _, a := range architectures() {
		if a.name == name {
			return a, nil
		}
		names = append(names, a.name)
	}
	return architecture{}, fmt.Errorf("-arch %q: want one of %q", name, names)
}

// native reports whether machines have the processor of this one.
func (a architecture) native() bool { return a.suffix == "" }

// tree returns the directory with the tools of Debian for the machines: / for those of this
// machine's architecture.
func (a architecture) tree(cache string) string {
	if a.native() {
		return "/"
	}
	return filepath.Join(cache, "roots", a.name)
}

// locate returns where a file is below a tree in which, unlike here, /bin, /sbin and /lib may
// be directories of their own.
func locate(tree, path string) (string, error) {
	var err error
	for _, p := range []string{path, strings.TrimPrefix(path, "/usr")} {
		at := filepath.Join(tree, p)
		if _, err = os.Stat(at); err == nil {
			return at, nil
		}
	}
	return "", err
}

// libraryFiles returns what programs load, as paths in the guest: their libraries, those
// that these load, and the loader.
func (a architecture) libraryFiles(tree string, programs []string) ([]string, error) {
	var found []string
	for queue := slices.Clone(programs); len(queue) > 0; queue = queue[1:] {
		names, loader, err := needed(tree, queue[0])
		if err != nil {
			return nil, err
		}
		if loader != "" && !slices.Contains(found, loader) {
			found = append(found, loader)
		}
		for _, name := range names {
			file, err := a.library(tree, name)
			if err != nil {
				return nil, fmt.Errorf("%s: %w: run hack/provision.sh %s", queue[0], err, a.provision)
			}
			if file != "" && !slices.Contains(found, file) {
				found, queue = append(found, file), append(queue, file)
			}
		}
	}
	return found, nil
}

// library returns the path of a library, "" for the loader, which each program names.
func (a architecture) library(tree, name string) (string, error) {
	if strings.HasPrefix(name, "ld-linux") {
		return "", nil
	}
	for _, dir := range []string{"/lib", "/usr/lib"} {
		path := filepath.Join(dir, a.libraries, name)
		_, err := os.Stat(filepath.Join(tree, path))
		if err == nil {
			return path, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	return "", fmt.Errorf("no library %s", name)
}

// needed returns the libraries and the loader that the dynamic section of a program names.
func needed(tree, path string) (libraries []string, loader string, err error) {
	at, err := locate(tree, path)
	if err != nil {
		return nil, "", err
	}
	f, err := elf.Open(at)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", at, err)
	}
	defer f.Close()
	if libraries, err = f.ImportedLibraries(); err != nil {
		return nil, "", fmt.Errorf("%s: %w", at, err)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			text := make([]byte, p.Filesz)
			if _, err := p.ReadAt(text, 0); err != nil {
				return nil, "", fmt.Errorf("%s: %w", at, err)
			}
			loader = strings.TrimRight(string(text), "\x00")
		}
	}
	return libraries, loader, nil
}
