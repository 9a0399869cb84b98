// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"bytes"
	"errors"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Stat is what is read of /proc/PID/stat.
type Stat struct {
	Name    string        // of the first thread
	State   byte          // as in proc_pid_stat(5); 'Z' for a zombie
	Started time.Duration // since boot, suspended time included; rounded down to a tick
}

// tick is the unit of time in /proc (USER_HZ).
const tick = time.Second / 100

var errStat = errors.New("not a stat file as in proc_pid_stat(5)")

// ParseStat parses the content of /proc/PID/stat.
func ParseStat(b []byte) (Stat, error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return Stat{}, errStat
	}
	s := Stat{Name: string(b[open+1 : end])}
	field := 3 // after the name
	for f := range bytes.FieldsSeq(b[end+1:]) {
		switch field {
		case 3:
			s.State = f[0]
		case 22:
			ticks, err := strconv.ParseInt(string(f), 10, 64)
			if err != nil {
				return Stat{}, errStat
			}
			s.Started = time.Duration(ticks) * tick
			return s, nil
		}
		field++
	}
	return Stat{}, errStat
}

// Suspended returns by how much CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC.
func Suspended() time.Duration {
	var boot, mono unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil || unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono) != nil {
		return 0
	}
	return time.Duration(boot.Nano() - mono.Nano())
}
