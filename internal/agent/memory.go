// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// When memory is given back. Nothing here wakes an agent that nothing happens to.
const (
	// readyTimeout bounds the wait for the first complete set.
	readyTimeout = 10 * time.Second
	// settleAfter is how long work is left to end after what told of it.
	settleAfter = 500 * time.Millisecond
	// settlePause is between two times that memory is given back. It doubles while
	// what was given back is taken again, up to settlePauseMax.
	settlePause    = 2 * time.Second
	settlePauseMax = 4 * time.Minute
	// settleQuiet without anything that told of work begins with the short pause.
	settleQuiet = 30 * time.Second
	// settleGrowth is how many bytes there must be for that to be worth it.
	settleGrowth = 1 << 20
	// settledGC is GOGC, percent, once the start is over: an agent has little garbage,
	// and collecting it early costs less than the memory that it would take.
	settledGC = 35
)

// settle gives back what only a burst of work needed: at first what the start
// of the program touched and the start of the agent left, later what the first
// list of an engine or a reader of the metrics did. That is garbage, which the
// runtime would keep for minutes, and pages of the executable. Those stay in the
// kernel's page cache, and what runs again is mapped again without reading.
func (a *Agent) settle(ctx context.Context) {
	a.releaseCode()
	sources := a.registry.Sources().Subscribe()
	defer sources.Close()
	if !pause(ctx, readyTimeout, a.registry.Ready()) {
		return
	}
	for settled, rest := int64(0), settlePause; ; {
		if !pause(ctx, settleAfter, nil) {
			return
		}
		a.types.Forget() // once who has them is done
		if os.Getenv("GOGC") == "" {
			debug.SetGCPercent(settledGC)
		}
		if now, err := resident(); err != nil || now >= settled+settleGrowth {
			debug.FreeOSMemory()
			a.releaseCode()
			settled, _ = resident()
			if !pause(ctx, rest, nil) {
				return
			}
			rest = min(2*rest, settlePauseMax)
		}
		began := time.Now()
		select {
		case <-ctx.Done():
			return
		case <-sources.C():
			sources.Take()
		case <-a.served:
		}
		if time.Since(began) > settleQuiet {
			rest = settlePause
		}
	}
}

// pause waits until d is over or done is closed, and says whether ctx still runs.
func pause(ctx context.Context, d time.Duration, done <-chan struct{}) bool {
	limit := time.NewTimer(d)
	defer limit.Stop()
	select {
	case <-ctx.Done():
	case <-done:
	case <-limit.C:
	}
	return ctx.Err() == nil
}

// resident returns how much of our memory is resident, in bytes (proc_pid_statm(5)).
func resident() (int64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0, fmt.Errorf("statm is %q", b)
	}
	pages, err := strconv.ParseInt(f[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}

// releaseCode is the function of that name, which need not work.
func (a *Agent) releaseCode() {
	if err := releaseCode(); err != nil {
		a.log.Debug("pages of the executable stay mapped", "err", err)
	}
}

// releaseCode unmaps the pages of our executable from memory.
func releaseCode() error {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("release code: %w", err)
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return fmt.Errorf("release code: %w", err)
	}
	defer func() { _ = f.Close() }()
	ranges, err := codeRanges(f, exe)
	if err != nil {
		return fmt.Errorf("release code: %w", err)
	}
	var errs []error
	for _, r := range ranges {
		// No Go value is there, so no slice is made of it.
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, r.start, r.end-r.start, unix.MADV_DONTNEED); errno != 0 {
			errs = append(errs, fmt.Errorf("release code: madvise: %w", errno))
		}
	}
	return errors.Join(errs...)
}

type addresses struct{ start, end uintptr }

// codeRanges returns where a file is mapped and cannot be written, in a smaps
// file (proc_pid_smaps(5)). What was changed since, as a dynamic linker does, has
// pages of its own that are not in the file: it is left out.
func codeRanges(smaps io.Reader, file string) (out []addresses, err error) {
	var at *addresses
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		switch {
		case len(f) >= 5 && strings.Contains(f[0], "-"):
			at = nil
			if len(f) != 6 || f[5] != file || f[1] != "r--p" && f[1] != "r-xp" {
				continue
			}
			lo, hi, _ := strings.Cut(f[0], "-")
			start, err1 := strconv.ParseUint(lo, 16, strconv.IntSize)
			end, err2 := strconv.ParseUint(hi, 16, strconv.IntSize)
			if err := errors.Join(err1, err2); err != nil {
				return nil, fmt.Errorf("smaps: %w", err)
			}
			at = &addresses{uintptr(start), uintptr(end)}
		case at != nil && len(f) == 3 && f[0] == "Anonymous:" && f[1] == "0":
			out = append(out, *at)
		}
	}
	return out, lines.Err()
}
