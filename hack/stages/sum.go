// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fairlead/fairlead/hack/tally"
)

// sum writes a line for each stage, what failed, and as the last line how many tests passed and
// failed. It returns the number of failures.
func sum(out io.Writer, dir string, stages []string, outcomes map[string]outcome) (failed int) {
	passed := 0
	var failures strings.Builder
	for _, name := range stages {
		s := readStage(dir, name, outcomes[name])
		fmt.Fprintf(out, "%-18s %4d passed, %d failed  (%d s)\n", name, s.Passed, len(s.Failures), outcomes[name].took/time.Second)
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

// readStage reads the events of a stage, which may be in several parts. A stage that failed although
// none of its tests did, or that ran none, is one failure.
func readStage(dir, name string, o outcome) (s tally.Tally) {
	whole, _ := filepath.Glob(filepath.Join(dir, name+".json")) // the pattern is valid
	parts, _ := filepath.Glob(filepath.Join(dir, name+".*.json"))
	var errs []error
	for _, file := range append(whole, parts...) {
		t, err := readFile(file)
		errs = append(errs, err)
		s.Passed += t.Passed
		s.Failures = append(s.Failures, t.Failures...)
	}
	switch {
	case !o.ran:
		errs = append(errs, errors.New("did not run"))
	case o.err != nil && len(s.Failures) == 0:
		errs = append(errs, o.err)
	case s.Passed+len(s.Failures) == 0:
		errs = append(errs, errors.New("ran no test"))
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
