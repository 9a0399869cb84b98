// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"fmt"
	"testing"
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
