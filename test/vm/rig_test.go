// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package main

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// TestFaults proves that nothing that goes wrong in a machine passes.
func TestFaults(t *testing.T) {
	for _, tt := range []struct {
		name, run string
		failed    bool
		want      []string // in the output
	}{
		{"pass", "TestPass", false, []string{"pass TestPass", "2 passed, 0 failed"}},
		{"fail", "TestFail", true, []string{"wanted", "FAIL test/vm/testdata/faults TestFail", "1 passed, 1 failed"}},
		{"skip", "TestSkip", true, []string{"TestSkip", "skipped", "1 passed, 1 failed"}},
		{"exit", "TestExit", true, []string{"1 passed, 1 failed"}},
		{"hang", "TestHang", true, []string{"panic: test timed out after 2s", "1 passed, 1 failed"}},
		{"complaint", "TestComplaint", true, []string{"console: ", "BUG: wanted", "the kernel complained", "1 passed, 1 failed"}},
		{"panic", "TestPanic", true, []string{"console: ", "Kernel panic", "ended before the jobs did", "0 passed, 2 failed"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			limit := 10 * time.Minute // that only a failure reaches
			if tt.name == "hang" {
				limit = 2 * time.Second
			}
			failed, err := run(t.Context(), &out, options{
				kernels: "6.1", tags: "vm", run: "^" + tt.run + "$", memory: 512,
				timeout: 20 * time.Minute, testTimeout: limit, patterns: []string{"./testdata/faults"},
			})
			if err != nil {
				t.Fatalf("%v\n%s", err, out.String())
			}
			if failed != tt.failed {
				t.Errorf("failed is %v, want %v", failed, tt.failed)
			}
			for _, want := range tt.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("output lacks %q", want)
				}
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}

// TestMachineTimeout proves that a machine that hangs is ended.
func TestMachineTimeout(t *testing.T) {
	var out bytes.Buffer
	failed, err := run(t.Context(), &out, options{
		kernels: "6.1", tags: "vm", run: "^TestHang$", memory: 512,
		timeout: 12 * time.Second, testTimeout: time.Hour, patterns: []string{"./testdata/faults"},
	})
	if err != nil || !failed || !strings.Contains(out.String(), "machine still runs after 12s") {
		t.Errorf("failed %v, error %v\n%s", failed, err, out.String())
	}
}

// TestNothingToRun proves that an empty choice is no success.
func TestNothingToRun(t *testing.T) {
	var out bytes.Buffer
	failed, err := run(t.Context(), &out, options{kernels: "6.1", tags: "vm", patterns: []string{"."}})
	if !failed || err == nil {
		t.Errorf("failed %v, error %v: want both", failed, err)
	}
}
