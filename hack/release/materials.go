// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/buildinfo"
	"io"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// materials writes which modules a program was linked of, as CycloneDX, from what
// Go wrote into the program itself.
func (r *release) materials(s system, program string) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	component := func(kind cdx.ComponentType, path, version string) cdx.Component {
		url := "pkg:golang/" + path + "@" + version
		return cdx.Component{BOMRef: url, Type: kind, Name: path, Version: version, PackageURL: url}
	}
	main := component(cdx.ComponentTypeApplication, info.Main.Path, r.version)
	list := []cdx.Component{component(cdx.ComponentTypeLibrary, "std", strings.TrimPrefix(info.GoVersion, "go"))}
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		c := component(cdx.ComponentTypeLibrary, d.Path, d.Version)
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
	return r.create(r.name(s, ".cdx.json"), func(w io.Writer) error {
		e := cdx.NewBOMEncoder(w, cdx.BOMFileFormatJSON)
		e.SetPretty(true)
		return e.Encode(bom)
	})
}
