// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// product parses the program's own files, without tests.
func product(t *testing.T, f func(fset *token.FileSet, path string, file *ast.File)) {
	t.Helper()
	for _, dir := range []string{"cmd", "internal"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Name() == "testkit" {
				return fs.SkipDir
			}
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
			if err == nil {
				f(fset, path, file)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// places returns how many arguments the texts of the codes in package port have, by their names.
func places(t *testing.T) map[string]int {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "internal/port/code.go"), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	codes := make(map[string]int)
	ast.Inspect(file, func(n ast.Node) bool {
		row, ok := n.(*ast.KeyValueExpr)
		if !ok {
			return true
		}
		code, ok := row.Key.(*ast.Ident)
		fields, isRow := row.Value.(*ast.CompositeLit)
		if !ok || !isRow {
			return true
		}
		for _, e := range fields.Elts {
			kv, ok := e.(*ast.KeyValueExpr)
			if !ok || kv.Key.(*ast.Ident).Name != "text" {
				continue
			}
			codes[code.Name] = 0
			for i := range 10 {
				if strings.Contains(kv.Value.(*ast.BasicLit).Value, "{"+strconv.Itoa(i)+"}") {
					codes[code.Name]++
				}
			}
		}
		return true
	})
	return codes
}

// Each code is the reason of something, with as many arguments as its text has places.
func TestCodesAreUsed(t *testing.T) {
	codes := places(t)
	if len(codes) < 90 {
		t.Fatalf("%d codes were found", len(codes))
	}
	used := make(map[string]bool)
	product(t, func(fset *token.FileSet, path string, file *ast.File) {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "port" {
					used[n.Sel.Name] = true
				}
			case *ast.CallExpr:
				fn, ok := n.Fun.(*ast.SelectorExpr)
				if !ok || fn.Sel.Name != "Because" || len(n.Args) == 0 || n.Ellipsis.IsValid() {
					break
				}
				if code, ok := n.Args[0].(*ast.SelectorExpr); ok && len(n.Args)-1 != codes[code.Sel.Name] {
					t.Errorf("%s: %s has %d arguments, want %d", fset.Position(n.Pos()), code.Sel.Name, len(n.Args)-1, codes[code.Sel.Name])
				}
			}
			return true
		})
	})
	for code := range codes {
		if !used[code] {
			t.Errorf("nothing has the reason %s", code)
		}
	}
}

// matching are the functions of package strings by which a text could decide.
var matching = []string{"Contains", "ContainsAny", "ContainsFunc", "Cut", "CutPrefix", "CutSuffix", "EqualFold", "HasPrefix", "HasSuffix", "Index", "LastIndex"}

// sentence reports whether an expression is the text of a reason, or of the rule that decided.
func sentence(e ast.Expr) bool {
	if call, ok := e.(*ast.CallExpr); ok && len(call.Args) == 0 {
		fn, ok := call.Fun.(*ast.SelectorExpr)
		return ok && fn.Sel.Name == "String" && sentence(fn.X)
	}
	field, ok := e.(*ast.SelectorExpr)
	return ok && (field.Sel.Name == "Reason" || field.Sel.Name == "Rule")
}

// What is decided by a reason is decided by its code, its kind or its rule: texts change.
func TestNoTextDecides(t *testing.T) {
	product(t, func(fset *token.FileSet, path string, file *ast.File) {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				fn, ok := n.Fun.(*ast.SelectorExpr)
				if !ok || !slices.Contains(matching, fn.Sel.Name) || len(n.Args) == 0 {
					break
				}
				if x, ok := fn.X.(*ast.Ident); ok && x.Name == "strings" && sentence(n.Args[0]) {
					t.Errorf("%s: the words of a reason decide", fset.Position(n.Pos()))
				}
			case *ast.BinaryExpr:
				text, ok := n.Y.(*ast.BasicLit)
				if ok && (n.Op == token.EQL || n.Op == token.NEQ) && text.Kind == token.STRING && text.Value != `""` && sentence(n.X) {
					t.Errorf("%s: the words of a reason decide", fset.Position(n.Pos()))
				}
			}
			return true
		})
	})
}
