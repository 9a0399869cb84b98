// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// methodsVariable names, in the environment of a test, the attach mechanisms it
// may use. Packages that read it are run once for each method.
const methodsVariable = "FAIRLEAD_METHODS"

// kernelCall is in the tests of packages that do more in a machine than outside.
const kernelCall = "kernels.Must("

// packagesVariable is the directory of the packages under test. They are built and packed
// for packages of Go that read it.
const packagesVariable = "FAIRLEAD_PACKAGES"

// nestedVariable is the directory with kernel and initramfs of a machine within the machine.
// They and the emulator are packed for packages of Go that read it.
const nestedVariable = "FAIRLEAD_INNER_MACHINE"

// The program under test is built and packed for packages whose tests import
// programImport, which finds it by the environment: a guest has no compiler.
const (
	programImport = "github.com/fairlead/fairlead/test/kit/program"
	binaryDir     = "cmd/fairlead"
	// runCall is in packages whose tests need fairlead-run, too.
	runCall = "program.RunPath("
)

// suite is one package with the tests in it that only build with the tags.
type suite struct {
	Package string   // import path
	Dir     string   // on this machine
	Tests   []string // names of Test, Fuzz and Example functions
	Methods bool     // it reads methodsVariable
	Binary  bool     // it runs the program under test
	Run     bool     // it runs fairlead-run
	// Packages: it installs the packages under test.
	Packages bool
	// Nested: it boots a machine within the machine.
	Nested bool

	Benchmarks bool // the tags add some
}

type listed struct {
	ImportPath   string
	Dir          string
	TestGoFiles  []string
	XTestGoFiles []string
}

// findSuites returns the packages of the patterns with tests that tags add. If smoke is
// not empty, a list of names, tests that also run outside, under tag root, are left out
// unless they are in it or their package depends on the machine's kernel.
func findSuites(ctx context.Context, arch, tags, smoke string, patterns []string) ([]suite, error) {
	without, err := goList(ctx, arch, "", patterns)
	if err != nil {
		return nil, err
	}
	with, err := goList(ctx, arch, tags, patterns)
	if err != nil {
		return nil, err
	}
	outside, err := goList(ctx, arch, "root", patterns)
	if err != nil {
		return nil, err
	}
	missing := map[string]bool{}
	for _, name := range strings.Fields(strings.ReplaceAll(smoke, ",", " ")) {
		missing[name] = true
	}
	chosen := maps.Clone(missing)
	var suites []suite
	for importPath, p := range with {
		s := suite{Package: importPath, Dir: p.Dir}
		if s.Methods, err = mentions(p.Dir, methodsVariable); err != nil {
			return nil, err
		}
		kernel, err := mentions(p.Dir, kernelCall)
		if err != nil {
			return nil, err
		}
		known, elsewhere := without[importPath].tests(), outside[importPath].tests()
		for _, file := range p.tests() {
			if slices.Contains(known, file) {
				continue
			}
			keep := func(name string) bool {
				delete(missing, name)
				return smoke == "" || s.Methods || kernel || !slices.Contains(elsewhere, file) || chosen[name]
			}
			if err := s.addTests(filepath.Join(p.Dir, file), keep); err != nil {
				return nil, err
			}
		}
		if len(s.Tests) == 0 && !s.Benchmarks {
			continue
		}
		if s.Binary, err = mentions(p.Dir, programImport); err != nil {
			return nil, err
		}
		if s.Run, err = mentions(p.Dir, runCall); err != nil {
			return nil, err
		}
		if s.Packages, err = mentions(p.Dir, packagesVariable); err != nil {
			return nil, err
		}
		if s.Nested, err = mentions(p.Dir, nestedVariable); err != nil {
			return nil, err
		}
		suites = append(suites, s)
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("no test is named %s", strings.Join(slices.Sorted(maps.Keys(missing)), ", "))
	}
	slices.SortFunc(suites, func(a, b suite) int { return strings.Compare(a.Package, b.Package) })
	return suites, nil
}

// tests returns the names of the files with tests.
func (l listed) tests() []string { return slices.Concat(l.TestGoFiles, l.XTestGoFiles) }

// byModule returns the patterns in each module, by its directory.
func byModule(patterns []string) map[string][]string {
	found := make(map[string][]string)
	for _, p := range patterns {
		inside, isTest := strings.CutPrefix(p, "./test/")
		if isTest || p == "./..." {
			found["test"] = append(found["test"], "./"+strings.TrimPrefix(inside, "./"))
		}
		if !isTest {
			found["."] = append(found["."], p)
		}
	}
	return found
}

// goList lists packages as guests see them. A pattern that matches only
// packages whose files all need tags is no error here.
func goList(ctx context.Context, arch, tags string, patterns []string) (map[string]listed, error) {
	found := make(map[string]listed)
	for dir, patterns := range byModule(patterns) {
		if err := listModule(ctx, dir, arch, tags, patterns, found); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// listModule adds the packages of one module.
func listModule(ctx context.Context, dir, arch, tags string, patterns []string, found map[string]listed) error {
	args := slices.Concat([]string{"-C", dir, "list", "-e", "-json=ImportPath,Dir,TestGoFiles,XTestGoFiles", "-tags=" + tags}, patterns)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = guestEnv(arch)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go list: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("go list: %w", err)
		}
		found[p.ImportPath] = p
	}
}

// guestEnv is the environment to build for a guest with that processor in.
func guestEnv(arch string) []string {
	return append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
}

// addTests adds what -test.run can choose in one file, if keep is true of its name.
func (s *suite) addTests(file string, keep func(name string) bool) error {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	for _, d := range parsed.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Recv != nil || f.Name.Name == "TestMain" {
			continue
		}
		for _, kind := range []string{"Test", "Fuzz", "Example"} {
			if strings.HasPrefix(f.Name.Name, kind) && keep(f.Name.Name) {
				s.Tests = append(s.Tests, f.Name.Name)
			}
		}
		s.Benchmarks = s.Benchmarks || strings.HasPrefix(f.Name.Name, "Benchmark")
	}
	return nil
}

// mentions reports whether a Go file in dir contains word.
func mentions(dir, word string) (bool, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return false, err
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return false, err
		}
		if bytes.Contains(text, []byte(word)) {
			return true, nil
		}
	}
	return false, nil
}

// freshPrefix begins the names of tests that need a kernel that no other test has used:
// what others leave in it, namespaces and connections, ends at no certain time. They are
// run first, each package's in a process of its own.
const freshPrefix = "TestFresh"

// divide returns the tests that need a fresh kernel, and the others.
func divide(tests []string) (fresh, others []string) {
	for _, name := range tests {
		if strings.HasPrefix(name, freshPrefix) {
			fresh = append(fresh, name)
		} else {
			others = append(others, name)
		}
	}
	return fresh, others
}

// filter is the -test.run expression that chooses exactly these tests.
func filter(tests []string) string { return "^(" + strings.Join(tests, "|") + ")$" }

// goBuild compiles the package in dir, or its tests, into a static binary at out, an absolute path.
func goBuild(ctx context.Context, arch string, args []string, out, dir string) error {
	cmd := exec.CommandContext(ctx, "go", slices.Concat([]string{"-C", dir}, args, []string{"-trimpath", "-ldflags=-s -w", "-o", out})...)
	cmd.Env = guestEnv(arch)
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, bytes.TrimSpace(text))
	}
	return nil
}
