// SPDX-License-Identifier: Apache-2.0

//go:build linux

package documents

import (
	"flag"
	"fmt"
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

	"github.com/fairlead/fairlead/internal/config/memory"
	"github.com/fairlead/fairlead/internal/guest/agent"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
	"github.com/fairlead/fairlead/internal/guest/sink/listener"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/host/hostpeer"
	"github.com/fairlead/fairlead/internal/host/route"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/inventory"
	"github.com/fairlead/fairlead/internal/status/metrics"
)

var update = flag.Bool("update", false, "write golden files and docs/metrics.md")

// byState returns counts with one or two that are not 0.
func byState(of ...any) map[port.State]int {
	counts := port.NoneByState()
	for i := 0; i < len(of); i += 2 {
		counts[of[i].(port.State)] = of[i+1].(int)
	}
	return counts
}

// agentCounters has a different number wherever two could be mixed up.
func agentCounters() agent.Counters {
	judged, violations := true, 84
	p := metrics.NewPropagation()
	p.Add("hostlink", 150*time.Microsecond)
	p.Add("hostlink", 3*time.Millisecond)
	return agent.Counters{
		Memory:       &memory.Usage{Anonymous: 81, File: 82},
		Publications: byState(port.Active, 3, port.Denied, 1),
		Changes:      7,
		Sources: []agent.SourceCounters{
			{Source: "socket", Publications: byState(port.Active, 3), Live: true},
			{Source: "nat", Publications: byState(port.Denied, 1)},
		},
		Propagation: p,
		Sinks: []agent.SinkCounters{{
			Sink: "hostlink", Outcomes: byState(port.Active, 3, port.Conflict, 2),
			Syncs: reconcile.SinkStats{Sink: "hostlink", Syncs: 11, Failures: 12, Retries: 13},
		}},
		Observer: observer.Stats{
			Events: 21, Malformed: 22, Drops: 23, Skipped: 29, Resyncs: 24, Drift: 25, Dumps: 26, DumpFailures: 27,
			DumpTime: 1500 * time.Millisecond, Sockets: 28,
		},
		Methods: map[string]string{"tcp-listen": "tp_btf", "udp-bind": "cgroup"},
		NAT: &nat.Status{
			ProblemCount: 61, Commits: 62, Dumps: 63, Failures: 64, LegacyReads: 65, Lost: 66, Drift: 67, Evaluated: 68,
		},
		Flows: forward.Stats{
			OpenTCP: 31, OpenUDP: 32, OK: 33, Refused: 34, Unreachable: 35, OutOfDescriptors: 38, ToGuest: 36, ToHost: 37,
		},
		Inventory:  &inventory.State{Current: true, Writes: 81, Fails: 82, Omitted: 83},
		Judged:     &judged,
		Violations: &violations,
		Listener: &listener.Stats{
			Open: 71, Flows: 72, Opened: 73, Yields: 74, Conflicts: 75, Served: 76, Failed: 77, OverLimit: 78,
		},
		Link: &hostlink.Stats{
			Connected: true, Sessions: 41, Replaced: 42, Silent: 43, FramesIn: 44, FramesOut: 45, BytesIn: 46, BytesOut: 47,
			Malformed: 48, Stray: 49, Resyncs: 50, Snapshots: 51, Changes: 52,
			Flows: map[string]uint64{"served": 53, "lost": 54},
		},
	}
}

