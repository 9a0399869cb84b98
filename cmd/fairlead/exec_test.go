// SPDX-License-Identifier: Apache-2.0

//go:build unix

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// lockedBuffer may be written to by a command and by fairlead.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// script is an executable file, which others run as a command.
func script(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "on-change")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func event(typ status.EventType, n int) status.Event {
	return status.Event{Type: typ, Publication: &status.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: uint16(n)}}}}
}

// running runs r until the test ends.
func running(t *testing.T, r *runner) {
	t.Cleanup(r.start(t.Context()))
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(wait.Limit()); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

// Each change is the input of a run of its own, in order, one at a time; a run that fails is
// reported, and the next one comes.
func TestCommandForEachChange(t *testing.T) {
	var stderr lockedBuffer
	out := filepath.Join(t.TempDir(), "out")
	path := script(t, `mkdir "$1.lock" || exit 9
cat >> "$1"
rmdir "$1.lock"
if [ $(wc -l < "$1") = 2 ]; then echo broken; exit 3; fi
`)
	r, err := newRunner(path, []string{out + " with a space; and more"}, &stderr)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []status.Event{
		event(status.Present, 1), {Type: status.Synced}, event(status.Added, 2), event(status.Changed, 3), event(status.Gone, 4),
	} {
		if err := r.add(e); err != nil {
			t.Fatal(err)
		}
	}
	running(t, r)
	var lines []string
	until(t, "three runs", func() bool {
		b, _ := os.ReadFile(out + " with a space; and more")
		lines = strings.Split(strings.TrimSpace(string(b)), "\n")
		return len(lines) == 3
	})
	for i, want := range []string{"added", "changed", "removed"} {
		if !strings.Contains(lines[i], `"type":"`+want+`"`) || !strings.Contains(lines[i], `"schemaVersion":1`) || !strings.Contains(lines[i], fmt.Sprintf(`"port":%d`, i+2)) {
			t.Errorf("run %d: %s", i, lines[i])
		}
	}
	if want := "broken\nfairlead: " + path + ": exit status 3\n"; stderr.String() != want {
		t.Errorf("got %q, want %q", stderr.String(), want)
	}
}

func TestCommandThatIsTooSlow(t *testing.T) {
	var stderr lockedBuffer
	r, err := newRunner(script(t, "exec sleep 60\n"), nil, &stderr)
	if err != nil {
		t.Fatal(err)
	}
	r.limit = 50 * time.Millisecond
	for i := range maxQueued + 3 {
		if err := r.add(event(status.Added, i+1)); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.queue) != maxQueued || r.dropped != 3 || !strings.Contains(string(r.queue[0]), `"port":4,`) {
		t.Errorf("%d wait, %d dropped, first %s", len(r.queue), r.dropped, r.queue[0])
	}
	running(t, r)
	until(t, "both are reported", func() bool {
		return strings.Contains(stderr.String(), "is slower than the ports change: 3 changes were not passed on\n") &&
			strings.Contains(stderr.String(), ": killed after 50ms\n")
	})
}

// A script is killed with the programs that it runs.
func TestCommandIsKilledWithItsChildren(t *testing.T) {
	held, stderr, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Close() }()
	r, err := newRunner(script(t, "sleep 600\n:\n"), nil, stderr)
	if err != nil {
		t.Fatal(err)
	}
	r.limit = 200 * time.Millisecond
	if err := r.once(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "killed after 200ms") {
		t.Error(err)
	}
	_ = stderr.Close()
	_ = held.SetReadDeadline(time.Now().Add(wait.Limit()))
	if _, err := io.Copy(io.Discard, held); err != nil {
		t.Errorf("a child of the command still runs: %v", err)
	}
}

// The end of the watch ends the command.
func TestCommandEndsWithTheWatch(t *testing.T) {
	var stderr lockedBuffer
	begun := filepath.Join(t.TempDir(), "begun")
	r, err := newRunner(script(t, "touch "+begun+"\nexec sleep 60\n"), nil, &stderr)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.add(event(status.Added, 1)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.run(ctx)
	}()
	until(t, "it runs", func() bool { _, err := os.Stat(begun); return err == nil })
	cancel()
	select {
	case <-done:
	case <-time.After(wait.Limit()):
		t.Fatal("the command was not ended")
	}
	if stderr.String() != "" {
		t.Errorf("%q", stderr.String())
	}
}

// A program that is not there is named at once, not at the first change.
func TestExecRefusesWhatIsNoProgram(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for _, program := range []string{"no-such-program", filepath.Join(dir, "none"), dir} {
		if _, err := newRunner(program, nil, io.Discard); err == nil || !strings.Contains(err.Error(), "--exec: ") || !strings.Contains(err.Error(), program) {
			t.Errorf("%s: %v", program, err)
		}
	}
}
