// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/bench/report"
)

// engineCells are those of the parts that need engines.
var engineCells = map[string][]string{
	enginePublished: {modeBPF, modePoll1, modePoll3, modeList1, modeList3},
	engineHost:      {modeBPF, modePoll1, modePoll3},
	kubeMeasure:     {modeBPF, modeList1, modeList3},
	kubeReach:       {reachProxy, reachHost, reachEarly, reachAPI},
	kubeRSS:         {modeBPF},
}

func TestBenchmarkOfEnginesMeasuresEachModeAndReports(t *testing.T) {
	dir := t.TempDir()
	json := filepath.Join(dir, "results.jsonl")
	var log bytes.Buffer
	err := run(t.Context(), []string{"-tiny", "-only", "engine,kube", "-json", json, "-report", dir}, &log, &log)
	if err := beyondLosses(err); err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	f, err := os.Open(json)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	res, err := report.Read(f)
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	cells := 0
	for measure, modes := range engineCells {
		if !strings.Contains(string(readme), "**"+measure+"**") {
			t.Errorf("the report has no table %q", measure)
		}
		for _, m := range modes {
			for _, c := range res.Cells {
				if c.Measure == measure && c.Mode == m {
					cells++
				}
			}
		}
	}
	if want := 16; cells != want || len(res.Cells) != want {
		t.Errorf("%d of %d cells are those that are wanted, want %d: %v", cells, len(res.Cells), want, res.Cells)
	}
}
