// SPDX-License-Identifier: Apache-2.0

// Package metrics is what agent and host export to Prometheus. Every family is
// declared once, here; docs/metrics.md is generated from the declarations.
// Labels are bounded sets: never a port, an address, a process or a name that
// comes from a guest. The numbers are those that the rooms count themselves; a
// scrape reads them, and between scrapes nothing runs.
package metrics

import (
	"net/http"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/version"
)

const namespace = "fairlead"

// Kind is the type of a family, as Prometheus names it.
type Kind string

// The kinds.
const (
	Counter   Kind = "counter"
	Gauge     Kind = "gauge"
	Histogram Kind = "histogram"
)

// Label is a label with the values that it can take, for people.
type Label struct{ Name, Values string }

// Family is one metric family.
type Family struct {
	Name, Help string
	Kind       Kind
	Labels     []Label

	desc *prometheus.Desc
}

func (f *Family) labelNames() []string {
	names := make([]string, len(f.Labels))
	for i, l := range f.Labels {
		names[i] = l.Name
	}
	return names
}

// set gathers declarations.
type set struct{ all []*Family }

func (s *set) add(kind Kind, name, help string, labels ...Label) *Family {
	f := &Family{Name: prometheus.BuildFQName(namespace, "", name), Help: help, Kind: kind, Labels: labels}
	f.desc = prometheus.NewDesc(f.Name, f.Help, f.labelNames(), nil)
	s.all = append(s.all, f)
	return f
}

func (s *set) counter(name, help string, labels ...Label) *Family {
	return s.add(Counter, name, help, labels...)
}

func (s *set) gauge(name, help string, labels ...Label) *Family {
	return s.add(Gauge, name, help, labels...)
}

// Describe implements the half of prometheus.Collector that is the same for all.
// What stands for itself (a histogram) is registered apart.
func (s *set) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range s.all {
		if f.Kind != Histogram {
			ch <- f.desc
		}
	}
}

// sender sends samples of one scrape.
type sender chan<- prometheus.Metric

func (s sender) send(f *Family, v float64, labels ...string) {
	kind := prometheus.GaugeValue
	if f.Kind == Counter {
		kind = prometheus.CounterValue
	}
	s <- prometheus.MustNewConstMetric(f.desc, kind, v, labels...)
}

func number[T ~int | ~int64 | ~uint64](v T) float64 { return float64(v) }

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// declareBuild declares the family that says what runs.
func (s *set) declareBuild() *Family {
	return s.gauge("build_info", "1, with what the binary was built from.",
		Label{"version", "of fairlead"}, Label{"goversion", "of the compiler"})
}

func (s sender) build(f *Family) { s.send(f, 1, version.String(), goVersion()) }

func goVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.GoVersion
	}
	return "unknown"
}

// newRegistry returns a registry of its own with c and with what the runtime and
// the system say of the process (go_*, process_*).
func newRegistry(c ...prometheus.Collector) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(c...)
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

func handler(r *prometheus.Registry) http.Handler {
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4})
}
