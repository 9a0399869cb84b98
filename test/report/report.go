// SPDX-License-Identifier: Apache-2.0

// Package report reads the event stream of go test -json, shows readable
// progress, and counts. A skipped test counts as failed: what is skipped is
// not tested, and nobody reads a skip.
package report

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// event is one line of go test -json (see "go doc test2json").
type event struct {
	Action     string
	Package    string
	ImportPath string // of build events
	Test       string
	Elapsed    float64 // seconds
	Output     string
}

// Count is how many tests passed and failed. Tests are top-level ones; a check
// that is no Go test (a build, a linter, a boot) counts as one.
type Count struct{ Passed, Failed int }

// Add adds d to c.
func (c *Count) Add(d Count) {
	c.Passed += d.Passed
	c.Failed += d.Failed
}

// String is the last line of a test run.
func (c Count) String() string { return fmt.Sprintf("%d passed, %d failed", c.Passed, c.Failed) }

// Reporter shows and counts. It is not safe for concurrent use.
type Reporter struct {
	Out     io.Writer
	Prefix  string // of every line
	Tests   bool   // show each test as it ends, not only packages
	Verbose bool   // show all output at once

	count    Count
	packs    map[string]*pack
	failures []failure
}

// failure is what failed, and what it said.
type failure struct {
	what   string
	output []string
}

type pack struct {
	tests  map[string]*test
	output []string // outside of any test
	count  Count
}

type test struct {
	output  []string
	skipped bool
}

// Count returns what was counted until now.
func (r *Reporter) Count() Count { return r.count }

// excerpt is how many lines of a failure's output are kept from its begin and its end.
const excerpt = 15

// fail keeps what failed for the tally. Its output may end in a dump of goroutines,
// so that the reason is at the begin or at the end.
func (r *Reporter) fail(what string, output []string) {
	lines := strings.FieldsFunc(strings.Join(output, ""), func(r rune) bool { return r == '\n' })
	if over := len(lines) - 2*excerpt; over > 0 {
		lines = slices.Concat(lines[:excerpt], []string{fmt.Sprintf("... %d lines", over)}, lines[len(lines)-excerpt:])
	}
	r.failures = append(r.failures, failure{r.Prefix + strings.ReplaceAll(what, "\n", " "), lines})
}

// Check counts one thing that is no Go test and shows it.
func (r *Reporter) Check(name string, err error) {
	if err == nil {
		r.count.Passed++
		r.line("ok   %s", name)
		return
	}
	r.count.Failed++
	r.line("FAIL %s: %v", name, err)
	r.fail(fmt.Sprintf("%s: %v", name, err), nil)
}

// Read consumes one stream of events until it ends.
func (r *Reporter) Read(stream io.Reader) error {
	lines := bufio.NewReader(stream)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			r.read(line)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read test events: %w", err)
		}
	}
}

func (r *Reporter) read(line []byte) {
	var e event
	if json.Unmarshal(line, &e) != nil {
		// The go command itself speaks plain text when it fails early.
		r.line("%s", strings.TrimRight(string(line), "\n"))
		return
	}
	switch e.Action {
	case "build-output":
		r.line("%s", strings.TrimRight(e.Output, "\n"))
		return
	case "build-fail": // its package's own end follows
		return
	}
	p := r.pack(e.Package)
	if e.Test == "" {
		r.readPackage(p, e)
		return
	}
	t := p.test(e.Test)
	switch e.Action {
	case "output":
		if r.Verbose {
			r.line("%s", strings.TrimRight(e.Output, "\n"))
		}
		t.output = append(t.output, e.Output)
	case "skip":
		t.skipped = true
		fallthrough
	case "pass", "fail":
		r.endTest(p, t, e)
	}
}

// endTest counts a test. A subtest is counted with its parent; a skipped one fails it.
func (r *Reporter) endTest(p *pack, t *test, e event) {
	delete(p.tests, e.Test)
	if top, _, sub := strings.Cut(e.Test, "/"); sub {
		parent := p.test(top)
		if e.Action != "pass" {
			parent.output = append(parent.output, t.output...)
		}
		parent.skipped = parent.skipped || t.skipped
		return
	}
	took := time.Duration(e.Elapsed * float64(time.Second)).Round(10 * time.Millisecond)
	if e.Action == "pass" && !t.skipped {
		p.count.Passed++
		if r.Tests {
			r.line("  pass %s (%s)", e.Test, took)
		}
		return
	}
	p.count.Failed++
	r.dump(t.output)
	why := ""
	if t.skipped {
		why = ": skipped, which counts as failed"
	}
	r.line("  FAIL %s %s (%s)%s", e.Package, e.Test, took, why)
	r.fail(e.Package+" "+e.Test+why, t.output)
}

