// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/port"
)

// HostSnapshot is what a host peer counts, as it stands. All counts are since
// its start, but for what is said to be now.
type HostSnapshot struct {
	Publications                 map[port.State]int // now
	OpenTCP, OpenUDP, Listeners  int                // now
	Connected, Lost              int                // guests now
	OK, Refused, Unlinked        uint64             // flows
	OverLimit                    uint64
	DatagramsDropped, UDPEvicted uint64
	ToGuest, ToHost              uint64 // payload bytes
	Snapshots, Changes, Resyncs  uint64
	Conflicts, ListenFailures    uint64
}

// hostFamilies declares what a host peer exports.
type hostFamilies struct {
	set
	build, publications, listeners, open, flows, bytes, lost, updates, guests, attempts *Family
}

func declareHost() *hostFamilies {
	var f hostFamilies
	f.build = f.declareBuild()
	f.publications = f.gauge("host_publications", "Publications of all guests now, by state: the best of their outcomes.",
		Label{"state", stateValues})
	f.listeners = f.gauge("host_listeners", "Host ports open now.")
	f.guests = f.gauge("host_guests", "Guests now.", Label{"state", "`connected`, `lost`"})
	f.attempts = f.counter("host_listen_errors_total", "Attempts to open a host port that failed.",
		Label{"reason", "`conflict`: somebody else has it; `error`"})
	f.open = f.gauge("host_flows_open", "Flows open now.", Label{"protocol", "`tcp`, `udp`"})
	f.flows = f.counter("host_flows_total", "Flows that clients asked for; every result but `ok` is an error.",
		Label{"result", "`ok`, `refused` by the guest, `unlinked`: no link to it, `limit`"})
	f.bytes = f.counter("host_flow_bytes_total", "Payload bytes carried.", Label{"direction", "`to_guest`, `to_host`"})
	f.lost = f.counter("host_udp_lost_total", "What was let go for want of room.",
		Label{"kind", "`datagram`, `client` that was quiet longest"})
	f.updates = f.counter("host_link_updates_total", "What guests said, and what was asked of them.",
		Label{"kind", "`snapshot` applied, `change` applied, `resync` asked for"})
	return &f
}

type hostCollector struct {
	families *hostFamilies
	read     func() HostSnapshot
}

// NewHost returns what answers scrapes of a host peer. read is called at each.
func NewHost(read func() HostSnapshot) http.Handler {
	return handler(newRegistry(hostCollector{declareHost(), read}))
}

func (c hostCollector) Describe(ch chan<- *prometheus.Desc) { c.families.Describe(ch) }

func (c hostCollector) Collect(ch chan<- prometheus.Metric) {
	f, s, to := c.families, c.read(), sender(ch)
	to.build(f.build)
	for _, st := range states {
		to.send(f.publications, number(s.Publications[st]), st.String())
	}
	to.send(f.listeners, number(s.Listeners))
	to.send(f.guests, number(s.Connected), "connected")
	to.send(f.guests, number(s.Lost), "lost")
	to.send(f.attempts, number(s.Conflicts), "conflict")
	to.send(f.attempts, number(s.ListenFailures), "error")
	to.send(f.open, number(s.OpenTCP), "tcp")
	to.send(f.open, number(s.OpenUDP), "udp")
	to.send(f.flows, number(s.OK), "ok")
	to.send(f.flows, number(s.Refused), "refused")
	to.send(f.flows, number(s.Unlinked), "unlinked")
	to.send(f.flows, number(s.OverLimit), "limit")
	to.send(f.bytes, number(s.ToGuest), "to_guest")
	to.send(f.bytes, number(s.ToHost), "to_host")
	to.send(f.lost, number(s.DatagramsDropped), "datagram")
	to.send(f.lost, number(s.UDPEvicted), "client")
	to.send(f.updates, number(s.Snapshots), "snapshot")
	to.send(f.updates, number(s.Changes), "change")
	to.send(f.updates, number(s.Resyncs), "resync")
}
