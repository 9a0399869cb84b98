// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/testkit/enginetest"
)

var update = flag.Bool("update", false, "write the transcripts")

const cliDoc = "../../docs/cli.md"

// transcripts are the files that show what commands print: to readers, and what they need not see.
var transcripts = []string{cliDoc, "testdata/transcripts.txt"}

// transcript is a block of these files.
var transcript = regexp.MustCompile("(?m)^<!-- (tried|tried with [a-z, ]+) -->\n```\n((?s:.*?))```\n")

// varies are texts that differ from run to run, and what the documentation has instead.
var varies = []struct {
	what *regexp.Regexp
	as   string
}{
	{regexp.MustCompile(`\bpid \d+`), "pid 811"},
	{regexp.MustCompile(`\(\d{2,}\)`), "(811)"},
	{regexp.MustCompile(`net:\[\d+\]`), "net:[4026532177]"},
	{regexp.MustCompile(`\b\d\d:\d\d:\d\d\.\d{3}\b`), "12:00:00.000"},
	{regexp.MustCompile(`\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC`), "2026-11-21 14:00:00 UTC"},
	{regexp.MustCompile(`"since":"[^"]*"`), `"since":"2026-11-21T12:00:00Z"`},
	{regexp.MustCompile(`\b\d+s\b`), "3s"},
	{regexp.MustCompile(`e2e\.test`), "nginx"},
	{regexp.MustCompile(`of guest \S+: `), "of guest vm: "}, // the name of this machine
	{regexp.MustCompile(`/tmp/\S*/nginx\b`), "/usr/sbin/nginx"},
	{regexp.MustCompile(`want link, [^\n]*`), "want …"}, // every key there is
}

// methods are how sockets are observed, which depends on the kernel.
var methods = regexp.MustCompile(`fentry[^\n]*|kprobe[^\n]*|tp_btf[^\n]*|poll \(.*`)

func same(s, dir string) string {
	s = methods.ReplaceAllString(usual(continued.ReplaceAllString(s, " "), dir), "fentry")
	return explained.ReplaceAllStringFunc(s, fold)
}

// usual replaces names and numbers of this run.
func usual(s, dir string) string {
	s = owner.ReplaceAllStringFunc(strings.ReplaceAll(s, dir, "/etc/fairlead"), inLine)
	for _, v := range varies {
		s = v.what.ReplaceAllString(s, v.as)
	}
	return s
}

var (
	continued = regexp.MustCompile(`\n {4,}`)                                                                                          // a line of `fairlead explain`
	explained = regexp.MustCompile(`(?m)^(  [a-z ]{16} (ok|-|warn|FAIL) .*|Next: .*|nothing .*|\S+ is (not|reachable|asked for) .*)$`) // one that it may continue
	indented  = regexp.MustCompile(`^  [a-z ]{16} (ok|-|warn|FAIL) *|^Next: `)
)

// fold continues a line on the next one after 80 columns, as the command does for the
// names that it really printed.
func fold(line string) string {
	indent := cmp.Or(len(indented.FindString(line)), 4)
	var b strings.Builder
	column := 0
	for i, word := range strings.Split(line, " ") {
		switch n := len([]rune(word)); {
		case i > 0 && column+1+n > 80 && column > indent:
			b.WriteString("\n" + strings.Repeat(" ", indent) + word)
			column = indent + n
		case i > 0:
			b.WriteString(" " + word)
			column += 1 + n
		default:
			b.WriteString(word)
			column = n
		}
	}
	return b.String()
}

// owner is this process in a table, with the spaces that align the columns.
var owner = regexp.MustCompile(`e2e\.test \(\d+\)  `)

func inLine(s string) string { return fmt.Sprintf("%-*s", len(s), "nginx (811)") }

// alike makes texts equal that differ only in the width of columns.
func alike(s string) string {
	s = continued.ReplaceAllString(s, " ")
	return spaces.ReplaceAllString(cutOff.ReplaceAllString(s, "…"), " ")
}

var (
	spaces = regexp.MustCompile(` +`)
	cutOff = regexp.MustCompile(` ?[^ ]*…`)
)

