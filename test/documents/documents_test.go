// SPDX-License-Identifier: Apache-2.0

// Package documents checks that the tests that the documents name exist.
package documents

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// named is a test as the documents name it: folder and function.
var named = regexp.MustCompile("`((?:cmd|internal|test)(?:/[\\w.-]+)*) ((?:Test|Fuzz)\\w+)`")

// tests returns the test functions of a folder, whatever their build tags.
func tests(t *testing.T, folder string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]bool)
	for _, path := range files {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				found[fn.Name.Name] = true
			}
		}
	}
	return found
}

func TestNamedTestsExist(t *testing.T) {
	documents, err := filepath.Glob(root + "/docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]map[string]bool)
	for _, path := range documents {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			folder, name := m[1], m[2]
			if known[folder] == nil {
				known[folder] = tests(t, folder)
			}
			if !known[folder][name] {
				t.Errorf("%s: no test %s in %s", filepath.Base(path), name, folder)
			}
		}
	}
}

// Each row of a table with a column "shown by" names the tests that show it.
func TestEachDefectHasATest(t *testing.T) {
	for document, rows := range map[string]int{"reliability.md": 43, "security.md": 60} {
		text, err := os.ReadFile(filepath.Join(root, "docs", document))
		if err != nil {
			t.Fatal(err)
		}
		got, within := 0, false
		for line := range strings.Lines(string(text)) {
			switch {
			case !strings.HasPrefix(line, "|"):
				within = false
			case strings.Contains(line, "| shown by |"):
				within = true
			case within && !strings.HasPrefix(line, "|---"):
				got++
				if !named.MatchString(line) {
					t.Errorf("%s: no test in %s", document, line)
				}
			}
		}
		if got != rows {
			t.Errorf("%s has %d rows, want %d", document, got, rows)
		}
	}
}

