// SPDX-License-Identifier: Apache-2.0

// Package tally counts the events of go test -json.
package tally

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Event is one line of go test -json (see "go doc test2json").
type Event struct {
	Action  string
	Package string
	Test    string  `json:",omitempty"`
	Elapsed float64 `json:",omitempty"` // seconds
	Output  string  `json:",omitempty"`
}

// Tally is how many top-level tests passed and failed. A package that fails
// without a failing test, as one that does not build, is one failure.
type Tally struct {
	Passed   int
	Failures []Failure
}

// Failure is a test that failed, and the end of its output.
type Failure struct {
	Package string
	Test    string // empty if the package failed outside of its tests
	Reason  string // empty, or why it counts as a failure
	Output  []string
}

// String names what failed.
func (f Failure) String() string {
	s := strings.TrimSuffix(f.Package+" "+f.Test, " ")
	if f.Reason != "" {
		s += ": " + f.Reason
	}
	return s
}

// Excerpt is how many lines of a failure's output are kept, from its end.
const Excerpt = 30

type counter struct {
	tally    Tally
	packages map[string]*results
}

// results is what is known of a package that runs.
type results struct {
	tests  map[string]*test // top-level ones that run; "" is the package itself
	failed bool             // one of its tests did
}

type test struct {
	output  []string
	skipped bool // it or a subtest
}

// Read counts the events of r until it ends. A skipped test is a failure: what is
// skipped is not tested. So is a package that does not end. The tally is valid also
// if there is an error.
func Read(r io.Reader) (Tally, error) {
	c := counter{packages: make(map[string]*results)}
	lines := bufio.NewReader(r)
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e Event
			if bad := json.Unmarshal(line, &e); bad != nil {
				return c.end(), fmt.Errorf("line %d is no test event: %w", number, bad)
			}
			c.add(e)
		}
		if errors.Is(err, io.EOF) {
			return c.end(), nil
		}
		if err != nil {
			return c.end(), fmt.Errorf("read test events: %w", err)
		}
	}
}

func (c *counter) add(e Event) {
	if e.Package == "" || strings.HasPrefix(e.Action, "build-") {
		return // the package's own end follows
	}
	p := c.packages[e.Package]
	if p == nil {
		p = &results{tests: make(map[string]*test)}
		c.packages[e.Package] = p
	}
	name, _, sub := strings.Cut(e.Test, "/")
	t := p.tests[name]
	if t == nil {
		t = &test{}
		p.tests[name] = t
	}
	switch e.Action {
	case "output":
		t.output = append(t.output, strings.TrimRight(e.Output, "\n"))
		t.output = t.output[max(0, len(t.output)-Excerpt):]
	case "skip", "pass", "fail":
		t.skipped = t.skipped || e.Action == "skip"
		switch {
		case e.Test == "":
			c.endPackage(e.Package, p, e.Action == "fail", "")
		case !sub:
			c.endTest(e.Package, p, name, e.Action == "fail")
		}
	}
}

func (c *counter) endTest(pkg string, p *results, name string, failed bool) {
	t := p.tests[name]
	delete(p.tests, name)
	if !failed && !t.skipped {
		c.tally.Passed++
		return
	}
	p.failed = true
	f := Failure{Package: pkg, Test: name, Output: t.output}
	if !failed {
		f.Reason = "skipped, which counts as failed"
	}
	c.tally.Failures = append(c.tally.Failures, f)
}

func (c *counter) endPackage(pkg string, p *results, failed bool, reason string) {
	delete(c.packages, pkg)
	if !failed || p.failed {
		return
	}
	f := Failure{Package: pkg, Reason: reason}
	for name, t := range p.tests { // the one that was running, and the package itself
		if name != "" {
			f.Test = name
		}
		f.Output = append(f.Output, t.output...)
	}
	c.tally.Failures = append(c.tally.Failures, f)
}

// end counts the packages that did not end.
func (c *counter) end() Tally {
	var names []string
	for name := range c.packages {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		c.endPackage(name, c.packages[name], true, "did not end")
	}
	return c.tally
}
