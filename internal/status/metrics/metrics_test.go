// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
)

type part struct {
	Part     string         `label:"part=a; b"`
	Untagged int            // not exported
	Done     uint64         `metric:"done_total" label:"result=ok: it went well" help:"Things done."`
	Failed   uint64         `metric:"done_total" label:"result=failed"`
	Took     time.Duration  `metric:"took_seconds_total" help:"Time taken."`
	ByKind   map[string]int `metric:"kinds" label:"kind=x (old); y" help:"Things by kind."`
}

type absent struct {
	N int `metric:"absent" help:"What is not there."`
}

type whole struct {
	Up     bool              `metric:"up" help:"1 while it is up."`
	Limit  *int              `metric:"limit" help:"The limit."`
	Absent *absent           `metric:"*"`
	Parts  []part            `metric:"*"`
	Other  map[string]uint64 `metric:"others" label:"part" help:"Others by part."`
}

func TestTagsDeclareFamilies(t *testing.T) {
	result := Label{"result", "`ok`: it went well, `failed`"}
	parts := Label{"part", "`a`, `b`"}
	want := []*Family{
		{Name: "fairlead_up", Help: "1 while it is up.", Kind: "gauge"},
		{Name: "fairlead_limit", Help: "The limit.", Kind: "gauge"},
		{Name: "fairlead_absent", Help: "What is not there.", Kind: "gauge"},
		{Name: "fairlead_done_total", Help: "Things done.", Kind: "counter", Labels: []Label{parts, result}},
		{Name: "fairlead_took_seconds_total", Help: "Time taken.", Kind: "counter", Labels: []Label{parts}},
		{Name: "fairlead_kinds", Help: "Things by kind.", Kind: "gauge", Labels: []Label{parts, {"kind", "`x` (old), `y`"}}},
		{Name: "fairlead_others", Help: "Others by part.", Kind: "gauge", Labels: []Label{parts}},
	}
	got := Families[whole]()[1:] // the first has the versions
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Family{}), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestFieldsAreSentWithTheirLabels(t *testing.T) {
	limit := 9
	h := Handler(func() whole {
		return whole{
			Limit: &limit, Other: map[string]uint64{"b": 8},
			Parts: []part{
				{Part: "a", Untagged: 1, Done: 2, Failed: 3, Took: 2500 * time.Millisecond, ByKind: map[string]int{"x": 4, "y": 5}},
				{Part: "b", Done: 6},
			},
		}
	})
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	var got []string
	for line := range strings.Lines(w.Body.String()) {
		if strings.HasPrefix(line, "fairlead_") && !strings.HasPrefix(line, "fairlead_build_info{") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	want := []string{
		`fairlead_done_total{part="a",result="failed"} 3`,
		`fairlead_done_total{part="a",result="ok"} 2`,
		`fairlead_done_total{part="b",result="failed"} 0`,
		`fairlead_done_total{part="b",result="ok"} 6`,
		`fairlead_kinds{kind="x",part="a"} 4`,
		`fairlead_kinds{kind="y",part="a"} 5`,
		`fairlead_limit 9`,
		`fairlead_others{part="b"} 8`,
		`fairlead_took_seconds_total{part="a"} 2.5`,
		`fairlead_took_seconds_total{part="b"} 0`,
		`fairlead_up 0`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestRecentReturnsEachPropagationOnce(t *testing.T) {
	p := NewPropagation()
	got, n := p.Recent(0)
	if len(got) != 0 || n != 0 {
		t.Fatalf("of none: %v, %d", got, n)
	}
	for i := range 300 {
		p.Add("hostlink", time.Duration(i))
	}
	got, n = p.Recent(0)
	if len(got) != 256 || n != 300 || got[0] != 44 || got[255] != 299 {
		t.Errorf("%d of %d, %v to %v: want the latest 256", len(got), n, got[0], got[len(got)-1])
	}
	p.Add("hostlink", 1000)
	if got, n = p.Recent(n); len(got) != 1 || got[0] != 1000 || n != 301 {
		t.Errorf("since then: %v, %d", got, n)
	}
	if got, _ = p.Recent(1 << 40); len(got) != 256 {
		t.Errorf("asked with the count of an earlier process: %d, want all that are kept", len(got))
	}
}

// A Prometheus that takes native histograms gets them; every other has buckets.
func TestPropagationHasNativeAndClassicBuckets(t *testing.T) {
	p := NewPropagation()
	p.Add("hostlink", 150*time.Microsecond)
	r := prometheus.NewRegistry()
	r.MustRegister(p.times)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	h := families[0].Metric[0].Histogram
	if h.GetSampleCount() != 1 || len(h.PositiveSpan) == 0 || len(h.Bucket) != len(Buckets()) {
		t.Errorf("%v", h)
	}
}

// Mistakes in tags are found when a program starts, not at a scrape.
func TestWrongTagsPanic(t *testing.T) {
	for name, families := range map[string]func() []*Family{
		"no help": Families[struct {
			N int `metric:"n"`
		}],
		"no number": Families[struct {
			N chan int `metric:"n" help:"Channels."`
		}],
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			families()
		}()
	}
}

// A scrape follows the fields of a struct; it must not cost more than what it formats.
func BenchmarkScrape(b *testing.B) {
	h := Handler(func() whole { return whole{Parts: make([]part, 1)} })
	for b.Loop() {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil))
	}
}
