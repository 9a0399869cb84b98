// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
)

// matrix collects, from the events of tests, what the report of kernels shows: attributes
// "capability/NAME" with the method, and which tests passed. A nil matrix collects nothing.
type matrix struct {
	mu      sync.Mutex
	kernels map[string]*column // by version as asked for
}

// column is what is known of one kernel.
type column struct {
	release string
	methods map[string]string // by capability: the method and what it loses
	tests   map[string]bool   // top-level tests: whether they passed
}

// attribute is the part of an event that tally.Event leaves out.
type attribute struct{ Action, Package, Test, Key, Value string }

// begin adds a kernel.
func (m *matrix) begin(k kernel) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.kernels == nil {
		m.kernels = make(map[string]*column)
	}
	m.kernels[k.version] = &column{release: k.release, methods: make(map[string]string), tests: make(map[string]bool)}
}

// withoutFault is the row for the machine itself: it came up, ran everything, and its kernel did
// not complain.
const withoutFault = "the kernel reports no fault"

// machine adds the end of a machine, with its fault or nil.
func (m *matrix) machine(k kernel, fault error) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.kernels[k.version]; c != nil {
		passed, ran := c.tests[withoutFault]
		c.tests[withoutFault] = fault == nil && (passed || !ran)
	}
}

// complete returns an error unless all of the kernels have results of tests.
func (m *matrix) complete(versions []string, arch architecture) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var without []string
	for _, v := range versions {
		c := m.kernels[v+arch.suffix]
		if c == nil || !slices.ContainsFunc(slices.Collect(maps.Keys(c.tests)), func(test string) bool { return test != withoutFault }) {
			without = append(without, v)
		}
	}
	if len(without) > 0 {
		return fmt.Errorf("no test ended on kernel %s", strings.Join(without, ", "))
	}
	return nil
}

// add looks at one event of go test -json.
func (m *matrix) add(line []byte) {
	if m == nil {
		return
	}
	var a attribute
	if err := json.Unmarshal(line, &a); err != nil {
		return // whoever reads the events reports it
	}
	version, _, _ := strings.Cut(a.Package, "/")
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.kernels[version]
	if c == nil || a.Test == "" || strings.Contains(a.Test, "/") {
		return
	}
	switch a.Action {
	case "attr":
		if name, ok := strings.CutPrefix(a.Key, "capability/"); ok {
			c.methods[name] = a.Value
		}
	case "pass", "fail":
		c.tests[a.Test] = a.Action == "pass"
	}
}

// method returns by which method a capability is observed, and what this loses.
func (c *column) method(capability string) (method, lost string) {
	method, lost, _ = strings.Cut(c.methods[capability], ": ")
	method, _, _ = strings.Cut(method, ",")
	lost, _, _ = strings.Cut(lost, ", due to ")
	return method, lost
}

// cell is what the table shows of a capability; empty if nothing is known.
func (c *column) cell(capability string) string {
	if capability == "nat" {
		return c.methods[capability]
	}
	method, _ := c.method(capability)
	return method
}

// writeLosses writes a row for each thing that a method loses, with the kernels on which it is used.
func writeLosses(b *bytes.Buffer, all []*column, capabilities []string) {
	var table strings.Builder
	for _, name := range capabilities {
		var rows []string // in the order of kernels
		on := make(map[string][]string)
		for _, c := range all {
			method, lost := c.method(name)
			if lost == "" || name == "nat" {
				continue
			}
			row := fmt.Sprintf("| %s | %s | %s |", name, method, lost)
			if on[row] == nil {
				rows = append(rows, row)
			}
			on[row] = append(on[row], c.title())
		}
		for _, row := range rows {
			fmt.Fprintf(&table, "%s %s |\n", row, strings.Join(on[row], ", "))
		}
	}
	if table.Len() > 0 {
		fmt.Fprintf(b, "\n| capability | by | loses | on Linux |\n|---|---|---|---|\n%s", table.String())
	}
}

// version returns "6.12" of "6.12.117+deb12-cloud-amd64".
func (c *column) version() string {
	parts := strings.SplitN(c.release, ".", 3)
	return strings.Join(parts[:min(2, len(parts))], ".")
}

// title is the version, and the processor if it is another than this machine's, or that the
// kernel is one of hack/kernel-wsl.
func (c *column) title() string {
	if strings.HasSuffix(c.release, "-WSL2") {
		return c.version() + " as WSL's"
	}
	for _, a := range architectures() {
		if !a.native() && strings.HasSuffix(c.release, a.suffix) {
			return c.version() + " " + a.name
		}
	}
	return c.version()
}

