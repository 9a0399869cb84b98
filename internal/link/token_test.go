// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestTokenIsNotPrinted(t *testing.T) {
	tok := token(t, secret)
	for _, v := range []any{tok, &tok, struct{ T Token }{tok}, Options{Token: tok}, []Token{tok}, map[string]Token{"t": tok}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
			out := fmt.Sprintf(verb, v)
			if strings.Contains(out, secret[:8]) || strings.Contains(strings.ToLower(out), fmt.Sprintf("%x", secret[:8])) {
				t.Errorf("%s of %T: %s", verb, v, out)
			}
		}
	}
	var b bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&b, nil), slog.NewJSONHandler(&b, nil)} {
		slog.New(h).Info("x", "token", tok, "options", struct{ T Token }{tok})
	}
	j, err := json.Marshal(struct{ T Token }{tok})
	if err != nil {
		t.Fatal(err)
	}
	if s := b.String() + string(j); strings.Contains(s, secret[:8]) || !strings.Contains(s, redacted) {
		t.Error(s)
	}
}

func TestLoadOrCreateToken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "token")
	if _, err := LoadToken(path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("missing: %v", err)
	}
	a, err := LoadOrCreateToken(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []struct {
		path string
		mode fs.FileMode
	}{{path, 0o600}, {filepath.Dir(path), fs.ModeDir | 0o700}} {
		if fi, err := os.Stat(p.path); err != nil || fi.Mode() != p.mode {
			t.Errorf("%s: %v, %v", p.path, fi.Mode(), err)
		}
	}
	b, err := LoadOrCreateToken(path)
	if err != nil || a != b || len(a.key) != 64 {
		t.Errorf("read back: same %v, %d bytes, %v", a == b, len(a.key), err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestStoreTokenPermissions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "token")
	for _, text := range []string{secret, "another" + secret + "\r\n"} {
		if err := StoreToken(path, text); err != nil {
			t.Fatal(err)
		}
		got, err := LoadToken(path)
		if err != nil || got.key != strings.TrimSpace(text) {
			t.Errorf("%q read back: %v", text, err)
		}
	}
	if err := StoreToken(path, "cat: no such file"); err == nil || strings.Contains(err.Error(), "cat") {
		t.Errorf("what is no token was stored, or shown: %v", err)
	}
	if _, err := LoadToken(path); err != nil {
		t.Errorf("the old token is gone: %v", err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestConcurrentTokenCreation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	var toks [20]Token
	var wg sync.WaitGroup
	for i := range toks {
		wg.Go(func() {
			var err error
			if toks[i], err = LoadOrCreateToken(path); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, tok := range toks {
		if tok != toks[0] {
			t.Fatal("two tokens were made")
		}
	}
}

// Who can rename the file of a token puts one of their own into its place.
func TestTokenInADirectoryOfOthersIsRefused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shared")
	path := filepath.Join(dir, "token")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(path, []byte(secret), 0o600), os.Chmod(dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	const want = "others can replace what is in it"
	for name, load := range map[string]func(string) (Token, error){"load": LoadToken, "load or create": LoadOrCreateToken} {
		if _, err := load(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	other := filepath.Join(dir, "other")
	if _, err := LoadOrCreateToken(other); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("create: %v", err)
	}
	if err := StoreToken(other, secret); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("store: %v", err)
	}
	if _, err := os.Stat(other); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a token was left there: %v", err)
	}
}

func TestLoadTokenRefuses(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode fs.FileMode) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for name, tt := range map[string]struct{ path, says string }{
		"readable by the group": {file("g", secret, 0o640), "chmod 600"},
		"readable by all":       {file("o", secret, 0o604), "chmod 600"},
		"short":                 {file("s", "hunter2\n", 0o600), "at least 32"},
		"empty":                 {file("e", "", 0o600), "at least 32"},
		"huge":                  {file("h", strings.Repeat("x", maxTokenFile+1), 0o600), "not a token"},
		"directory":             {dir, "not a regular file"},
	} {
		for _, load := range []func(string) (Token, error){LoadToken, LoadOrCreateToken} {
			_, err := load(tt.path)
			if err == nil || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), tt.path) {
				t.Errorf("%s: %v", name, err)
			}
			if err != nil && (strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), secret)) {
				t.Errorf("%s: error shows the file's content: %v", name, err)
			}
		}
	}
	if tok, err := LoadToken(file("ok", "  "+secret+"\r\n", 0o400)); err != nil || tok.key != secret {
		t.Errorf("spaces around: %v", err)
	}
}
