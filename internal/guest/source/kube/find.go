// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Find returns the pods or the Service that a demand names. A Service is reached at its
// cluster's addresses, and at a few of its endpoints.
func (s *Source) Find(d port.Demand) []engine.Found {
	if !d.Service {
		return s.facts.Find(d)
	}
	if st := s.state.Load(); st != nil {
		return st.find(d)
	}
	return nil
}

// Watch returns a signal that is notified after each change of what Find returns.
func (s *Source) Watch() schedule.Signal { return s.facts.Watch() }

func (st *state) find(d port.Demand) []engine.Found {
	st.mu.Lock()
	defer st.mu.Unlock()
	id := d.Scope + "/" + d.Name
	s, ok := st.services[id]
	if !ok {
		return nil
	}
	f := engine.Found{Owner: s.owner(st.cluster)}
	i := slices.IndexFunc(s.ports, func(p servicePort) bool {
		return p.port == int32(d.Port) && strings.EqualFold(p.protocol, d.Protocol.String())
	})
	if i < 0 {
		f.Reason = port.Because(port.ServiceLacksPort, id, d.Slot.String(), s.portList())
		return []engine.Found{f}
	}
	pods, served := s.pods(s.ports[i], st.slices[id])
	pods = slices.DeleteFunc(pods, func(a netip.AddrPort) bool { return neverOfACluster(a.Addr()) })
	known := !st.unknown[s.namespace] && !st.unknown[""]
	if known && !served {
		f.Reason = port.Because(port.ServiceIdle, id, d.Slot.String())
		return []engine.Found{f}
	}
	for _, ip := range s.clusterIPs {
		f.Dial = append(f.Dial, netip.AddrPortFrom(ip, d.Port))
	}
	f.Dial, f.Targets = append(f.Dial, pods...), pods
	if len(f.Dial) == 0 {
		f.Reason = port.Because(port.ServiceUnread, id)
	}
	return []engine.Found{f}
}

// portList names the ports of a Service, for an error.
func (s service) portList() string {
	if len(s.ports) == 0 {
		return ": it leads to a name, or has none"
	}
	var list []string
	for _, p := range s.ports[:min(len(s.ports), 8)] {
		list = append(list, fmt.Sprintf("%d/%s", p.port, strings.ToLower(p.protocol)))
	}
	return "; it has " + strings.Join(list, ", ")
}