// numbers returns the numbers of the version, to sort by.
func (c *column) numbers() (n [2]int) {
	_, _ = fmt.Sscanf(c.version(), "%d.%d", &n[0], &n[1]) // what is no number comes first
	return n
}

// columns returns the kernels, oldest first.
func (m *matrix) columns() []*column {
	return slices.SortedFunc(maps.Values(m.kernels), func(a, b *column) int {
		na, nb := a.numbers(), b.numbers()
		return cmp.Or(slices.Compare(na[:], nb[:]), cmp.Compare(a.release, b.release))
	})
}

// tables writes rows for capabilities, what is lost and tests, and columns for kernels.
func (m *matrix) tables() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := m.columns()
	capabilities, tests := map[string]bool{}, map[string]bool{}
	head, rule := "", ""
	for _, c := range all {
		for name := range c.methods {
			capabilities[name] = true
		}
		for name := range c.tests {
			tests[name] = true
		}
		head, rule = head+" Linux "+c.title()+" |", rule+"---|"
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "| capability |%s\n|---|%s\n", head, rule)
	row := func(name string, cell func(*column) string) {
		fmt.Fprintf(&b, "| %s |", name)
		for _, c := range all {
			fmt.Fprintf(&b, " %s |", cmp.Or(cell(c), "–"))
		}
		b.WriteByte('\n')
	}
	for _, name := range slices.Sorted(maps.Keys(capabilities)) {
		row(name, func(c *column) string { return c.cell(name) })
	}
	writeLosses(&b, all, slices.Sorted(maps.Keys(capabilities)))
	fmt.Fprintf(&b, "\n| test of test/e2e |%s\n|---|%s\n", head, rule)
	for _, name := range slices.Sorted(maps.Keys(tests)) {
		row(name, func(c *column) string {
			passed, ran := c.tests[name]
			switch {
			case passed:
				return "passed"
			case ran:
				return "failed"
			}
			return ""
		})
	}
	b.WriteString("\nReleases: ")
	for i, c := range all {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(c.release)
	}
	b.WriteString(".\n")
	return b.String()
}

// reportBegin is the mark in the report after which the tables of an architecture are.
func reportBegin(arch string) string {
	return fmt.Sprintf("<!-- begin: written by test/vm -arch %s -report -->\n", arch)
}

// reportEnd is the mark behind them.
const reportEnd = "<!-- end -->\n"

// readReport returns the tables of an architecture in a file, and what is before and after
// them, with the marks.
func readReport(file, arch string) (before, tables, after string, err error) {
	begin := reportBegin(arch)
	text, err := os.ReadFile(file)
	if err != nil {
		return "", "", "", err
	}
	before, rest, found := strings.Cut(string(text), begin)
	tables, after, ended := strings.Cut(rest, reportEnd)
	if !found || !ended {
		return "", "", "", fmt.Errorf("%s has no lines %q and %q", file, strings.TrimSpace(begin), strings.TrimSpace(reportEnd))
	}
	return before + begin, tables, reportEnd + after, nil
}

// write puts the tables between the marks of a file.
func (m *matrix) write(file, arch string) error {
	before, _, after, err := readReport(file, arch)
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(before+"\n"+m.tables()+"\n"+after), 0o644)
}

// compare returns an error for each method that is another one than the tables of a file
// have, or that they lack. Kernels that they lack are named in log.
func (m *matrix) compare(file, arch string, log io.Writer) (err error) {
	_, tables, _, err := readReport(file, arch)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	titles, rows, _ := strings.Cut(strings.TrimSpace(tables), "\n")
	rows, _, _ = strings.Cut(rows, "\n\n")
	for _, c := range m.columns() {
		title := "Linux " + c.title()
		i := slices.Index(cells(titles), title)
		if i < 0 {
			_, _ = fmt.Fprintf(log, "vm: %s has no methods of %s to compare\n", file, title)
			continue
		}
		known := make(map[string]bool)
		for row := range strings.Lines(rows) {
			row := cells(row)
			known[row[0]] = true
			if got := c.cell(row[0]); got != "" && i < len(row) && got != row[i] {
				err = errors.Join(err, fmt.Errorf("%s: %s by %s; %s has %s", title, row[0], got, file, row[i]))
			}
		}
		for _, name := range slices.Sorted(maps.Keys(c.methods)) {
			if !known[name] {
				err = errors.Join(err, fmt.Errorf("%s: %s by %s; %s does not have it", title, name, c.cell(name), file))
			}
		}
	}
	return err
}

// cells splits a row of a table.
func cells(row string) []string {
	list := strings.Split(strings.Trim(strings.TrimSpace(row), "|"), "|")
	for i := range list {
		list[i] = strings.TrimSpace(list[i])
	}
	return list
}
