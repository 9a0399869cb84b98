// SPDX-License-Identifier: Apache-2.0

package tally

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRead(t *testing.T) {
	for _, tt := range []struct {
		name, events string
		passed       int
		failures     []string
	}{
		{name: "nothing"},
		{name: "pass", events: "run p A|pass p A|pass p", passed: 1},
		{name: "two packages at once", events: "run p A|run q A|pass q A|pass p A|pass p|pass q", passed: 2},
		{name: "subtests are not counted", events: "run p A|run p A/x|pass p A/x|pass p A|pass p", passed: 1},
		{name: "fail", events: "run p A|run p B|fail p A|pass p B|fail p", passed: 1, failures: []string{"p A"}},
		{name: "failing subtest", events: "run p A|fail p A/x|fail p A|fail p", failures: []string{"p A"}},
		{name: "skip", events: "run p A|skip p A|pass p", failures: []string{"p A: skipped, which counts as failed"}},
		{name: "skipped subtest", events: "run p A|skip p A/x|pass p A|pass p", failures: []string{"p A: skipped, which counts as failed"}},
		{name: "package without tests", events: "start p|skip p"},
		{name: "package that does not build", events: "build-output|build-fail|start p|fail p", failures: []string{"p"}},
		{name: "crash in a test", events: "run p A|pass p A|run p B|fail p", passed: 1, failures: []string{"p B"}},
		{name: "failing TestMain", events: "run p A|pass p A|fail p", passed: 1, failures: []string{"p"}},
		{name: "package that does not end", events: "run p A|pass p A", passed: 1, failures: []string{"p: did not end"}},
		{name: "test that does not end", events: "run p A", failures: []string{"p A: did not end"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var in strings.Builder
			for e := range strings.SplitSeq(tt.events, "|") {
				f := append(strings.Fields(e), "", "", "")
				if f[0] != "" {
					fmt.Fprintf(&in, "{\"Action\":%q,\"Package\":%q,\"Test\":%q}\n", f[0], f[1], f[2])
				}
			}
			got, err := Read(strings.NewReader(in.String()))
			if err != nil {
				t.Fatal(err)
			}
			var failures []string
			for _, f := range got.Failures {
				failures = append(failures, f.String())
			}
			if got.Passed != tt.passed || !cmp.Equal(failures, tt.failures) {
				t.Errorf("%d passed, failures %q; want %d and %q", got.Passed, failures, tt.passed, tt.failures)
			}
		})
	}
}

func TestReadKeepsTheEndOfTheOutput(t *testing.T) {
	var in strings.Builder
	for i := range 2 * Excerpt {
		fmt.Fprintf(&in, `{"Action":"output","Package":"p","Test":"A/x","Output":"line %d\n"}`+"\n", i)
	}
	in.WriteString(`{"Action":"fail","Package":"p","Test":"A"}` + "\n" + `{"Action":"fail","Package":"p"}`)
	got, err := Read(strings.NewReader(in.String()))
	if err != nil || len(got.Failures) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	out := got.Failures[0].Output
	if len(out) != Excerpt || out[Excerpt-1] != fmt.Sprintf("line %d", 2*Excerpt-1) {
		t.Errorf("kept %q", out)
	}
}

func TestReadRefusesWhatIsNoEvent(t *testing.T) {
	got, err := Read(strings.NewReader(`{"Action":"pass","Package":"p","Test":"A"}` + "\nhello\n"))
	if err == nil || got.Passed != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}
