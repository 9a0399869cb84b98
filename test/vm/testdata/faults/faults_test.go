// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

// Package faults fails in every way that the rig must notice. Its tests run
// only inside a machine that the rig's own tests boot.
package faults

import (
	"os"
	"testing"
	"time"
)

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o200); err != nil {
		t.Fatal(err)
	}
}

func TestPass(*testing.T) {}

func TestFail(t *testing.T) { t.Error("wanted") }

func TestSkip(t *testing.T) { t.Skip("wanted") } //nolint:forbidigo // it is what must be noticed

func TestExit(*testing.T) { os.Exit(1) }

func TestHang(*testing.T) { time.Sleep(time.Hour) }

// TestComplaint passes while the kernel's log says that something is wrong.
func TestComplaint(t *testing.T) { write(t, "/dev/kmsg", "BUG: wanted\n") }

// TestPanic makes the kernel crash (Documentation/admin-guide/sysrq.rst).
func TestPanic(t *testing.T) { write(t, "/proc/sysrq-trigger", "c") }
