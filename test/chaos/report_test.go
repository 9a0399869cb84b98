// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestReportMergesRuns(t *testing.T) {
	path := filepath.Join(t.TempDir(), "doc.md")
	if err := os.WriteFile(path, []byte("before\n"+begin+"old\n"+end+"after\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	text := report([]result{
		{Seed: 1, Kernel: "6.1", Minutes: 2, Operations: 5, Faults: map[string][]time.Duration{"link cut": {time.Second}}, TCP: tally{Complete: 3}, Load: load{Mean: 1.25, Most: 4, Processors: 2}},
		{Seed: 2, Kernel: "6.12", Minutes: 3, Operations: 7, Faults: map[string][]time.Duration{"link cut": {3 * time.Second}}, TCP: tally{Wrong: 1}},
	})
	if err := writeReport(path, text); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"before\n", "| 1 | 6.1 |  | 2 | 1.2 (at most 4.0) on 2 | 5 |", "| 2 | 6.12 |  | 3 | not known | 7 |", "In all 5 minutes: 12 operations, 2 faults, 0 differences.", "3 complete, 0 cut and seen as cut, 1 wrong", "| link cut | 2 | 3s | 3s |\n", "after\n",
	} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %q in\n%s", want, b)
		}
	}
	if strings.Contains(string(b), "old") {
		t.Errorf("the old report remains:\n%s", b)
	}
}

func TestPublishedPortsOfEngines(t *testing.T) {
	got := published("0.0.0.0:20100->80/tcp, :::20100->80/tcp\n\n127.0.0.1:20101->81/udp, [::1]:20102->82/tcp, 83/tcp\n")
	want := []string{"tcp 0.0.0.0:20100", "tcp [::1]:20102", "tcp [::]:20100", "udp 127.0.0.1:20101"}
	if g := strings.Join(got.without(nil), ", "); g != strings.Join(want, ", ") {
		t.Errorf("got %s", g)
	}
}
