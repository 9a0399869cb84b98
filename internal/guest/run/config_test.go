// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

const entryText = "{name: a, match: {name: web}, path: /bin/true, user: nobody, sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855}"

func TestLoad(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run.yaml")
	load := func(text string) (Config, error) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return Load(file)
	}
	want := Config{Socket: "/run/fairlead-run/run.sock", Control: "/run/fairlead/control.sock", Jobs: 16, ClientJobs: 8, ClientRequests: 10}
	for _, text := range []string{"", "# nothing\n", "allow:\n"} {
		if got, err := load(text); err != nil || !got.Same(want) || len(got.Allow) > 0 {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	want = Config{Socket: "/s", Control: "/c", Jobs: 3, ClientJobs: 2, ClientRequests: 1}
	got, err := load("socket: /s\ncontrol: /c\njobs: 3\nclientJobs: 2\nclientRequests: 1\nallow: [" + entryText + "]\n")
	if err != nil || !got.Same(want) || got.Allow.Find("a") == nil {
		t.Errorf("%+v, %v", got, err)
	}
	// All mistakes are told, each with its place.
	_, err = load("socket: s\njobs: 0\nclientJobs: 1025\nallow:\n  - {name: serve}\nhost: []\n")
	for _, want := range []string{file + ":1:", "absolute path", file + ":2:", "1 to 1024", file + ":3:", file + ":5:", "serve", file + ":6:", `"host"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if _, err := Load(file + ".gone"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// What changes is told once, also that the file has gone, and all when it is asked for.
func TestWatch(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run.yaml")
	put := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("jobs: 1\n")
	was, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	type change struct {
		Config
		err error
	}
	now, told, ended := make(chan os.Signal), make(chan change), make(chan struct{})
	go func() {
		defer close(ended)
		Watch(ctx, file, was, now, func(c Config, err error) { told <- change{c, err} })
	}()
	for _, step := range []struct {
		do   func()
		jobs int // 0: an error
	}{
		{func() { put("jobs: 2\n") }, 2},
		{func() { now <- nil }, 2},
		{func() { put("\n") }, 0}, // maybe half written
		{func() { now <- nil }, 16},
		{func() { put("jobs: x\n") }, 0},
		{func() { _ = os.Remove(file) }, 0},
		{func() { now <- nil }, 0},
		{func() { put("jobs: 2\n") }, 2},
	} {
		step.do()
		if c := wait.For(t, "a change", told); step.jobs > 0 && (c.err != nil || c.Jobs != step.jobs) || step.jobs == 0 && c.err == nil {
			t.Errorf("%+v, want %d", c, step.jobs)
		}
	}
	cancel()
	wait.For(t, "the end", ended)
}

// An agent that cannot be asked is no word that a process is in no container, and its paths
// are for the log alone.
func TestAgentThatCannotBeAsked(t *testing.T) {
	var log lines
	control := filepath.Join(t.TempDir(), "control.sock")
	_, err := AskAgent(control, slog.New(slog.NewTextHandler(&log, nil)))(t.Context(), []string{"/x"})
	r, ok := errors.AsType[*peer.Refusal](err)
	if !ok || r.Reason != peer.ReasonAgent || strings.Contains(r.Message, "/") {
		t.Errorf("%v", err)
	}
	if !strings.Contains(log.String(), control) {
		t.Errorf("log: %s", &log)
	}
}
