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

// settleAfter is how long after the first complete set the start is over.
const settleAfter = 2 * time.Second

// settle gives back, once, what only the start needed: garbage of reading the
// kernel's types and of first lists, which the runtime would keep for minutes,
// and the pages of the executable. Those stay in the kernel's page cache, and
// what runs again is mapped again without reading.
func (a *Agent) settle(ctx context.Context) {
	limit := time.NewTimer(readyTimeout)
	defer limit.Stop()
	select {
	case <-ctx.Done():
		return
	case <-a.registry.Ready():
	case <-limit.C:
	}
	pause := time.NewTimer(settleAfter)
	defer pause.Stop()
	select {
	case <-ctx.Done():
		return
	case <-pause.C:
	}
	a.types.Forget()
	debug.FreeOSMemory()
	if err := releaseCode(); err != nil {
		a.log.Debug("pages of the executable stay mapped", "err", err)
	}
}

// readyTimeout bounds the wait for the first complete set.
const readyTimeout = 10 * time.Second

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
