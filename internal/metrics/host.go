// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/port"
)

// HostSnapshot holds the counters of a host peer. They count from its start, except
// those marked "now".
type HostSnapshot struct {
	Publications                 map[port.State]int // now
	OpenTCP, OpenUDP, Listeners  int                // now
	Connected, Lost              int                // guests now
	OK, Refused, Disconnected    uint64             // flows
	OverLimit, OutOfDescriptors  uint64
	DatagramsDropped, UDPEvicted uint64
	ToGuest, ToHost              uint64 // payload bytes
	Snapshots, Changes, Resyncs  uint64
	Conflicts, ListenFailures    uint64
	Names                        map[string]uint64 // requests and TLS connections by name, by result
	NamesHTTP, NamesTLS          int               // connections now
}

// hostFamilies declares the metrics of a host peer.
type hostFamilies struct {
	set
	build, publications, listeners, open, flows, bytes, dropped, updates, guests, attempts, named, namedOpen *Family
}

func declareHost() *hostFamilies {
	var f hostFamilies
	f.build = f.declareBuild()
	f.publications = f.gauge("host_publications", "Current publications of all guests by state, which is the best of their outcomes.",
		Label{"state", stateValues})
	f.listeners = f.gauge("host_listeners", "Currently open host ports.")
	f.guests = f.gauge("host_guests", "Configured guests by state.", Label{"state", "`connected`, `lost`"})
	f.attempts = f.counter("host_listen_errors_total", "Failed attempts to open a host port.",
		Label{"reason", "`conflict`: in use by another program; `error`"})
	f.open = f.gauge("host_flows_open", "Currently open flows.", Label{"protocol", "`tcp`, `udp`"})
	f.flows = f.counter("host_flows_total", "Flows by result. Every result except `ok` is an error.",
		Label{"result", "`ok`, `refused` by the guest, `disconnected`: the guest was, `limit`, `descriptors`: too few were left"})
	f.bytes = f.counter("host_flow_bytes_total", "Payload bytes forwarded.", Label{"direction", "`to_guest`, `to_host`"})
	f.dropped = f.counter("host_udp_dropped_total", "UDP datagrams and clients dropped because a limit was reached.",
		Label{"kind", "`datagram`, `client` that was idle longest"})
	f.updates = f.counter("host_link_updates_total", "Updates received from guests, and resyncs requested of them.",
		Label{"kind", "`snapshot` applied, `change` applied, `resync` requested"})
	f.named = f.counter("host_names_total", "HTTP requests and TLS connections by the names of owners, by result.",
		Label{"result", "`ok`; `unknown`: nobody has the name, or it needs a port; `ambiguous`: several have it; `foreign`: outside the domain; " +
			"`failed`: the port could not be reached; `invalid`: no TLS with a name in time; `page`: the list of names"})
	f.namedOpen = f.gauge("host_names_connections", "Currently open connections to the listeners of names.", Label{"protocol", "`http`, `tls`"})
	return &f
}

type hostCollector struct {
	families *hostFamilies
	read     func() HostSnapshot
}

// NewHost returns the handler for scrapes of a host peer. read is called at each scrape.
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
	to.send(f.flows, number(s.Disconnected), "disconnected")
	to.send(f.flows, number(s.OverLimit), "limit")
	to.send(f.flows, number(s.OutOfDescriptors), "descriptors")
	to.send(f.bytes, number(s.ToGuest), "to_guest")
	to.send(f.bytes, number(s.ToHost), "to_host")
	to.send(f.dropped, number(s.DatagramsDropped), "datagram")
	to.send(f.dropped, number(s.UDPEvicted), "client")
	to.send(f.updates, number(s.Snapshots), "snapshot")
	to.send(f.updates, number(s.Changes), "change")
	to.send(f.updates, number(s.Resyncs), "resync")
	for result, n := range s.Names {
		to.send(f.named, number(n), result)
	}
	if s.Names != nil {
		to.send(f.namedOpen, number(s.NamesHTTP), "http")
		to.send(f.namedOpen, number(s.NamesTLS), "tls")
	}
}
