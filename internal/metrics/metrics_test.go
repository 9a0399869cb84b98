// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/fairlead/fairlead/internal/memory"
	"github.com/fairlead/fairlead/internal/port"
)

var update = flag.Bool("update", false, "write golden files and docs/metrics.md")

// agentSnapshot has a different number wherever two could be mixed up.
func agentSnapshot() AgentSnapshot {
	return AgentSnapshot{
		Changes:      7,
		Publications: map[port.State]int{port.Active: 3, port.Denied: 1},
		BySource:     map[SourceState]int{{"socket", port.Active}: 3, {"nat", port.Denied}: 1},
		Sources:      map[string]bool{"socket": true, "nat": false},
		Outcomes:     map[SinkState]int{{"hostlink", port.Active}: 3, {"hostlink", port.Conflict}: 2},
		Sinks:        []SinkCounts{{"hostlink", 11, 12, 13}},
		Observer:     ObserverCounts{21, 22, 23, 29, 24, 25, 26, 27, 1500 * time.Millisecond, 28},
		Methods:      map[string]string{"tcp-listen": "tp_btf", "udp-bind": "cgroup"},
		Flows:        FlowCounts{31, 32, 33, 34, 35, 38, 36, 37},
		NAT:          &NATCounts{61, 62, 63, 64, 65, 66, 67, 68},
		Memory:       &memory.Usage{Anonymous: 81, File: 82},
		Listener:     &ListenerCounts{71, 72, 73, 74, 75, 76, 77, 78},
		Inventory:    &InventoryCounts{true, 81, 82, 83, &PolicyCounts{true, true, 84}},
		Link: &LinkCounts{
			Connected: true, Sessions: 41, Replaced: 42, Silent: 43, FramesIn: 44, FramesOut: 45, BytesIn: 46, BytesOut: 47,
			Malformed: 48, Stray: 49, Resyncs: 50, Snapshots: 51, Changes: 52,
			Flows: map[string]uint64{"served": 53, "lost": 54},
		},
	}
}

func hostSnapshot() HostSnapshot {
	return HostSnapshot{
		Publications: map[port.State]int{port.Active: 3, port.Conflict: 1},
		OpenTCP:      1, OpenUDP: 2, Listeners: 3, Connected: 4, Lost: 5, OK: 6, Refused: 7, Disconnected: 8, OverLimit: 9,
		DatagramsDropped: 10, UDPEvicted: 11, ToGuest: 12, ToHost: 13, Snapshots: 14, Changes: 15, Resyncs: 16,
		Conflicts: 17, ListenFailures: 18, NamesHTTP: 19, NamesTLS: 20,
		Names: map[string]uint64{"ok": 21, "unknown": 22, "ambiguous": 23, "foreign": 24, "failed": 25, "invalid": 26, "page": 27},
	}
}

func scrape(t *testing.T, h http.Handler) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("scrape: %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func agentHandler() http.Handler {
	a := NewAgent(agentSnapshot)
	a.Propagated("hostlink", 150*time.Microsecond)
	a.Propagated("hostlink", 3*time.Millisecond)
	return a.Handler()
}

func handlers() map[string]http.Handler {
	return map[string]http.Handler{"agent": agentHandler(), "host": NewHost(hostSnapshot)}
}

func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs (make docs writes it anew; -want +got):\n%s", path, diff)
	}
}

// Names, help, types, labels and values match the golden files.
func TestExpositionIsStable(t *testing.T) {
	for name, h := range handlers() {
		text := regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?(go|process|promhttp)_.*\n`).ReplaceAllString(scrape(t, h), "")
		text = regexp.MustCompile(`build_info\{.*\}`).ReplaceAllString(text, `build_info{goversion="GO",version="VERSION"}`)
		golden(t, filepath.Join("testdata", name+".golden"), []byte(text))
	}
}

func TestExpositionHasNoLint(t *testing.T) {
	for name, h := range handlers() {
		problems, err := promlint.New(strings.NewReader(scrape(t, h))).Lint()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			t.Errorf("%s: %s: %s", name, p.Metric, p.Text)
		}
	}
}

func TestDocumentIsFresh(t *testing.T) {
	golden(t, filepath.Join("..", "..", "docs", "metrics.md"), []byte(document()))
}

// A label whose values nobody bounds would grow with every port or process.
func TestNoLabelNamesAPortAnAddressOrAProcess(t *testing.T) {
	for _, f := range slices.Concat(declareAgent().all, declareHost().all) {
		for _, l := range f.Labels {
			if l.Values == "" || slices.Contains([]string{"port", "address", "addr", "ip", "pid", "owner", "container", "name"}, l.Name) {
				t.Errorf("%s has label %q with values %q", f.Name, l.Name, l.Values)
			}
		}
	}
}

func TestRecentReturnsEachPropagationOnce(t *testing.T) {
	a := NewAgent(agentSnapshot)
	got, n := a.Recent(0)
	if len(got) != 0 || n != 0 {
		t.Fatalf("of none: %v, %d", got, n)
	}
	for i := range 300 {
		a.Propagated("hostlink", time.Duration(i))
	}
	got, n = a.Recent(0)
	if len(got) != 256 || n != 300 || got[0] != 44 || got[255] != 299 {
		t.Errorf("%d of %d, %v to %v: want the latest 256", len(got), n, got[0], got[len(got)-1])
	}
	a.Propagated("hostlink", 1000)
	if got, n = a.Recent(n); len(got) != 1 || got[0] != 1000 || n != 301 {
		t.Errorf("since then: %v, %d", got, n)
	}
	if got, _ = a.Recent(1 << 40); len(got) != 256 {
		t.Errorf("asked with the count of an earlier process: %d, want all that are kept", len(got))
	}
}

// A Prometheus that takes native histograms gets them; every other has buckets.
func TestPropagationHasNativeAndClassicBuckets(t *testing.T) {
	a := NewAgent(agentSnapshot)
	a.Propagated("hostlink", 150*time.Microsecond)
	families, err := a.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "fairlead_propagation_seconds" {
			continue
		}
		h := f.Metric[0].Histogram
		if h.GetSampleCount() != 1 || len(h.PositiveSpan) == 0 || len(h.Bucket) != len(propagationBuckets) {
			t.Errorf("%v", h)
		}
		return
	}
	t.Error("no such family")
}
