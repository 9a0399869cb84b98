// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/hack/tally"
)

// reporter writes what happens: as the events of go test -json, or the output of the
// tests as text. It is safe for concurrent use by several machines.
type reporter struct {
	out  io.Writer
	json bool

	matrix *matrix // nil without a report

	mu     sync.Mutex
	failed bool
}

// anyFailed reports whether anything failed until now.
func (r *reporter) anyFailed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

// write reports an event, as the line of go test -json that it came from.
func (r *reporter) write(e tally.Event, line []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = r.failed || e.Action == "fail" || e.Action == "skip" && e.Test != "" // what is skipped is not tested
	// What cannot be written changes no verdict.
	if r.json {
		_, _ = r.out.Write(line)
	} else if e.Action == "output" {
		_, _ = fmt.Fprintf(r.out, "[%s] %s\n", e.Package, strings.TrimRight(e.Output, "\n"))
	}
}

// event reports an event of the rig's own.
func (r *reporter) event(e tally.Event) {
	line, err := json.Marshal(e)
	if err != nil { // cannot happen: it has only strings and a number
		panic(err)
	}
	r.write(e, append(line, '\n'))
}

// copy reports the events of one test binary until they end, and whether it failed.
func (r *reporter) copy(events io.Reader) (failed bool, err error) {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e tally.Event
			if bad := json.Unmarshal(line, &e); bad != nil {
				return failed, fmt.Errorf("read events: %w", bad)
			}
			failed = failed || e.Action == "fail"
			r.matrix.add(line)
			r.write(e, line)
		}
		if errors.Is(err, io.EOF) {
			return failed, nil
		}
		if err != nil {
			return failed, fmt.Errorf("read events: %w", err)
		}
	}
}

// check reports what is no Go test as a package with one test, which fails with err.
func (r *reporter) check(pkg, test string, took time.Duration, err error) {
	e := tally.Event{Action: "pass", Package: pkg, Test: test, Elapsed: took.Seconds()}
	r.event(tally.Event{Action: "run", Package: pkg, Test: test})
	if err != nil {
		e.Action = "fail"
		r.text(pkg, test, err.Error())
	}
	r.event(e)
	r.event(tally.Event{Action: e.Action, Package: pkg, Elapsed: took.Seconds()})
}

// text reports the output of a test, if there is any.
func (r *reporter) text(pkg, test, s string) {
	if s == "" {
		return
	}
	for line := range strings.Lines(s + "\n") {
		r.event(tally.Event{Action: "output", Package: pkg, Test: test, Output: line})
	}
}