// No commit has to have a tag, and without one `make release` needs a version.
func TestReleaseCommandsHaveAVersion(t *testing.T) {
	paths, err := filepath.Glob(root + "/docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	command, whole := regexp.MustCompile("make release[^`\n]*"), regexp.MustCompile(`^make release VERSION=v\d+\.\d+\.\d+$`)
	found := 0
	for _, path := range append(paths, root+"/README.md") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range command.FindAllString(string(text), -1) {
			found++
			if !whole.MatchString(c) {
				t.Errorf("%s: %q: want make release VERSION=v0.1.0", filepath.Base(path), c)
			}
		}
	}
	if found == 0 {
		t.Error("no document says how a release is built")
	}
}

// No registry has an image, so the manifests name one that cannot be pulled, never one that
// somebody else may publish; each overlay that is shown replaces that one.
func TestImageOfTheManifestsIsReplaced(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	image := regexp.MustCompile(`(?m)^ +image: (.*)$`).FindAllStringSubmatch(read("deploy/kubernetes/daemonset.yaml"), -1)
	if len(image) != 1 || !strings.HasPrefix(image[0][1], "fairlead.invalid/") {
		t.Fatalf("images %q, want one of fairlead.invalid", image)
	}
	// Nodes to which the archive of the image was brought have it by that name.
	if !strings.Contains(read("hack/release/image.go"), `"`+image[0][1]+`"`) {
		t.Errorf("the archive of the image is not tagged %s", image[0][1])
	}
	for _, name := range []string{"deploy/kubernetes/kustomization.yaml", "docs/kubernetes.md", "test/cluster/scene_test.go"} {
		shown := regexp.MustCompile(`\bname"?: "?([\w.-]+/[\w./-]+)`).FindAllStringSubmatch(read(name), -1)
		if len(shown) != 1 || shown[0][1] != image[0][1] {
			t.Errorf("%s replaces %q, want %s", name, shown, image[0][1])
		}
	}
}

// The README names the kernels on which docs/kernels.md shows that all tests passed, from the
// oldest that is supported on.
func TestReadmeNamesKernelsOfTheMatrix(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	readme, kernels := strings.Join(strings.Fields(read("README.md")), " "), read("docs/kernels.md")
	_, sentence, found := strings.Cut(readme, "it is tested on ")
	sentence, _, ended := strings.Cut(sentence, " (")
	oldest := regexp.MustCompile(`needs Linux (\d+\.\d+) or later`).FindStringSubmatch(readme)
	outside := regexp.MustCompile(`on Linux (\d+\.\d+) as\s+well, without emulation`).FindStringSubmatch(kernels)
	if !found || !ended || oldest == nil || outside == nil {
		t.Fatalf("README: %q, oldest %q; docs/kernels.md: outside %q", sentence, oldest, outside)
	}
	amd64, arm64, _ := strings.Cut(sentence, " on arm64 ")
	for processor, part := range map[string]string{"": amd64, " arm64": arm64} {
		want := passedKernels(kernels, processor)
		if processor == "" {
			want = append(want, outside[1])
		}
		want = slices.DeleteFunc(want, func(v string) bool { return compareVersions(v, oldest[1]) < 0 })
		slices.SortFunc(want, compareVersions)
		want = slices.Compact(want)
		if got := regexp.MustCompile(`\d+\.\d+`).FindAllString(part, -1); !slices.Equal(got, want) {
			t.Errorf("README names Linux %q%s, docs/kernels.md has %q", got, processor, want)
		}
	}
	if named, passed := strings.Contains(amd64, "WSL's configuration"), len(passedKernels(kernels, " as WSL's")) > 0; named != passed {
		t.Errorf("README names a kernel with WSL's configuration: %v; docs/kernels.md has one that passed: %v", named, passed)
	}
}

// passedKernels returns the versions of the columns in the table of tests in which every
// test passed, of a processor that the title names after the version.
func passedKernels(text, processor string) (versions []string) {
	passed := map[string]bool{}
	var columns []string
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case strings.HasPrefix(cells[0], "test of "):
			columns = cells
			for _, c := range columns[1:] {
				passed[c] = true
			}
		case len(columns) > 0 && len(cells) == len(columns) && (strings.HasPrefix(cells[0], "Test") || cells[0] == "the kernel reports no fault"):
			for i, result := range cells[1:] {
				passed[columns[i+1]] = passed[columns[i+1]] && result == "passed"
			}
		}
	}
	for column, ok := range passed {
		title := regexp.MustCompile(`^Linux (\d+\.\d+)(.*)$`).FindStringSubmatch(column)
		if ok && title != nil && title[2] == processor {
			versions = append(versions, title[1])
		}
	}
	return versions
}

// compareVersions compares "6.1" and "6.12" by their numbers.
func compareVersions(a, b string) int {
	var m, n [2]int
	_, _ = fmt.Sscanf(a, "%d.%d", &m[0], &m[1])
	_, _ = fmt.Sscanf(b, "%d.%d", &n[0], &n[1])
	return slices.Compare(m[:], n[:])
}

func TestPassedKernels(t *testing.T) {
	const table = "| capability | Linux 6.1 |\n|---|---|\n| nat | a |\n\n" +
		"| test of test/e2e | Linux 6.1 | Linux 6.12 | Linux 7.2 |\n|---|---|---|---|\n" +
		"| TestA | passed | passed | passed |\n| TestB | passed | – | passed |\n| the kernel reports no fault | passed | passed | failed |\n\n" +
		"| test of test/e2e | Linux 6.12 as WSL's |\n|---|---|\n| TestA | passed |\n\n" +
		"| test of test/e2e | Linux 6.12 arm64 |\n|---|---|\n| TestA | passed |\n"
	for processor, want := range map[string]string{"": "6.1", " as WSL's": "6.12", " arm64": "6.12"} {
		if got := passedKernels(table, processor); !slices.Equal(got, []string{want}) {
			t.Errorf("%q: got %q", processor, got)
		}
	}
	if compareVersions("6.12", "6.2") <= 0 || compareVersions("5.15", "6.1") >= 0 {
		t.Error("versions are compared as text")
	}
}

// Who has the program alone has no file of the repository: texts of the program, and files
// that are installed, name its documents by their address.
func TestProgramsNameDocumentsByAddress(t *testing.T) {
	const address = "https://github.com/fairlead/fairlead/blob/main/"
	document := regexp.MustCompile(`docs/[\w.-]+\.(md|json)`)
	check := func(path, text string) {
		if document.MatchString(strings.ReplaceAll(text, address+"docs/", "")) {
			t.Errorf("%s: %q: want %sdocs/…", path, text, address)
		}
	}
	for _, top := range []string{"cmd", "internal", "deploy"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "testdata") || strings.HasSuffix(path, ".md") {
				return err
			}
			if !strings.HasSuffix(path, ".go") {
				b, err := os.ReadFile(path)
				for line := range strings.Lines(string(b)) {
					check(path, line)
				}
				return err
			}
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
					check(path, l.Value)
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
