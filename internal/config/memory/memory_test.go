// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"runtime"
	"runtime/debug"
	"testing"
)

func TestParse(t *testing.T) {
	for status, want := range map[string]Usage{
		"Name:\tfairlead\nVmRSS:\t   24000 kB\nRssAnon:\t    8000 kB\nRssFile:\t   16000 kB\nRssShmem:\t 0 kB\n": {8000 << 10, 16000 << 10},
		"RssFile:\t 1 kB\nRssAnon:\t 2 kB": {2 << 10, 1 << 10},
	} {
		if got, err := parse([]byte(status)); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", status, got, err, want)
		}
	}
	for _, status := range []string{"", "RssAnon:\t1 kB\n", "RssAnon:\t1 kB\nRssFile:\tmany kB\n"} {
		if got, err := parse([]byte(status)); err == nil {
			t.Errorf("%q: %+v, want an error", status, got)
		}
	}
}

func TestReadCountsAllocatedMemory(t *testing.T) {
	debug.FreeOSMemory() // or memory of earlier tests is used again, and nothing grows
	before, err := Read()
	if err != nil || before.Anonymous < 1<<18 || before.File < 1<<18 {
		t.Fatalf("%+v, %v", before, err)
	}
	b := make([]byte, 32<<20)
	for i := range b {
		b[i] = 1
	}
	after, err := Read()
	if err != nil || after.Anonymous < before.Anonymous+int64(len(b))/2 {
		t.Errorf("%+v with %d bytes more, was %+v, %v", after, len(b), before, err)
	}
	runtime.KeepAlive(b)
}
