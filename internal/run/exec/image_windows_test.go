// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/windows"
)

// folder makes one for a test. Wine cannot remove files as T.TempDir does.
func folder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "fairlead-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		entries, err := os.ReadDir(dir)
		for _, e := range entries {
			err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
		}
		if err := errors.Join(err, os.Remove(dir)); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestImageIsWhatThePolicyNames(t *testing.T) {
	p := program(t, "exit", "0")
	other := p
	other.SHA256 = strings.Repeat("0", 64)
	if _, err := Start(other); !errors.Is(err, ErrChanged) {
		t.Errorf("another sum: %v", err)
	}
	dir := folder(t)
	dos := append([]byte("MZ"), make([]byte, 100)...)
	for name, content := range map[string]string{"script.exe": "@echo off\r\n", "dos.exe": string(dos), "far.exe": "MZ" + strings.Repeat("\xff", 62), "empty.exe": "", "it.bat": "MZ", "it.cmd": "MZ"} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := openImage(path, sumOf([]byte(content))); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	sub := filepath.Join(dir, "folder.exe")
	if err := os.Mkdir(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link.exe")
	_ = os.Symlink(p.Path, link) // users cannot always make one
	for _, path := range []string{sub, link, filepath.Join(dir, "missing.exe")} {
		if _, err := openImage(path, p.SHA256); err == nil {
			t.Errorf("%s is accepted", path)
		}
	}
}

func TestPathsThatAreRefused(t *testing.T) {
	for _, path := range []string{
		"", "x.exe", `\x.exe`, `C:x.exe`, `\\server\share\x.exe`, `\\?\C:\x.exe`, `\\.\C:\x.exe`, `\??\C:\x.exe`, `C:\x`, `C:\x.bat`, `C:\x.exe.`, `C:\x.exe `,
		`C:\x.txt:y.exe`, `C:\x.exe:y.exe`, `C:\*.exe`, `C:\"x.exe`, `//server/share/x.exe`,
	} {
		if err := checkPath(path); err == nil {
			t.Errorf("%q is accepted", path)
		}
	}
	for _, path := range []string{`C:\x.exe`, `c:/x y/z.EXE`} {
		if err := checkPath(path); err != nil {
			t.Error(err)
		}
	}
}

func TestImageIsHeld(t *testing.T) {
	p := program(t)
	b, err := os.ReadFile(p.Path)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder(t), "program.exe")
	if err := os.WriteFile(path, b, 0o700); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openImage(path, p.SHA256); !errors.Is(err, windows.ERROR_SHARING_VIOLATION) {
		t.Errorf("with a writer: %v", err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	held, err := openImage(path, p.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	_, werr := os.OpenFile(path, os.O_WRONLY, 0)
	other := path + ".new"
	if err := os.WriteFile(other, b, 0o700); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"write": werr, "truncate": os.Truncate(path, 0), "rename": os.Rename(path, path+".old"), "replace": os.Rename(other, path), "remove": os.Remove(path),
	} {
		if err == nil {
			t.Errorf("%s is possible", what)
		}
	}
	p.Path, p.Args = path, []string{asProgram, "exit", "7"}
	if _, _, code := run(t, p, ""); code != 7 {
		t.Errorf("exit code %d", code)
	}
	if err := errors.Join(held.Close(), os.Truncate(path, 0), os.Rename(path, path+".old"), os.Rename(other, path)); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