func hostCounters() hostpeer.Counters {
	return hostpeer.Counters{
		Publications: byState(port.Active, 3, port.Conflict, 1), Connected: 4, Lost: 5,
		Host: host.Stats{
			OpenTCP: 1, OpenUDP: 2, Listeners: 3, OK: 6, Refused: 7, Unlinked: 8, OverLimit: 9,
			DatagramsDropped: 10, UDPEvicted: 11, ToGuest: 12, ToHost: 13, Snapshots: 14, Changes: 15, Resyncs: 16,
			Conflicts: 17, ListenFailures: 18,
		},
		Names: &route.Stats{
			HTTP: 19, TLS: 20,
			Results: map[string]uint64{"ok": 21, "unknown": 22, "ambiguous": 23, "foreign": 24, "failed": 25, "invalid": 26, "page": 27},
		},
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

func handlers() map[string]http.Handler {
	return map[string]http.Handler{"agent": metrics.Handler(agentCounters), "host": metrics.Handler(hostCounters)}
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
func TestMetricsAreStable(t *testing.T) {
	for name, h := range handlers() {
		text := regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?(go|process|promhttp)_.*\n`).ReplaceAllString(scrape(t, h), "")
		text = regexp.MustCompile(`build_info\{.*\}`).ReplaceAllString(text, `build_info{goversion="GO",version="VERSION"}`)
		golden(t, filepath.Join("testdata", "metrics-"+name+".golden"), []byte(text))
	}
}

func TestMetricsHaveNoLint(t *testing.T) {
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

func TestMetricsPageIsFresh(t *testing.T) {
	golden(t, filepath.Join("..", "..", "docs", "metrics.md"), []byte(metricsPage()))
}

// Metrics of what is not there are absent.
func TestMetricsOfAbsentPartsAreNotSent(t *testing.T) {
	text := scrape(t, metrics.Handler(func() agent.Counters { return agent.Counters{Propagation: metrics.NewPropagation()} }))
	if m := regexp.MustCompile(`(?m)^fairlead_(memory|nat|inventory|policy|listener|link)_.*`).FindString(text); m != "" {
		t.Errorf("sent %s", m)
	}
}

// A label whose values nobody bounds would grow with every port or process.
func TestNoMetricNamesAPortAnAddressOrAProcess(t *testing.T) {
	for _, f := range slices.Concat(metrics.Families[agent.Counters](), metrics.Families[hostpeer.Counters]()) {
		for _, l := range f.Labels {
			if l.Values == "" || slices.Contains([]string{"port", "address", "addr", "ip", "pid", "owner", "container", "name"}, l.Name) {
				t.Errorf("%s has label %q with values %q", f.Name, l.Name, l.Values)
			}
		}
	}
}

// metricsPage returns docs/metrics.md.
func metricsPage() string {
	var b strings.Builder
	b.WriteString(`# Metrics

<!-- Generated by "make docs" from the structs that hold the counters: do not edit. -->

For anyone who monitors fairlead. Agent and host peer serve /metrics on the control socket, and on TCP where
` + "`--metrics-addr`" + ` names an address, without authentication:

` + "```" + `
curl --unix-socket /run/fairlead/control.sock http://fairlead/metrics
` + "```" + `

Every label has a fixed set of values, named where it differs from the row before with that label: never a port, an
address, a process or a name from a guest. Nothing runs between scrapes. [Alerts](../deploy/prometheus) and a [dashboard](../deploy/grafana) come with fairlead; the
usual ` + "`go_*` and `process_*`" + ` metrics are exported as well.
`)
	writeSection(&b, "Agent", metrics.Families[agent.Counters]())
	buckets := metrics.Buckets()
	b.WriteString(fmt.Sprintf(`
`+"`fairlead_propagation_seconds`"+` has classic buckets from %s to %s, and native ones of factor %g.
Dashboard and alerts use the classic ones: with native histograms also set `+"`always_scrape_classic_histograms`"+`.
`, seconds(buckets[0]), seconds(buckets[len(buckets)-1]), metrics.NativeFactor))
	writeSection(&b, "Host peer", metrics.Families[hostpeer.Counters]())
	return b.String()
}

func seconds(v float64) string {
	if v < 1e-3 {
		return fmt.Sprintf("%g µs", v*1e6)
	}
	return fmt.Sprintf("%g s", v)
}

// writeSection writes the values of a label where they differ from those of the row before that has it.
func writeSection(b *strings.Builder, title string, families []*metrics.Family) {
	said := make(map[string]string)
	fmt.Fprintf(b, "\n## %s\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n", title)
	for _, f := range families {
		labels := make([]string, len(f.Labels))
		for i, l := range f.Labels {
			labels[i] = fmt.Sprintf("**%s**", l.Name)
			if said[l.Name] != l.Values {
				labels[i] += ": " + l.Values
			}
			said[l.Name] = l.Values
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", f.Name, f.Kind, strings.Join(labels, "<br>"), f.Help)
	}
}
