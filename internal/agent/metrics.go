// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/build"
	"github.com/fairlead/fairlead/internal/port"
)

const namespace = "fairlead"

// metrics is what the agent exports. Labels are bounded sets: never a port, an
// address or a pid.
type metrics struct {
	registry    *prometheus.Registry
	propagation *prometheus.HistogramVec
}

// propagationBuckets run from 50 µs to 6.5 s, each four times the one before it.
var propagationBuckets = prometheus.ExponentialBuckets(50e-6, 4, 9)

func newMetrics(a *Agent) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		propagation: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: "propagation_seconds",
			Help:                        "Time from the kernel's event to the sink's acknowledgement.",
			Buckets:                     propagationBuckets,
			NativeHistogramBucketFactor: 1.1,
		}, []string{"sink"}),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: namespace, Name: "build_info", Help: "1, with what the binary was built from.",
		ConstLabels: prometheus.Labels{"version": build.Version(), "goversion": goVersion()},
	})
	info.Set(1)
	m.registry.MustRegister(m.propagation, info, collector{a})
	return m
}

func goVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.GoVersion
	}
	return "unknown"
}

// synced notes how long the kernel's event of p took to be acknowledged.
func (m *metrics) synced(sink string, p port.Publication) {
	if p.Observed == 0 {
		return
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return
	}
	m.propagation.WithLabelValues(sink).Observe(time.Duration(now.Nano() - p.Observed).Seconds())
}

// collector reads what the rooms count themselves.
type collector struct{ a *Agent }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

var (
	descPublications = desc("publications", "Publications by their state: the best of what the sinks say.", "state")
	descGeneration   = desc("generation", "Number of changes of the merged table.")
	descSource       = desc("source_up", "1 if the source is live, 0 if what it says may be old.", "source")
	descEvents       = desc("observer_events_total", "Kernel events read.")
	descDrops        = desc("observer_drops_total", "Kernel events lost; each loss forces a dump.")
	descMalformed    = desc("observer_malformed_total", "Kernel events that could not be decoded.")
	descResyncs      = desc("observer_resyncs_total", "Dumps forced by a loss.")
	descDrift        = desc("observer_drift_total", "Sockets that a background dump had to put right.")
	descDumps        = desc("observer_dumps_total", "Socket dumps, by result.", "result")
	descDumpSeconds  = desc("observer_dump_seconds_total", "Time spent in socket dumps.")
	descSockets      = desc("observer_sockets", "Sockets known now.")
)

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descPublications, descGeneration, descSource, descEvents, descDrops, descMalformed,
		descResyncs, descDrift, descDumps, descDumpSeconds, descSockets,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	l := c.a.provider.List()
	states := map[port.State]int{port.Active: 0, port.Pending: 0, port.Conflict: 0, port.Failed: 0, port.Denied: 0}
	for _, p := range l.Publications {
		states[p.State]++
	}
	for s, n := range states {
		gauge(descPublications, float64(n), s.String())
	}
	gauge(descGeneration, float64(l.Generation))
	for _, s := range l.Sources {
		up := 0.0
		if s.State == "live" {
			up = 1
		}
		gauge(descSource, up, s.Name)
	}
	s := c.a.observer.Stats()
	counter(descEvents, float64(s.Events))
	counter(descDrops, float64(s.Drops))
	counter(descMalformed, float64(s.Malformed))
	counter(descResyncs, float64(s.Resyncs))
	counter(descDrift, float64(s.Drift))
	counter(descDumps, float64(s.Dumps), "ok")
	counter(descDumps, float64(s.DumpFailures), "failed")
	counter(descDumpSeconds, s.DumpTime.Seconds())
	gauge(descSockets, float64(s.Sockets))
}
