// SPDX-License-Identifier: Apache-2.0

// Sum adds up the results that hack/stage.sh left in a directory: a line for each
// stage, what failed, and as the last line how many tests passed and failed. It
// fails if anything did, and if a stage did not run.
//
//	go run ./test/sum DIRECTORY STAGE...
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/fairlead/fairlead/test/kit/tally"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: sum DIRECTORY STAGE...")
		os.Exit(2)
	}
	if failed := sum(os.Stdout, os.Args[1], os.Args[2:]); failed > 0 {
		os.Exit(1)
	}
}

// sum writes the summary of all stages and returns the number of failures.
func sum(out io.Writer, dir string, stages []string) (failed int) {
	passed := 0
	var failures strings.Builder
	for _, name := range stages {
		s := readStage(dir, name)
		fmt.Fprintf(out, "%-18s %4d passed, %d failed%s\n", name, s.Passed, len(s.Failures), s.took)
		passed += s.Passed
		failed += len(s.Failures)
		for _, f := range s.Failures {
			for _, line := range f.Output {
				fmt.Fprintf(out, "%s| %s\n", name, line)
			}
			fmt.Fprintf(&failures, "FAIL %s: %s\n", name, f)
		}
	}
	if failed > 0 {
		fmt.Fprintf(out, "%sThe whole output of each stage is in %s.\n", failures.String(), filepath.Join(dir, "STAGE.log"))
	}
	fmt.Fprintf(out, "%d passed, %d failed\n", passed, failed)
	return failed
}

// stage is the result of one stage.
type stage struct {
	tally.Tally
	took string // as shown
}

// readStage reads the events of a stage, which may be in several parts, and its exit
// status. A stage that failed although none of its tests did, or that ran none, is one failure.
func readStage(dir, name string) stage {
	var s stage
	whole, _ := filepath.Glob(filepath.Join(dir, name+".json")) // the pattern is valid
	parts, _ := filepath.Glob(filepath.Join(dir, name+".*.json"))
	var errs []error
	for _, file := range append(whole, parts...) {
		t, err := readFile(file)
		errs = append(errs, err)
		s.Passed += t.Passed
		s.Failures = append(s.Failures, t.Failures...)
	}
	status, seconds, err := readExit(filepath.Join(dir, name+".exit"))
	switch {
	case err != nil:
		errs = append(errs, fmt.Errorf("did not run to its end: %w", err))
	case status != 0 && len(s.Failures) == 0:
		errs = append(errs, fmt.Errorf("exit status %d", status))
	case s.Passed+len(s.Failures) == 0:
		errs = append(errs, errors.New("ran no test"))
	}
	if err == nil {
		s.took = fmt.Sprintf("  (%d s)", seconds)
	}
	if err := errors.Join(errs...); err != nil {
		s.Failures = append(s.Failures, tally.Failure{Package: "stage", Reason: err.Error()})
	}
	return s
}

func readFile(name string) (tally.Tally, error) {
	f, err := os.Open(name)
	if err != nil {
		return tally.Tally{}, err
	}
	defer f.Close()
	t, err := tally.Read(f)
	if err != nil {
		return t, fmt.Errorf("%s: %w", name, err)
	}
	return t, nil
}

// readExit reads an exit status and how many seconds it took to come.
func readExit(name string) (status, seconds int, err error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscan(string(text), &status, &seconds); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", name, err)
	}
	return status, seconds, nil
}
