// SPDX-License-Identifier: Apache-2.0

//go:build unix

package trust

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, []byte("text"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if b, err := ReadFile(path, 4); err != nil || string(b) != "text" {
		t.Fatalf("%q, %v", b, err)
	}
	for _, c := range []struct {
		name, want string
		spoil      func() error
	}{
		{"too long", "larger than 4 bytes", func() error { return os.WriteFile(path, []byte("texts"), 0o600) }},
		{"others write", "others can write to it", func() error { return os.Chmod(path, 0o602) }},
		{"directory of others", "others can replace what is in it", func() error { return errors.Join(os.Chmod(path, 0o600), os.Chmod(dir, 0o775)) }},
		{"FIFO", "not a regular file", func() error {
			return errors.Join(os.Chmod(dir, 0o755), os.Remove(path), syscall.Mkfifo(path, 0o600))
		}},
		{"directory", "not a regular file", func() error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) }},
		{"missing", "no such file", func() error { return os.Remove(path) }},
	} {
		if err := c.spoil(); err != nil {
			t.Fatal(err)
		}
		if b, err := ReadFile(path, 4); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %q, %v", c.name, b, err)
		}
	}
}

// What is left at the temporary name is neither followed nor kept.
func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "f"), filepath.Join(dir, "other")
	for name, leave := range map[string]func() error{
		"nothing": func() error { return nil },
		"a file":  func() error { return os.WriteFile(path+".new", []byte("long text of others"), 0o666) },
		"a link":  func() error { return os.Symlink(other, path+".new") },
	} {
		if err := leave(); err != nil {
			t.Fatal(err)
		}
		if err := WriteFile(path, []byte(name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != name {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		if fi, err := os.Lstat(path); err != nil || fi.Mode() != 0o600 {
			t.Errorf("%s: %v, %v; want a file of mode 0600", name, fi, err)
		}
		if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
			t.Errorf("%s: files %v, %v; want one", name, files, err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(dir, "d"), nil); err == nil {
		t.Error("a directory was replaced")
	}
	if _, err := os.Lstat(filepath.Join(dir, "d.new")); err == nil {
		t.Error("a failed write leaves its file")
	}
}

// stat is a file of a mode and a group.
type stat struct {
	fs.FileInfo
	mode fs.FileMode
	gid  uint32
}

func (s stat) Mode() fs.FileMode { return s.mode }
func (s stat) Sys() any          { return &syscall.Stat_t{Gid: s.gid} }

// Administrators of macOS may write to Homebrew's directories. Another group may not, nor
// everybody, nor the group of that number elsewhere.
func TestGroupOfAdministrators(t *testing.T) {
	for _, c := range []struct {
		goos string
		mode fs.FileMode
		gid  uint32
		want bool
	}{
		{"darwin", fs.ModeDir | 0o775, 80, false},
		{"darwin", 0o775, 80, false},
		{"darwin", fs.ModeDir | 0o777, 80, true},
		{"darwin", fs.ModeDir | 0o757, 80, true},
		{"darwin", fs.ModeDir | 0o775, 20, true}, // staff: all users
		{"darwin", fs.ModeDir | 0o755, 20, false},
		{"linux", fs.ModeDir | 0o775, 80, true},
		{"linux", fs.ModeDir | 0o755, 80, false},
	} {
		if got := othersWrite(stat{mode: c.mode, gid: c.gid}, c.goos); got != c.want {
			t.Errorf("%s, %s of group %d: others can write to it: %v", c.goos, c.mode, c.gid, got)
		}
	}
}

// A file that is not written to its end leaves the old one, and nothing else.
func TestPlaceThatFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := WriteFile(path, []byte("old")); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(path + ".new")
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close() // it can no longer be written
	if err := Place(f, []byte("half"), path, os.Rename); err == nil {
		t.Error("no error")
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "old" {
		t.Errorf("%q, %v; want the old file", b, err)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("files %v, %v; want one", files, err)
	}
}

// In a sticky directory, as /tmp is, others cannot replace a file.
func TestStickyDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	if err := Dir(dir); err != nil {
		t.Error(err)
	}
}

func TestProgramNeedsAnAbsolutePath(t *testing.T) {
	if err := Program("sh"); err == nil || !strings.Contains(err.Error(), "want an absolute path") {
		t.Error(err)
	}
}

// A program of a directory that only others' PATH names is not run.
func TestFindIgnoresThePath(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "wslinfo"), []byte("#!/bin/sh\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
	if path, err := Find("wslinfo"); strings.HasPrefix(path, dir) {
		t.Errorf("found %s, %v", path, err)
	}
	if path, err := Find("sh"); err != nil || !filepath.IsAbs(path) {
		t.Errorf("sh: %q, %v", path, err)
	}
	if err := os.Chmod(filepath.Join(dir, "wslinfo"), 0o777); err != nil { //nolint:gosec // the test's matter
		t.Fatal(err)
	}
	if _, err := find("wslinfo", "/nowhere", dir); err == nil || !strings.Contains(err.Error(), "others can write to it") {
		t.Errorf("a program that others can write to: %v", err)
	}
}

// No program is looked for in PATH: who sets it, or can write to one of its directories,
// would run as root.
func TestProgramsHaveAbsolutePaths(t *testing.T) {
	for _, root := range []string{"../../../cmd", "../../../internal"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if name := byPath(n); name != "" {
					t.Errorf("%s: %s", path, name)
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

// byPath returns a call that looks for a program in PATH, "" if n is none.
func byPath(n ast.Node) string {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return ""
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	if x, is := sel.X.(*ast.Ident); !is || x.Name != "exec" {
		return ""
	}
	at := map[string]int{"LookPath": -1, "Command": 0, "CommandContext": 1}
	i, ok := at[sel.Sel.Name]
	if !ok {
		return ""
	}
	if i < 0 {
		return "exec.LookPath"
	}
	if lit, is := call.Args[i].(*ast.BasicLit); is && !strings.HasPrefix(lit.Value, `"/`) {
		return "exec." + sel.Sel.Name + " of " + lit.Value
	}
	return ""
}
