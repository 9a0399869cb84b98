// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/port"
)

var update = flag.Bool("update", false, "write what the source publishes into the corpus")

// makers are the programs that wrote the rulesets, by the first word of their names.
var makers = map[string]port.Maker{"docker": port.MakerDocker, "portmap": port.MakerCNI, "kube": port.MakerKubeProxy}

// Each ruleset, loaded before the source starts, gives the publications that its
// file states.
func TestCorpus(t *testing.T) {
	for _, c := range corpusCases(t) {
		t.Run(c.Name, func(t *testing.T) {
			w := newWorld(t)
			w.load(c)
			// The method does not matter here, and this is the quickest to take.
			src, f, stop := w.start(nat.Options{Methods: []string{nat.MethodGeneration}})
			eventually(t, "a first set", f.ready)
			got := answer(src, f)
			stop()
			if *update {
				writeWant(t, filepath.Join("corpus", c.Name+".txt"), got)
			} else if d := cmp.Diff(c.Want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			for _, b := range f.set { // the source has stopped
				if want := makers[strings.SplitN(c.Name, "-", 2)[0]]; b.Maker != want {
					t.Errorf("%s: maker %q, want %q", b.Key, b.Maker, want)
				}
			}
		})
	}
}

// Loaded and removed while sources run, each on a method of its own, it gives the
// same on all, and nothing when it is gone.
func TestCorpusThroughEveryMethod(t *testing.T) {
	w := newWorld(t)
	all := w.startMethods(nat.Options{})
	for _, c := range corpusCases(t) {
		t.Run(c.Name, func(t *testing.T) {
			w := &world{t, w.name}
			w.load(c)
			for _, x := range all {
				settle(t, x.method, func() []string { return answer(x.src, x.feed) }, c.Want)
			}
			w.run("flush ruleset", "nft", "-f", "-")
			for _, tool := range []string{"iptables-legacy-restore", "ip6tables-legacy-restore"} {
				w.run("*nat\nCOMMIT\n", tool, "-w")
			}
			for _, x := range all {
				settle(t, x.method+" when it is gone", func() []string { return answer(x.src, x.feed) }, nil)
			}
		})
	}
	for _, x := range all {
		if st := x.src.Status(); st.Drift != 0 {
			t.Errorf("%s: drift: %d objects", x.method, st.Drift)
		}
	}
}

// settle waits until get returns want.
func settle(t testing.TB, what string, get func() []string, want []string) {
	t.Helper()
	var got []string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if got = get(); slices.Equal(got, want) {
			return
		}
	}
	t.Errorf("%s (-want +got):\n%s", what, cmp.Diff(want, got))
}

func writeWant(t *testing.T, path string, got []string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, _, ok := strings.Cut(string(b), "-- want --\n")
	if !ok {
		head = string(b)
	}
	if err := os.WriteFile(path, []byte(head+"-- want --\n"+strings.Join(got, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}
