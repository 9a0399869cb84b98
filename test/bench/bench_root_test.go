// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package main

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/program"
)

// elsewhere needs engines or another kernel.
var elsewhere = []string{"engine", "kube", "vsock"}

func TestEveryMeasureIsInTheReport(t *testing.T) {
	chosen := slices.DeleteFunc(parts(), func(p part) bool { return slices.Contains(elsewhere, p.name) })
	var log bytes.Buffer
	dir := t.TempDir()
	var names []string
	for _, p := range chosen {
		names = append(names, p.name)
	}
	args := []string{"-scale", "tiny", "-only", strings.Join(names, ","), "-out", dir + "/results", "-report", dir}
	if err := run(t.Context(), args, io.Discard, &log); err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	res, err := readResults(dir + "/results")
	if err != nil {
		t.Fatal(err)
	}
	var tables bytes.Buffer
	if err := run(t.Context(), []string{"-render", dir + "/results"}, &tables, &log); err != nil {
		t.Fatal(err)
	}
	for _, p := range chosen {
		for _, m := range p.measures {
			for _, k := range m.keys()[:len(m.modes)] { // of the smallest size
				if res.find(k.name) == nil && k.mode != wayGvproxy {
					t.Errorf("no result of %q", k.name)
				}
			}
			if !strings.Contains(tables.String(), "**"+m.title+"**") {
				t.Errorf("no table of %q", m.title)
			}
		}
	}
}

func TestFailedPartsAreReported(t *testing.T) {
	t.Setenv(program.Variable, "/bin/false")
	var out bytes.Buffer
	err := run(t.Context(), []string{"-scale", "tiny", "-only", "missed"}, &out, t.Output())
	if err == nil || !strings.Contains(err.Error(), "missed: bpf: the agent has ended") {
		t.Errorf("error %v", err)
	}
	if !strings.Contains(out.String(), "* missed: ") {
		t.Errorf("the report does not say so:\n%s", out.String())
	}
}

func TestModeThatDidNotRunIsAnError(t *testing.T) {
	b, err := newBench(tiny, nil, t.Output(), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	polls := mode{name: modeBPF, flags: modes[1].flags}
	err = b.measure(t.Context(), part{run: func(ctx context.Context, b *bench) {
		g := b.newGuest(polls, b.space())
		g.start()
		check(eventually(ctx, func() error {
			_, err := status.NewClient(g.control).Await(ctx, limit)
			return err
		}))
		g.check(ctx)
	}})
	if err == nil || !strings.Contains(err.Error(), `by "poll", which is not mode`) {
		t.Errorf("error %v", err)
	}
}
