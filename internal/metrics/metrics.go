// SPDX-License-Identifier: Apache-2.0

// Package metrics exports the counters of agent and host to Prometheus. Every family
// is declared once, here; docs/metrics.md is generated from the declarations. Every
// label has a fixed set of values: never a port, an address, a process or a name from
// a guest. A scrape reads the counters that other packages keep; nothing runs between
// scrapes.
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

// Label is a label with a human-readable list of its values.
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

// Describe implements the half of prometheus.Collector that all sets share.
// Histograms are collectors of their own and are registered separately.
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

// declareBuild declares the family with the versions of program and compiler.
func (s *set) declareBuild() *Family {
	return s.gauge("build_info", "1, labelled with the version of the program and of the compiler.",
		Label{"version", "of fairlead"}, Label{"goversion", "of the compiler"})
}

func (s sender) build(f *Family) { s.send(f, 1, version.String(), goVersion()) }

func goVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.GoVersion
	}
	return "unknown"
}

// newRegistry returns a new registry with c and the collectors of the Go runtime
// (go_*) and of the process (process_*).
func newRegistry(c ...prometheus.Collector) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(c...)
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

func handler(r *prometheus.Registry) http.Handler {
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4})
}