// The transcripts are what the commands print, but for numbers that differ from run to run.
func TestDocumentedTranscripts(t *testing.T) {
	r := newRig(t)
	for name, text := range map[string]string{
		"agent.yaml": "holdDown: 150ms\nrules:\n- {name: no-debug, match: {ports: 9229}, action: deny}\n",
		"typo.yaml":  "holdDwon: 150ms\n",
	} {
		if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.agentFlags = []string{"--config", filepath.Join(r.dir, "agent.yaml")}
	r.hostFlags = []string{"--keep-privileges", "--bind", "asked"} // the holder, this process, has all capabilities
	r.outside.sh(t, lanOf)
	r.start()
	r.outside.listen(t, "tcp4", "127.0.0.1:5432")
	r.guest.listen(t, "tcp4", "0.0.0.0:8080")
	r.guest.listen(t, "tcp4", "127.0.0.1:9229")
	r.guest.listen(t, "tcp4", "0.0.0.0:5432")
	r.guest.listenPacket(t, "udp4", "0.0.0.0:5353")
	r.wantState("tcp 0.0.0.0:8080", "active")
	r.wantState("tcp 127.0.0.1:9229", "denied")
	r.wantState("udp 0.0.0.0:5353", "denied")
	r.eventually("the holder is named", func() error {
		if s, p := r.state("tcp 0.0.0.0:5432"); s != "conflict" || !strings.Contains(p.Reason, "pid") {
			return fmt.Errorf("%s: %s", s, p.Reason)
		}
		return nil
	})
	r.documented(25, tried{"tried", r.agentCtl})
}

// tried are the transcripts below comments with a mark, and the control socket that their
// commands ask.
type tried struct{ mark, control string }

// documented tries the transcripts with these marks.
func (r *rig) documented(atLeast int, of ...tried) {
	t := r.t
	t.Helper()
	watched := time.Second // for a watch, which does not end by itself
	r.eventually("transcripts are what the commands print: go -C test test -tags root ./e2e -run Transcripts -update", func() error {
		commands := 0
		r.typed("fairlead config loglevel set info", r.agentCtl, watched) // the try before has changed it
		var differ error
		for _, file := range transcripts {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			shown, n := r.tried(string(b), watched, of)
			commands += n
			switch {
			case *update:
				if err := os.WriteFile(file, []byte(shown), 0o644); err != nil {
					return err
				}
			case alike(string(b)) != alike(shown):
				diff := gocmp.Diff(strings.Split(alike(string(b)), "\n"), strings.Split(alike(shown), "\n"))
				differ = errors.Join(differ, fmt.Errorf("%s (-) differs from the output (+):\n%s", file, diff))
			}
		}
		if commands < atLeast {
			t.Errorf("%d commands are tried: want at least %d", commands, atLeast)
		}
		if watched *= 2; differ != nil && watched > time.Minute {
			t.Fatal(differ)
		}
		return differ // which perhaps takes longer
	})
}

// tried returns a file with what the commands of its transcripts print now, and their number.
func (r *rig) tried(text string, watched time.Duration, of []tried) (shown string, commands int) {
	shown = transcript.ReplaceAllStringFunc(text, func(block string) string {
		mark, lines := transcript.FindStringSubmatch(block)[1], transcript.FindStringSubmatch(block)[2]
		at := slices.IndexFunc(of, func(tr tried) bool { return tr.mark == mark })
		if at < 0 {
			return block
		}
		var out strings.Builder
		for line := range strings.Lines(lines) {
			command, ok := strings.CutPrefix(line, "$ ")
			if !ok {
				continue
			}
			commands++
			out.WriteString(line + same(r.typed(command, of[at].control, watched), r.dir))
		}
		return "<!-- " + mark + " -->\n```\n" + out.String() + "```\n"
	})
	return shown, commands
}

// So are the transcripts about containers, whose engine is one of this test, and about a host on which
// another program has a port.
func TestDocumentedTranscriptsOfContainers(t *testing.T) {
	published := func(n string) string { return fmt.Sprintf(`"80/tcp":[{"HostIp":"0.0.0.0","HostPort":%q}]`, n) }
	r := newRig(t, "--source", "socket,docker", "--labels", "--docker-host", enginetest.Docker(t,
		dockerContainer("a", "front", "172.30.0.2", `"fairlead.host-port":"18080","fairlead.name":"shop"`, published("8081")),
		dockerContainer("b", "admin", "172.30.0.3", `"fairlead.expose":"no"`, published("9000")),
		dockerContainer("c", "db", "172.30.0.4", "", "")))
	r.hostFlags = []string{"--keep-privileges", "--names", "127.0.0.1:80"}
	r.start()
	r.outside.listen(t, "tcp4", "127.0.0.1:5000")
	for _, at := range []string{"0.0.0.0:8081", "0.0.0.0:9000", "127.0.0.1:5000"} {
		r.guest.listen(t, "tcp4", at)
	}
	r.wantState("tcp 0.0.0.0:8081", "active")
	r.wantState("tcp 0.0.0.0:9000", "denied")
	r.wantState("tcp 127.0.0.1:5000", "conflict")
	r.documented(20, tried{"tried with containers", r.agentCtl}, tried{"tried with containers, on the host", r.hostCtl})
}

// typed runs a command line as a person would, and adds its exit code if it is not 0.
func (r *rig) typed(line, control string, watched time.Duration) string {
	r.t.Helper()
	script := strings.ReplaceAll(strings.TrimSpace(line), "/etc/fairlead/", r.dir+"/")
	limit := time.Minute
	if strings.HasPrefix(line, "fairlead watch") {
		limit = watched
	}
	cmd := exec.Command("/bin/sh", "-c", fmt.Sprintf("timeout %d %s 2>&1", int(limit.Seconds()), script))
	if strings.HasPrefix(line, "fairlead expose") { // a command of the host
		control = r.hostCtl
	}
	cmd.Env = append(os.Environ(), "FAIRLEAD_CLIENT_CONTROL="+control, "PATH="+filepath.Dir(binary)+":"+os.Getenv("PATH"), "COLUMNS=80")
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.Output()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() != 124: // of timeout
		return fmt.Sprintf("%s(exit status %d)\n", out, exit.ExitCode())
	case err != nil && exit == nil:
		r.t.Fatalf("%s: %v", line, err)
	}
	return string(out)
}

// Every command is in the documentation.
func TestEveryCommandIsDocumented(t *testing.T) {
	doc, err := os.ReadFile(cliDoc)
	if err != nil {
		t.Fatal(err)
	}
	out, _, code := fairlead(t, "--help")
	if code != 0 {
		t.Fatal(out)
	}
	for _, m := range regexp.MustCompile(`(?m)^  ([a-z]+) +[A-Z]`).FindAllStringSubmatch(out, -1) {
		if name := m[1]; name != "help" && !strings.Contains(string(doc), "\n## fairlead "+name) {
			t.Errorf("docs/cli.md has no chapter %q", "fairlead "+name)
		}
	}
}
