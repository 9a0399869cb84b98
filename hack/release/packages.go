// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/apk" // each registers a form of packages
	_ "github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm"
)

// form is a kind of package. Its scripts are in a directory of its name.
type form struct {
	name    string
	systemd bool // else OpenRC
}

// zsh is the directory with the completions of packages.
func (f form) zsh() string {
	if f.name == "deb" {
		return "/usr/share/zsh/vendor-completions"
	}
	return "/usr/share/zsh/site-functions"
}

// pack makes the package of fairlead for a Linux.
func (r *release) pack(s system, program string, f form) error {
	list, err := r.contents(program, f)
	if err != nil {
		return err
	}
	return r.wrap(s, f, f.name, nfpm.Info{
		Name:         "fairlead",
		Description:  "Ports of a Linux VM on its host's localhost\nThe guest agent watches the kernel for ports that open and close; the host peer\nopens them on the host, and carries the traffic.",
		Overridables: nfpm.Overridables{Contents: list},
	})
}

// packRun makes the package of fairlead-run.
func (r *release) packRun(s system, program string, f form) error {
	unit, err := r.installed("deploy/systemd/fairlead-run.service")
	if err != nil {
		return err
	}
	return r.wrap(s, f, "run", nfpm.Info{
		Name:        "fairlead-run",
		Description: "Programs of a Linux VM for its containers\nContainers and users have the programs run that a list allows them.",
		Overridables: nfpm.Overridables{
			Depends: []string{"fairlead"},
			Contents: files.Contents{
				r.content(program, "/usr/bin/fairlead-run", 0o755, files.TypeFile),
				r.content(unit, "/usr/lib/systemd/system/fairlead-run.service", 0o644, files.TypeFile),
				r.content(filepath.Join(r.repo, "deploy/packages/run.yaml"), "/etc/fairlead/run.yaml", 0o600, files.TypeConfigNoReplace),
				r.content(filepath.Join(r.repo, "LICENSE"), "/usr/share/doc/fairlead-run/copyright", 0o644, files.TypeFile),
			},
		},
	})
}

// wrap makes a package, with the scripts of a directory.
func (r *release) wrap(s system, f form, directory string, p nfpm.Info) error {
	scripts := filepath.Join(r.repo, "deploy/packages", directory)
	info := nfpm.WithDefaults(&nfpm.Info{
		Name: p.Name, Arch: s.arch, Platform: "linux", Version: r.version, Section: "net", Priority: "optional",
		Maintainer:  "The fairlead developers <fairlead@example.org>",
		Description: p.Description,
		Homepage:    "https://github.com/fairlead/fairlead", License: "Apache-2.0", MTime: r.time,
		Overridables: nfpm.Overridables{
			Contents: p.Contents, Depends: p.Depends,
			RPM: nfpm.RPM{BuildHost: "fairlead", Group: "System Environment/Daemons"},
			Deb: nfpm.Deb{Compression: "xz"},
		},
	})
	for _, script := range []struct {
		name string
		to   *string
	}{
		{"postinstall.sh", &info.Scripts.PostInstall}, {"preremove.sh", &info.Scripts.PreRemove}, {"postremove.sh", &info.Scripts.PostRemove},
		{"postupgrade.sh", &info.APK.Scripts.PostUpgrade},
	} {
		if path := filepath.Join(scripts, script.name); exists(path) {
			*script.to = path
		}
	}
	packager, err := nfpm.Get(f.name)
	if err != nil {
		return err
	}
	if err := nfpm.PrepareForPackager(info, f.name); err != nil {
		return err
	}
	return r.create(packager.ConventionalFileName(info), func(w io.Writer) error { return packager.Package(info, w) })
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// contents lists the files of a package.
func (r *release) contents(program string, f form) (files.Contents, error) {
	var list files.Contents
	add := func(from, to string, mode os.FileMode, kind string) {
		list = append(list, r.content(from, to, mode, kind))
	}
	file := func(from, to string, mode os.FileMode) { add(from, to, mode, files.TypeFile) }
	repo := func(path string) string { return filepath.Join(r.repo, path) }
	file(program, "/usr/bin/fairlead", 0o755)
	add("", "/etc/fairlead", 0o755, files.TypeDir)
	add(repo("deploy/packages/agent.yaml"), "/etc/fairlead/agent.yaml", 0o644, files.TypeConfigNoReplace)
	file(filepath.Join(r.work, "completion/bash"), "/usr/share/bash-completion/completions/fairlead", 0o644)
	file(filepath.Join(r.work, "completion/zsh"), f.zsh()+"/_fairlead", 0o644)
	file(filepath.Join(r.work, "completion/fish"), "/usr/share/fish/vendor_completions.d/fairlead.fish", 0o644)
	docs := "/usr/share/doc/fairlead/"
	add("", strings.TrimSuffix(docs, "/"), 0o755, files.TypeDir)
	file(repo("LICENSE"), docs+"copyright", 0o644)
	file(filepath.Join(r.work, "NOTICES"), docs+"NOTICES", 0o644)
	file(repo("README.md"), docs+"README.md", 0o644)
	pages, err := os.ReadDir(filepath.Join(r.work, "man"))
	if err != nil {
		return nil, err
	}
	for _, p := range pages {
		path := filepath.Join(r.work, "man", p.Name())
		if err := r.stamp(path); err != nil {
			return nil, err
		}
		file(path, "/usr/share/man/man1/"+p.Name(), 0o644)
	}
	if !f.systemd {
		script, err := r.installed("deploy/openrc/fairlead-agent")
		if err != nil {
			return nil, err
		}
		file(script, "/etc/init.d/fairlead-agent", 0o755)
		return list, nil
	}
	for from, to := range map[string]string{
		"deploy/systemd/fairlead-agent.service": "/usr/lib/systemd/system/fairlead-agent.service",
		"deploy/systemd/fairlead-host.service":  "/usr/lib/systemd/user/fairlead-host.service",
	} {
		unit, err := r.installed(from)
		if err != nil {
			return nil, err
		}
		file(unit, to, 0o644)
	}
	return list, nil
}

// content is a file or directory of a package.
func (r *release) content(from, to string, mode os.FileMode, kind string) *files.Content {
	return &files.Content{Source: from, Destination: to, Type: kind, FileInfo: &files.ContentFileInfo{Mode: mode, MTime: r.time, Owner: "root", Group: "root"}}
}

// installed is a file of deploy/ with the path that packages have the program at.
func (r *release) installed(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(r.repo, name))
	if err != nil {
		return "", err
	}
	text := strings.ReplaceAll(string(b), "/usr/local/bin/fairlead", "/usr/bin/fairlead")
	return filepath.Join(r.work, name), r.write(name, text)
}
