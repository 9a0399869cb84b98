// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/buildinfo"
	"os"
	"path/filepath"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// The bill of materials of a program, here of this test, names each module that the
// program says it is linked of.
func TestMaterials(t *testing.T) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	info, err := buildinfo.ReadFile(program)
	if err != nil || len(info.Deps) == 0 {
		t.Fatalf("%d modules, %v", len(info.Deps), err)
	}
	r := &release{out: t.TempDir(), version: "v1.2.3", licences: map[string][]string{"std": {"BSD-3-Clause"}}}
	s := system{"linux", "amd64"}
	if err := r.materials(s, program, ".cdx.json"); err == nil {
		t.Error("a module without a licence is accepted")
	}
	for _, d := range info.Deps {
		r.licences[d.Path+"@"+d.Version] = []string{"MIT", "Apache-2.0"}
	}
	if err := r.materials(s, program, ".cdx.json"); err != nil {
		t.Fatal(err)
	}
	checkMaterials(t, filepath.Join(r.out, r.name(s, ".cdx.json")), info)
}

// checkMaterials reads a bill of materials as others do, and compares it with a program.
func checkMaterials(t *testing.T, file string, info *buildinfo.BuildInfo) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(f, cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	if bom.Metadata == nil || bom.Metadata.Component == nil || bom.Metadata.Component.Name != info.Main.Path || bom.Components == nil || bom.Dependencies == nil {
		t.Fatalf("incomplete: %+v", bom)
	}
	if c := bom.Metadata.Component; c.Version == "" || c.Licenses == nil {
		t.Errorf("the program is %+v", c)
	}
	by := map[string]cdx.Component{}
	for _, c := range *bom.Components {
		if by[c.Name].Name != "" {
			t.Errorf("%s comes twice", c.Name)
		}
		by[c.Name] = c
		if c.Version == "" || c.PackageURL != "pkg:golang/"+c.Name+"@"+c.Version || c.Licenses == nil || len(*c.Licenses) == 0 {
			t.Errorf("component %+v", c)
		}
	}
	if want := "go" + by["std"].Version; want != info.GoVersion {
		t.Errorf("the standard library is of %s, want %s", want, info.GoVersion)
	}
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		c := by[d.Path]
		if c.Version != d.Version {
			t.Errorf("%s is listed as version %q, want %q", d.Path, c.Version, d.Version)
		}
		delete(by, d.Path)
	}
	if delete(by, "std"); len(by) > 0 {
		t.Errorf("not linked: %v", by)
	}
	if refs := (*bom.Dependencies)[0].Dependencies; refs == nil || len(*refs) != len(*bom.Components) {
		t.Error("the program does not depend on all")
	}
}
