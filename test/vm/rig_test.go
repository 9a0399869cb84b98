// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/hack/tally"
)

// faulty are options to run tests of testdata/faults.
func faulty(t *testing.T, run string) options {
	return options{
		arch: "amd64", kernels: "6.1", tags: "vm", run: "^" + run + "$", accel: "tcg", memory: minMemory, cpus: defaultCPUs, json: true,
		timeout: 20 * time.Minute, testTimeout: 10 * time.Minute, // which only a failure reaches
		patterns: []string{"./testdata/faults"},
	}
}

// TestFaults proves that nothing that goes wrong in a machine passes.
func TestFaults(t *testing.T) {
	for _, tt := range []struct {
		name, run      string
		passed, failed int
		want           []string // in the output
	}{
		{"pass", "TestPass", 2, 0, nil},
		{"fail", "TestFail", 1, 1, []string{"6.1/test/vm/testdata/faults TestFail", "wanted"}},
		{"skip", "TestSkip", 1, 1, []string{"TestSkip", "skipped"}},
		{"exit", "TestExit", 1, 1, []string{"6.1/test/vm/testdata/faults exit", "exit status 1"}},
		{"hang", "TestHang", 1, 1, []string{"panic: test timed out after 2s"}},
		{"complaint", "TestComplaint", 1, 1, []string{"6.1/machine-tcg", "the kernel complained", "console: ", "BUG: wanted"}},
		{"panic", "TestPanic", 0, 2, []string{"6.1/machine-tcg", "Kernel panic", "ended before the jobs did"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := faulty(t, tt.run)
			if tt.name == "hang" {
				o.testTimeout = 2 * time.Second
			}
			var out bytes.Buffer
			failed, err := run(t.Context(), &out, o)
			if err != nil {
				t.Fatalf("%v\n%s", err, out.String())
			}
			if want := tt.failed > 0; failed != want {
				t.Errorf("failed is %v, want %v", failed, want)
			}
			wantTally(t, out.String(), tt.passed, tt.failed, tt.want...)
		})
	}
}

// wantTally counts events and looks for words in what failed.
func wantTally(t *testing.T, events string, passed, failed int, words ...string) {
	t.Helper()
	got, err := tally.Read(strings.NewReader(events))
	if err != nil {
		t.Fatalf("%v\n%s", err, events)
	}
	if got.Passed != passed || len(got.Failures) != failed {
		t.Errorf("%d passed, %d failed; want %d and %d", got.Passed, len(got.Failures), passed, failed)
	}
	var failures strings.Builder
	for _, f := range got.Failures {
		failures.WriteString(f.String() + "\n" + strings.Join(f.Output, "\n") + "\n")
	}
	for _, want := range words {
		if !strings.Contains(failures.String()+events, want) {
			t.Errorf("no %q in the failures", want)
		}
	}
	if t.Failed() {
		t.Logf("%s\n%s", failures.String(), events)
	}
}

// TestMachineTimeout proves that a machine that hangs is ended.
func TestMachineTimeout(t *testing.T) {
	o := faulty(t, "TestHang")
	o.timeout, o.testTimeout = 12*time.Second, time.Hour
	var out bytes.Buffer
	failed, err := run(t.Context(), &out, o)
	if err != nil || !failed || !strings.Contains(out.String(), "machine still runs after 12s") {
		t.Errorf("failed %v, error %v\n%s", failed, err, out.String())
	}
}

// TestNothingToRun proves that an empty choice is no success.
func TestNothingToRun(t *testing.T) {
	o := faulty(t, "")
	o.patterns = []string{"."}
	var out bytes.Buffer
	failed, err := run(t.Context(), &out, o)
	if !failed || err == nil {
		t.Errorf("failed %v, error %v: want both", failed, err)
	}
}

// TestAcceleratorIsChosenInTime proves that a KVM that does not work costs seconds.
func TestAcceleratorIsChosenInTime(t *testing.T) {
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	got, err := chooseAccelerator(t.Context(), options{accel: "auto"}, architectures()[0], cache, t.TempDir(), "6.1")
	if err != nil || got.name == "tcg" && got.why == "" {
		t.Errorf("got %+v, %v", got, err)
	}
	t.Logf("%s: %s", got.name, got.why)
	if took := time.Since(start); took > 2*probeLimit {
		t.Errorf("took %v", took)
	}
}
