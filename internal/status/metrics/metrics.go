// SPDX-License-Identifier: Apache-2.0

// Package metrics exports the counters of agent and host to Prometheus. A metric is
// declared once, where its counter lives, by tags of the field that holds it:
//
//	Dumps    uint64 `metric:"observer_dumps_total" label:"result=ok" help:"Socket dumps."`
//	Failures uint64 `metric:"observer_dumps_total" label:"result=failed"`
//
// docs/metrics.md is generated from the tags; see [Families] for their syntax. Every
// label has a fixed set of values: never a port, an address, a process or a name from
// a guest. Nothing runs between scrapes.
package metrics

import (
	"net/http"
	"reflect"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/status/version"
)

// exported is what a program exports of its own.
type exported[S any] struct {
	Build  map[string]string `metric:"build_info" label:"version: of fairlead" value:"goversion: of the compiler" help:"1, labelled with the version of the program and of the compiler."`
	Counts S                 `metric:"*"`
}

// collector sends the metrics of what read returns.
type collector[S any] struct {
	families []*Family
	send     step
	build    map[string]string
	read     func() S
}

// Handler answers scrapes with the metrics of what read returns, a struct with the
// tags of [Families], and those of the Go runtime (go_*) and of the process
// (process_*). read is called at each scrape. Handler panics if the tags are wrong.
func Handler[S any](read func() S) http.Handler {
	c := &collector[S]{build: map[string]string{version.String(): goVersion()}, read: read}
	c.families, c.send = compile(reflect.TypeFor[exported[S]]())
	r := prometheus.NewRegistry()
	r.MustRegister(c, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4})
}

// Describe implements prometheus.Collector.
func (c *collector[S]) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range c.families {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector[S]) Collect(ch chan<- prometheus.Metric) {
	c.send(ch, reflect.ValueOf(exported[S]{c.build, c.read()}), nil)
}

func goVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.GoVersion
	}
	return "unknown"
}
