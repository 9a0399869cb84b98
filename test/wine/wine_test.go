// SPDX-License-Identifier: Apache-2.0

//go:build linux && wine

package wine

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the transcript")

const golden = "testdata/transcript.txt"

// transcript is the block of this file that shows what commands print on Windows.
var transcript = regexp.MustCompile("(?m)^<!-- tried under wine -->\n```\n((?s:.*?))```\n")

// user is the directory of wine's user.
var user = regexp.MustCompile(`(?i)C:\\users\\[^\\ ]+`)

// typed runs a command line in dir, and adds its exit code if it is not 0.
func typed(t *testing.T, dir, exe, line string) string {
	t.Helper()
	script, err := filepath.Abs("../../hack/wine.sh")
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Fields(line)
	cmd := exec.CommandContext(t.Context(), script, append([]string{exe}, words[1:]...)...)
	cmd.Dir, cmd.WaitDelay = dir, 5*time.Second
	cmd.Env = append(os.Environ(), "COLUMNS=80")
	out, err := cmd.CombinedOutput()
	text := user.ReplaceAllString(strings.ReplaceAll(string(out), "\r\n", "\n"), `C:\Users\u`)
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return fmt.Sprintf("%s(exit status %d)\n", text, exit.ExitCode())
	case err != nil:
		t.Fatalf("%s: %v", line, err)
	}
	return text
}

// forget removes what an earlier run left in wine's directory of the user's settings.
func forget(t *testing.T, dir, exe string) {
	t.Helper()
	out := typed(t, dir, exe, "fairlead version")
	if !strings.HasPrefix(out, "fairlead ") { // this also makes wine's directory
		t.Fatal(out)
	}
	cache := os.Getenv("FAIRLEAD_CACHE")
	if cache == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(base, "fairlead")
	}
	left, err := filepath.Glob(filepath.Join(cache, "wine/drive_c/users/*/AppData/Roaming/fairlead"))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range left {
		if err := os.RemoveAll(d); err != nil {
			t.Fatal(err)
		}
	}
}

// What the transcript shows of fairlead.exe is what it prints.
func TestTranscript(t *testing.T) {
	dir := t.TempDir()
	exe := filepath.Join(dir, "fairlead.exe")
	build := exec.Command("go", "build", "-o", exe, "./cmd/fairlead")
	build.Dir = "../.."
	build.Env = append(os.Environ(), "GOOS=windows", "GOARCH=amd64", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, text := range map[string]string{
		"token.txt": strings.Repeat("0123456789abcdef", 4) + "\r\n", "host.yaml": "connect: dev=hvsock://wsl:1023\nbindd: all\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	forget(t, dir, exe)
	doc, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	fresh := transcript.ReplaceAllStringFunc(string(doc), func(block string) string {
		var out strings.Builder
		for line := range strings.Lines(transcript.FindStringSubmatch(block)[1]) {
			if command, ok := strings.CutPrefix(line, "> "); ok {
				tried++
				out.WriteString(line + typed(t, dir, exe, command))
			}
		}
		return "<!-- tried under wine -->\n```\n" + out.String() + "```\n"
	})
	if tried < 7 {
		t.Errorf("%d commands are tried: want at least 7", tried)
	}
	if *update {
		if err := os.WriteFile(golden, []byte(fresh), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	// Where lines are continued depends on the name of wine's user.
	if diff := cmp.Diff(strings.Fields(string(doc)), strings.Fields(fresh)); diff != "" {
		t.Errorf("%s (-) differs from the output (+): go -C test test -tags wine ./wine -update\n%s", golden, diff)
	}
}
