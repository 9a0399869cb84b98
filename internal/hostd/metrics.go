// SPDX-License-Identifier: Apache-2.0

package hostd

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/build"
	"github.com/fairlead/fairlead/internal/host"
)

func metricsHandler(h *host.Host) http.Handler {
	reg := prometheus.NewRegistry()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: "fairlead", Name: "build_info", Help: "1, with what the binary was built from.",
		ConstLabels: prometheus.Labels{"version": build.Version()},
	})
	info.Set(1)
	reg.MustRegister(info, newCollector(h))
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
}

// collector reads what the host counts itself.
type collector struct {
	host *host.Host

	listeners, open, flows, bytes, control, guests, listens, dropped, evicted *prometheus.Desc
}

func newCollector(h *host.Host) collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("fairlead_host_"+name, help, labels, nil)
	}
	return collector{
		host:      h,
		listeners: desc("listeners", "Host ports open now."),
		open:      desc("open_flows", "Flows open now.", "protocol"),
		flows:     desc("flows_total", "Flows by result.", "result"),
		bytes:     desc("bytes_total", "Payload bytes carried.", "direction"),
		control:   desc("control_messages_total", "Control messages by kind.", "kind"),
		guests:    desc("guests", "Guests by state.", "state"),
		listens:   desc("failed_listens_total", "Attempts to listen that failed, by reason.", "reason"),
		dropped:   desc("dropped_datagrams_total", "Datagrams dropped for want of room."),
		evicted:   desc("evicted_udp_clients_total", "UDP clients that made room for others."),
	}
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.listeners, c.open, c.flows, c.bytes, c.control, c.guests, c.listens, c.dropped, c.evicted} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	s := c.host.Stats()
	gauge(c.listeners, s.Listeners)
	gauge(c.open, s.OpenTCP, "tcp")
	gauge(c.open, s.OpenUDP, "udp")
	counter(c.flows, s.OK, "ok")
	counter(c.flows, s.Refused, "refused")
	counter(c.flows, s.Unlinked, "unlinked")
	counter(c.flows, s.OverLimit, "limit")
	counter(c.bytes, s.ToGuest, "to_guest")
	counter(c.bytes, s.ToHost, "to_host")
	counter(c.control, s.Snapshots, "snapshot")
	counter(c.control, s.Changes, "change")
	counter(c.control, s.Resyncs, "resync")
	counter(c.listens, s.Conflicts, "conflict")
	counter(c.listens, s.ListenFailures, "other")
	counter(c.dropped, s.DatagramsDropped)
	counter(c.evicted, s.UDPEvicted)
	connected := 0
	guests := c.host.Guests()
	for _, g := range guests {
		if g.Connected {
			connected++
		}
	}
	gauge(c.guests, connected, "connected")
	gauge(c.guests, len(guests)-connected, "lost")
}
