// SPDX-License-Identifier: Apache-2.0

package conns

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// limits are the fields that bound the heads which clients and servers of HTTP read; without
// them these are 10 MiB and 1 MiB for each connection.
var limits = map[string]string{"Transport": "MaxResponseHeaderBytes", "Server": "MaxHeaderBytes"}

// Each client and server of HTTP bounds the heads that it reads.
func TestHeadsAreLimited(t *testing.T) {
	found := 0
	for _, dir := range []string{"../..", "../../../cmd"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Name() == "testkit" {
				return fs.SkipDir
			}
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				lit, ok := n.(*ast.CompositeLit)
				if !ok {
					return true
				}
				of, ok := lit.Type.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				pkg, ok := of.X.(*ast.Ident)
				if want := limits[of.Sel.Name]; ok && pkg.Name == "http" && want != "" {
					found++
					if !slices.ContainsFunc(lit.Elts, func(e ast.Expr) bool {
						kv, ok := e.(*ast.KeyValueExpr)
						return ok && kv.Key.(*ast.Ident).Name == want
					}) {
						t.Errorf("%s: an http.%s without %s", path, of.Sel.Name, want)
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found == 0 {
		t.Error("no client or server of HTTP was found")
	}
}
