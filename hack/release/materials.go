// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// modules reads the licences of all modules that fairlead is linked of, by PATH@VERSION.
func (r *release) modules(ctx context.Context) (map[string][]string, error) {
	cmd := exec.CommandContext(ctx, "go", "run", "./hack/notices", "-list")
	cmd.Dir, cmd.Stderr = r.repo, os.Stderr
	cmd.Env = append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("licences of the modules: %w", err)
	}
	licences := map[string][]string{"std": {"BSD-3-Clause"}}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 2 {
			licences[f[0]+"@"+f[1]] = f[2:]
		}
	}
	return licences, nil
}

// materials writes which modules a program was linked of, and their licences, as
// CycloneDX, from what Go wrote into the program itself. The suffix is of the file's name.
func (r *release) materials(s system, program, suffix string) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	component := func(kind cdx.ComponentType, path, version string) cdx.Component {
		url := "pkg:golang/" + path + "@" + version
		return cdx.Component{BOMRef: url, Type: kind, Name: path, Version: version, PackageURL: url}
	}
	licensed := func(c cdx.Component, module string) (cdx.Component, error) {
		names := r.licences[module]
		if len(names) == 0 {
			return c, fmt.Errorf("the licence of %s is not known", module)
		}
		var list cdx.Licenses
		for _, name := range names {
			list = append(list, cdx.LicenseChoice{License: &cdx.License{ID: name}})
		}
		c.Licenses = &list
		return c, nil
	}
	main := component(cdx.ComponentTypeApplication, info.Main.Path, r.version)
	main.Licenses = &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}}
	std, err := licensed(component(cdx.ComponentTypeLibrary, "std", strings.TrimPrefix(info.GoVersion, "go")), "std")
	if err != nil {
		return err
	}
	list := []cdx.Component{std}
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		c, err := licensed(component(cdx.ComponentTypeLibrary, d.Path, d.Version), d.Path+"@"+d.Version)
		if err != nil {
			return err
		}
		if d.Sum != "" {
			c.Properties = &[]cdx.Property{{Name: "go:sum", Value: d.Sum}}
		}
		list = append(list, c)
	}
	refs := make([]string, len(list))
	for i, c := range list {
		refs[i] = c.BOMRef
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: &main}
	bom.Components = &list
	bom.Dependencies = &[]cdx.Dependency{{Ref: main.BOMRef, Dependencies: &refs}}
	return r.create(r.name(s, suffix), func(w io.Writer) error {
		e := cdx.NewBOMEncoder(w, cdx.BOMFileFormatJSON)
		e.SetPretty(true)
		return e.Encode(bom)
	})
}