func (r *Reporter) readPackage(p *pack, e event) {
	switch e.Action {
	case "output":
		if r.Verbose {
			r.line("%s", strings.TrimRight(e.Output, "\n"))
		}
		p.output = append(p.output, e.Output)
	case "skip": // no test files
		delete(r.packs, e.Package)
	case "pass", "fail":
		if e.Action == "fail" && p.count.Failed == 0 {
			// It failed outside of any test: a build, a TestMain, a crash.
			p.count.Failed++
			var output []string
			for _, t := range p.tests {
				output = append(output, t.output...)
			}
			output = append(output, p.output...)
			r.dump(output)
			r.fail(e.Package, output)
		}
		word := "ok  "
		if p.count.Failed > 0 {
			word = "FAIL"
		}
		r.line("%s %s: %s (%.1fs)", word, e.Package, p.count, e.Elapsed)
		r.count.Add(p.count)
		delete(r.packs, e.Package)
	}
}

// End counts as failed every package whose end was never told and forgets it.
func (r *Reporter) End() {
	for name, p := range r.packs {
		r.readPackage(p, event{Action: "fail", Package: name})
	}
}

func (r *Reporter) pack(name string) *pack {
	p := r.packs[name]
	if p == nil {
		p = &pack{tests: make(map[string]*test)}
		if r.packs == nil {
			r.packs = make(map[string]*pack)
		}
		r.packs[name] = p
	}
	return p
}

func (p *pack) test(name string) *test {
	t := p.tests[name]
	if t == nil {
		t = &test{}
		p.tests[name] = t
	}
	return t
}

func (r *Reporter) dump(output []string) {
	if r.Verbose {
		return // was shown
	}
	for line := range strings.Lines(strings.Join(output, "")) {
		r.line("%s", strings.TrimRight(line, "\n"))
	}
}

func (r *Reporter) line(format string, args ...any) {
	_, _ = fmt.Fprintf(r.Out, r.Prefix+format+"\n", args...) // a progress line that cannot be shown changes no verdict
}

// Append adds a finished stage to the tally file at path: a line of its counts and
// lines of what failed, with a tab in front, and of what that said, with two. An
// empty path is no tally.
// Append is safe for concurrent use by processes.
func (r *Reporter) Append(path, stage string) error {
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("open tally: %w", err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d %d %s\n", r.count.Passed, r.count.Failed, stage)
	for _, f := range r.failures {
		fmt.Fprintf(&b, "\t%s\n", f.what)
		for _, line := range f.output {
			fmt.Fprintf(&b, "\t\t%s\n", line)
		}
	}
	_, err = f.WriteString(b.String())
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write tally: %w", err)
	}
	return nil
}

// Sum reads a tally that Append wrote and shows a line for each stage, what failures
// said, and at the end what failed.
func Sum(out io.Writer, tally io.Reader) (Count, error) {
	var sum Count
	var stages, said, failures strings.Builder
	var stage string
	lines := bufio.NewScanner(tally)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if line, ok := strings.CutPrefix(lines.Text(), "\t\t"); ok {
			fmt.Fprintf(&said, "%s| %s\n", stage, line)
			continue
		}
		if what, ok := strings.CutPrefix(lines.Text(), "\t"); ok {
			fmt.Fprintf(&said, "%s| FAIL %s\n", stage, what)
			fmt.Fprintf(&failures, "FAIL %s: %s\n", stage, what)
			continue
		}
		var c Count
		if _, err := fmt.Sscan(lines.Text(), &c.Passed, &c.Failed, &stage); err != nil {
			return sum, fmt.Errorf("tally line %q: %w", lines.Text(), err)
		}
		sum.Add(c)
		fmt.Fprintf(&stages, "%-20s %s\n", stage, c)
	}
	_, err := io.WriteString(out, stages.String()+said.String()+failures.String())
	return sum, errors.Join(err, lines.Err())
}
