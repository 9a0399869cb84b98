// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package nat

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/source/nat"
)

var update = flag.Bool("update", false, "write what the source says into the corpus")

// Each ruleset, loaded before the source starts and loaded while it runs, gives
// the publications that its file states.
func TestCorpus(t *testing.T) {
	for _, path := range corpusFiles(t) {
		name := strings.TrimSuffix(filepath.Base(path), ".txt")
		t.Run(name, func(t *testing.T) {
			sections := parseCorpus(t, path)
			want := ""
			for _, s := range sections {
				if s.name == "want" {
					want = s.text
				}
			}
			w := newWorld(t)
			for _, s := range sections {
				w.load(s)
			}
			src, f, stop := w.start(nat.Options{})
			eventually(t, "a first set", f.ready)
			got := answer(src, f)
			stop()
			if *update {
				writeWant(t, path, got)
			} else if d := cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")); d != "" {
				t.Errorf("loaded before the start (-want +got):\n%s", d)
			}

			w = newWorld(t)
			src, f, _ = w.start(nat.Options{LegacyPoll: 20 * time.Millisecond})
			eventually(t, "a first set", f.ready)
			for _, s := range sections {
				w.load(s)
			}
			settle(t, func() string { return answer(src, f) }, got)
			if st := src.Status(); st.Drift != 0 {
				t.Errorf("drift: %d objects", st.Drift)
			}
		})
	}
}

// settle waits until get returns want.
func settle(t testing.TB, get func() string, want string) {
	t.Helper()
	var got string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if got = get(); got == want {
			return
		}
	}
	t.Errorf("loaded while running (-want +got):\n%s", cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")))
}

func writeWant(t *testing.T, path, got string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, _, ok := strings.Cut(string(b), "-- want --\n")
	if !ok {
		head = string(b)
	}
	if err := os.WriteFile(path, []byte(head+"-- want --\n"+got), 0o644); err != nil {
		t.Fatal(err)
	}
}
