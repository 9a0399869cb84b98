// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	tail := " S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 1 1"
	for text, want := range map[string]string{
		"1 (init)" + tail:             "init 47.11s",
		"2 (a b) c) ()" + tail:        "a b) c) ( 47.11s",
		"3 ()" + tail:                 " 47.11s",
		"":                            "",
		"1 init" + tail:               "",
		"1 )(" + tail:                 "",
		"1 (init) S 1 1":              "",
		"1 (init)" + " x" + tail[:30]: "",
	} {
		got := ""
		if stat, err := ParseStat([]byte(text)); err == nil {
			got = fmt.Sprint(stat.Name, " ", stat.Started)
		}
		if got != want {
			t.Errorf("ParseStat(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestEnded(t *testing.T) {
	proc := t.TempDir()
	for pid, state := range map[string]string{"1": "S", "2": "Z"} {
		if err := os.Mkdir(filepath.Join(proc, pid), 0o700); err != nil {
			t.Fatal(err)
		}
		text := pid + " (a) " + state + " 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 1 1\n" // started after a second
		if err := os.WriteFile(filepath.Join(proc, pid, "stat"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	later := int64(time.Minute)
	for _, c := range []struct {
		pid  uint32
		seen int64
		want bool
	}{
		{1, later, false},
		{2, later, true}, // a zombie
		{3, later, true}, // no such process
		{1, int64(time.Second/2 - Suspended()), true}, // another one has the pid now
	} {
		if got := ended(proc, c.pid, c.seen); got != c.want {
			t.Errorf("%+v: ended = %v", c, got)
		}
	}
}
