// SPDX-License-Identifier: Apache-2.0

// Command notices writes the licences of all that is linked into fairlead's
// programs to a file in cmd/fairlead. It reads the module cache and needs no network. With
// -list it prints each module, its version and its licences instead. A module without a
// licence, or with one that is not allowed, is an error.
package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// output is the generated file, from the root of the repository.
const output = "cmd/fairlead/notices.txt.gz"

// systems are those that programs are built for, and programs what is built.
var (
	systems  = []string{"linux/amd64", "linux/arm64", "windows/amd64", "windows/arm64", "darwin/arm64"}
	programs = map[string][]string{
		"linux":   {"./cmd/fairlead", "./cmd/fairlead-run", "./cmd/rancher-desktop-guestagent"},
		"windows": {"./cmd/fairlead"},
		"darwin":  {"./cmd/fairlead"},
	}
)

func main() {
	list := flag.Bool("list", false, "print the modules and their licences")
	flag.Parse()
	do := run
	if *list {
		do = show
	}
	if err := do("."); err != nil {
		fmt.Fprintln(os.Stderr, "notices:", err)
		os.Exit(1)
	}
}

// run generates the file below root.
func run(root string) error {
	text, err := generate(root)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := w.Write(text); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, output), b.Bytes(), 0o644)
}

// show prints the modules.
func show(root string) error {
	modules, err := linked(root)
	if err != nil {
		return err
	}
	for _, m := range modules {
		if _, err := m.add(nil); err != nil {
			return err
		}
		fmt.Println(m.path, m.version, strings.Join(slices.Sorted(maps.Keys(m.licences)), " "))
	}
	return nil
}

// module is one that is linked, with the directories of its linked packages.
type module struct {
	path, version, dir string
	packages           map[string]bool
	licences           map[string]bool // SPDX names, after add
}

// notice is one licence text and what it covers.
type notice struct {
	text   string
	covers []string
}

// generate returns the text of all notices.
func generate(root string) ([]byte, error) {
	modules, err := linked(root)
	if err != nil {
		return nil, err
	}
	notices, err := own(root)
	if err != nil {
		return nil, err
	}
	for _, m := range modules {
		if notices, err = m.add(notices); err != nil {
			return nil, err
		}
	}
	return format(notices), nil
}

// linked returns the modules of all programs on all systems, sorted.
func linked(root string) ([]*module, error) {
	found := map[string]*module{}
	for _, s := range systems {
		goos, arch, _ := strings.Cut(s, "/")
		cmd := exec.Command("go", append([]string{"list", "-deps", "-json=Dir,Module"}, programs[goos]...)...)
		cmd.Dir, cmd.Stderr = root, os.Stderr
		cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+arch, "CGO_ENABLED=0", "GOFLAGS=", "GOPROXY=off")
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list for %s: %w", s, err)
		}
		if err := collect(found, out); err != nil {
			return nil, err
		}
	}
	byPath := func(a, b *module) int { return cmp.Compare(a.path, b.path) }
	return slices.SortedFunc(maps.Values(found), byPath), nil
}

// collect adds the modules in the output of go list.
func collect(found map[string]*module, list []byte) error {
	for d := json.NewDecoder(bytes.NewReader(list)); ; {
		var p struct {
			Dir    string
			Module *struct {
				Path, Version, Dir string
				Main               bool
			}
		}
		err := d.Decode(&p)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case p.Module == nil || p.Module.Main:
			continue
		}
		m := found[p.Module.Path]
		if m == nil {
			m = &module{path: p.Module.Path, version: p.Module.Version, dir: p.Module.Dir, packages: map[string]bool{}, licences: map[string]bool{}}
			found[m.path] = m
		}
		m.packages[p.Dir] = true
	}
}

