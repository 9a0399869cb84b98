// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
)

func TestOnlyUnchangedPagesOfTheExecutableAreReleased(t *testing.T) {
	const smaps = `00400000-01000000 r-xp 00000000 fe:00 1 /usr/bin/fairlead
Rss:                 100 kB
Anonymous:             0 kB
01000000-02000000 r--p 00c00000 fe:00 1 /usr/bin/fairlead
Anonymous:             0 kB
02000000-02001000 r--p 01c00000 fe:00 1 /usr/bin/fairlead
Anonymous:             4 kB
02001000-02002000 rw-p 01c01000 fe:00 1 /usr/bin/fairlead
Anonymous:             0 kB
c000000000-c000400000 rw-p 00000000 00:00 0
Anonymous:             0 kB
7f0000000000-7f0000001000 r-xp 00000000 fe:00 2 /lib/libc.so.6
Anonymous:             0 kB
`
	got, err := codeRanges(strings.NewReader(smaps), "/usr/bin/fairlead")
	if err != nil || fmt.Sprintf("%x", got) != "[{400000 1000000} {1000000 2000000}]" {
		t.Errorf("ranges = %x, %v", got, err)
	}
	if _, err := codeRanges(strings.NewReader("zz-yy r-xp 0 0 0 /x\n"), "/x"); err == nil {
		t.Error("addresses that are none were taken")
	}
}

func TestProcessRunsOnAfterItsCodeWasReleased(t *testing.T) {
	for range 3 {
		if err := releaseCode(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestResidentMemoryIsRead(t *testing.T) {
	debug.FreeOSMemory() // else what earlier tests left is used again, and nothing grows
	before, err := resident()
	if err != nil || before < 1<<20 {
		t.Fatalf("resident = %d bytes, %v", before, err)
	}
	b := make([]byte, 32<<20)
	for i := range b {
		b[i] = 1
	}
	after, err := resident()
	if err != nil || after < before+int64(len(b))/2 {
		t.Errorf("resident = %d bytes with %d more, was %d, %v", after, len(b), before, err)
	}
	runtime.KeepAlive(b)
}
