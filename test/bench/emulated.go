// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/fairlead/fairlead/test/bench/report"
)

// emulatedKernel is a kernel that hack/provision.sh lays into the cache.
const emulatedKernel = "6.12"

// scaleVariable tells a test in an emulated machine how much to measure, as
// Scale has it.
const scaleVariable = "FAIRLEAD_BENCH_SCALE"

// What is compared on an emulated kernel.
const (
	emulatedNAT  = "NAT commit is sent → message on the link, in an emulated machine"
	emulatedHook = "fentry"
)

func emulatedPart() Part {
	return Part{
		Section: report.Section{
			Name: "emulated", Title: "How soon a NAT rule is there by hooks, in an emulated machine",
			About: `fairlead hears of NAT rules by the kernel's notifications (nfnetlink) where it can, and by hooks in the
kernel (fentry, kprobe) where it cannot. Not every kernel takes these hooks, so they are measured on Linux ` + emulatedKernel + ` in a machine
that is emulated in software: one that is some tens of times slower. Only its ratios mean something. All ways run in the one
machine, in turns, each in a namespace of its own: agents that are forced to one of the ways, and a poller that reads the
kernel's dump of all rules each second, as cheaply as that can be done and publishing nothing.`,
			Base: emulatedHook,
		},
		Run: func(ctx context.Context, e *Env) error { return e.inVM(ctx, "TestNATInTheEmulatedMachine") },
	}
}

// inVM runs a test of this package, which has build tag vm or bench, under the emulated
// kernel and records the cells that it prints (see Env.toStdout). It is an error
// if the test fails, or prints none.
func (e *Env) inVM(ctx context.Context, test string) error {
	e.Progress("building and booting kernel %s", emulatedKernel)
	cmd := exec.CommandContext(ctx, "go", "run", "github.com/fairlead/fairlead/test/vm", "-kernel", emulatedKernel, "-tags", "vm,bench",
		"-run", "^"+test+"$", "-env", scaleVariable+"="+e.Scale.String(), "github.com/fairlead/fairlead/test/bench")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	n, said, err := e.collect(out)
	if failed := cmd.Wait(); failed != nil {
		err = errors.Join(err, fmt.Errorf("%s in the emulated machine: %w\n%s%s", test, failed, said, stderr.String()))
	}
	if err == nil && n == 0 {
		err = fmt.Errorf("%s in the emulated machine measured nothing\n%s", test, said)
	}
	return err
}

// A cell is a long line, and what runs a test breaks long lines: it comes in
// pieces, each behind a mark on a line of its own.
const (
	pieceMark = "bench-cell: "
	pieceSize = 300 // bytes
	pieceEnd  = "."
)

// pieces writes each line that is written to it in pieces.
type pieces struct{ w io.Writer }

func (p pieces) Write(line []byte) (int, error) {
	var b bytes.Buffer
	for rest := bytes.TrimSuffix(line, []byte("\n")); len(rest) > 0; {
		n := min(pieceSize, len(rest))
		fmt.Fprintf(&b, "%s%x\n", pieceMark, rest[:n]) // a piece may end within a character
		rest = rest[n:]
	}
	b.WriteString(pieceMark + pieceEnd + "\n")
	if _, err := p.w.Write(b.Bytes()); err != nil {
		return 0, err
	}
	return len(line), nil
}

// collect records the cells whose pieces are among the lines of r, each behind
// whatever prefix. It returns how many there were, and the last of the other lines.
func (e *Env) collect(r io.Reader) (n int, said string, err error) {
	const kept = 20
	var others []string
	var cell []byte
	in := bufio.NewReader(r)
	for {
		line, rerr := in.ReadString('\n')
		if _, piece, ok := strings.Cut(strings.TrimSpace(line), pieceMark); ok {
			if piece != pieceEnd {
				b, bad := hex.DecodeString(piece)
				cell, err = append(cell, b...), errors.Join(err, bad)
			} else {
				var res *report.Results
				if res, rerr = report.Read(bytes.NewReader(cell)); rerr == nil {
					n += e.recordAll(res)
				}
				cell = nil
			}
		} else if strings.TrimSpace(line) != "" && !strings.Contains(line, "console: ") {
			others = append(others, line)
			others = others[max(0, len(others)-kept):]
		}
		if rerr != nil {
			if errors.Is(rerr, io.EOF) {
				rerr = nil
			}
			_, copied := io.Copy(io.Discard, in) // who writes must not wait
			return n, strings.Join(others, ""), errors.Join(err, rerr, copied)
		}
	}
}

// recordAll records what was measured elsewhere, and says how many cells that is.
func (e *Env) recordAll(r *report.Results) int {
	for _, c := range r.Cells {
		e.record(c)
	}
	return len(r.Cells)
}

// toStdout returns an Env whose cells are lines on standard output, for collect.
func toStdout(dir, binary string, scale Scale) *Env {
	return &Env{Program: binary, Scale: scale, Log: os.Stderr, dir: dir, begun: time.Now(), put: report.NewSink(pieces{os.Stdout}).Cell}
}