// own returns the notices of what is not a module.
func own(root string) (list []notice, err error) {
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	for _, o := range []struct{ what, file string }{
		{"fairlead (Apache-2.0)", filepath.Join(root, "LICENSE")},
		{"The Go standard library and runtime", filepath.Join(strings.TrimSpace(string(goroot)), "LICENSE")},
		{"fairlead's BPF programs (GPL-2.0-only OR BSD-2-Clause), with headers of libbpf (LGPL-2.1 OR BSD-2-Clause)", filepath.Join(root, "LICENSES/BSD-2-Clause.txt")},
		{"fairlead's BPF programs (GPL-2.0-only OR BSD-2-Clause)", filepath.Join(root, "LICENSES/GPL-2.0-only.txt")},
	} {
		if list, err = add(list, o.file, o.what); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// notCode matches files that are source, or about a module's documentation alone.
var notCode = regexp.MustCompile(`\.(go|docs)$`)

var licenceFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|copyright)([-_.].*)?$`)

// add appends the notices of a module: of its root, and of directories between
// that and its linked packages.
func (m *module) add(list []notice) ([]notice, error) {
	dirs := map[string]bool{m.dir: true}
	for p := range m.packages {
		for ; len(p) > len(m.dir); p = filepath.Dir(p) {
			dirs[p] = true
		}
	}
	found := false
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if !e.Type().IsRegular() || !licenceFile.MatchString(e.Name()) || notCode.MatchString(e.Name()) {
				continue
			}
			file := filepath.Join(dir, e.Name())
			if list, err = add(list, file, m.path+" "+m.version); err != nil {
				return nil, err
			}
			if attribution.MatchString(e.Name()) {
				continue
			}
			name, err := permitted(file)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", m.path, err)
			}
			m.licences[name] = true
			found = found || dir == m.dir
		}
	}
	if !found {
		return nil, fmt.Errorf("%s has no licence file", m.path)
	}
	return list, nil
}

// attribution matches files that go with a licence and are none.
var attribution = regexp.MustCompile(`(?i)^(notice|copyright)`)

// permitted returns which licence a file is. One that is not allowed is an error.
func permitted(file string) (name string, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	if name = licence(string(b)); name == "" {
		return "", fmt.Errorf("%s is none of the licences that are allowed: Apache-2.0, BSD, ISC, MIT, MPL-2.0", filepath.Base(file))
	}
	return name, nil
}

// phrases are words of the licences that are allowed, without case and line breaks.
var phrases = []struct{ licence, words string }{
	{"MPL-2.0", "mozilla public license version 2.0"},
	{"MPL-2.0", "mozilla public license, version 2.0"},
	{"Apache-2.0", "apache license version 2.0"},
	{"Apache-2.0", "licensed under the apache license, version 2.0"},
	{"MIT", "permission is hereby granted, free of charge, to any person obtaining a copy"},
	{"BSD-2-Clause", "redistribution and use in source and binary forms, with or without modification, are permitted"},
	{"ISC", "permission to use, copy, modify, and distribute this software for any purpose with or without fee"},
	{"ISC", "permission to use, copy, modify, and/or distribute this software for any purpose with or without fee"},
}

// copyleft matches the licences of which nothing may be linked. The MPL names them, far
// from its beginning.
var copyleft = regexp.MustCompile(`gnu (affero |lesser |library )?general public|server side public|business source|commons clause`)

// endorse matches the third clause of a BSD licence.
var endorse = regexp.MustCompile(`names? of .{1,200} may (not )?be used to endorse or promote`)

// licence returns which of the allowed licences a text is (its SPDX name), "" for none of them.
func licence(text string) string {
	text = strings.Join(strings.FieldsFunc(strings.ToLower(text), func(r rune) bool { return unicode.IsSpace(r) || r == '>' }), " ") // some quote it
	for _, p := range phrases {
		at := strings.Index(text, p.words)
		if at < 0 {
			continue
		}
		if p.licence != "MPL-2.0" && copyleft.MatchString(text) {
			return ""
		}
		if p.licence == "BSD-2-Clause" && endorse.MatchString(text) {
			return "BSD-3-Clause"
		}
		return p.licence
	}
	return ""
}

// add notes that the text of a file covers what.
func add(list []notice, file, what string) ([]notice, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	text := strings.Trim(strings.ReplaceAll(string(b), "\r\n", "\n"), "\n")
	i := slices.IndexFunc(list, func(n notice) bool { return n.text == text })
	if i < 0 {
		return append(list, notice{text, []string{what}}), nil
	}
	if !slices.Contains(list[i].covers, what) {
		list[i].covers = append(list[i].covers, what)
	}
	return list, nil
}

// format lays out the notices, each text once.
func format(list []notice) []byte {
	const rule = "================================================================================\n"
	var b bytes.Buffer
	b.WriteString("fairlead is licensed under Apache-2.0. Its programs contain the software below,\n" +
		"each part under the licence that follows its name. The unmodified source of a Go\n" +
		"module is available under its name and version: go mod download NAME@VERSION.\n")
	for _, n := range list {
		b.WriteString("\n" + rule)
		for _, c := range n.covers {
			b.WriteString(strings.TrimSpace(c) + "\n")
		}
		b.WriteString(rule + "\n" + n.text + "\n")
	}
	return b.Bytes()
}
