// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// What decides when no rule does and nothing is held.
var (
	defaultAllow = port.RuleRef{Kind: port.RuleDefault}
	hostDefault  = port.RuleRef{Kind: port.RuleDefault, OnHost: true}
)

// held returns why a default denies p unless a rule names its port, no reason if none does. A
// port that a container or Service declares is named by that.
func held(p *port.Publication) port.Reason {
	if !declared(p) {
		switch {
		case p.Protocol == port.UDP && wellKnownUDP(p.Port):
			return port.Because(port.WellKnownUDP)
		case slices.ContainsFunc(engineInternals, func(e engineInternal) bool { return e.matches(p) }):
			return port.Because(port.EnginesOwn)
		}
	}
	return withheld(p.Origins)
}

// defaultOf returns the default that denies for a reason.
func defaultOf(r port.Reason) port.RuleRef {
	switch r.Code() {
	case port.WellKnownUDP:
		return port.RuleRef{Kind: port.RuleUDP}
	case port.EnginesOwn, port.OwnerAwaited:
		return port.RuleRef{Kind: port.RuleEngine}
	}
	return port.RuleRef{Kind: port.RuleWithheld}
}

// declared reports whether somebody asked an engine for the port, or us for it by name.
func declared(p *port.Publication) bool {
	for s := range p.Sources() {
		switch port.Family(s) {
		case "docker", "podman", "containerd", "kube", port.SourceDemand:
			return true
		}
	}
	return false
}

func wellKnownUDP(n uint16) bool {
	switch n {
	case 53, 67, 68, 123, 137, 138, 323: // DNS, DHCP, NTP, NetBIOS, chrony
		return true
	case 546, 547, 1900, 3702, 5353, 5355: // DHCPv6, SSDP, WS-Discovery, mDNS, LLMNR
		return true
	}
	return false
}

// mayBeHeld reports whether [port.EnginesOwn] would deny p with another owner than it
// has, while that is pending.
func mayBeHeld(p *port.Publication) bool {
	return p.OwnerPending && !declared(p) && slices.ContainsFunc(engineInternals, func(e engineInternal) bool { return e.mayMatch(p) })
}

// engineInternal are ports of an engine that nobody asked for.
type engineInternal struct {
	owner    string // the name of the process, "" is an unknown one
	ports    []PortRange
	protocol port.Protocol // 0 is any
	loopback bool          // only there
	pods     bool          // also of pods that begin with this name, in kube-system
}

var engineInternals = []engineInternal{
	{owner: "etcd", ports: []PortRange{{2379, 2382}}, pods: true},
	{owner: "kube-controller", ports: []PortRange{{10252, 10252}, {10257, 10257}}, pods: true},
	{owner: "kube-scheduler", ports: []PortRange{{10251, 10251}, {10259, 10259}}, pods: true},
	{owner: "kube-proxy", ports: []PortRange{{10249, 10249}, {10256, 10256}}, pods: true},
	{owner: "kubelet", ports: []PortRange{{10248, 10248}, {10250, 10250}, {10255, 10255}}},
	{owner: "kubelet", ports: []PortRange{{32768, 65535}}, loopback: true},
	{owner: "k3s", ports: []PortRange{{2379, 2382}, {6444, 6444}, {10248, 10259}}},
	{owner: "rke2", ports: []PortRange{{2379, 2382}, {6444, 6444}, {10248, 10259}}},
	{owner: "containerd", ports: []PortRange{{32768, 65535}}, loopback: true}, // streams of the CRI
	{owner: "dockerd", ports: []PortRange{{2377, 2377}, {7946, 7946}, {4789, 4789}}},
	{owner: "dockerd", ports: []PortRange{{32768, 65535}}, loopback: true},
	{owner: "", ports: []PortRange{{4789, 4789}, {8472, 8472}}, protocol: port.UDP}, // the kernel's VXLAN sockets
}

func (e engineInternal) matches(p *port.Publication) bool {
	if !e.hasPort(p) {
		return false
	}
	switch o := p.Owner; o.Kind {
	case port.OwnerProcess:
		return !p.Contained && e.owner != "" && e.process(o.Name)
	case port.OwnerContainer:
		return e.pods && o.Namespace == "kube-system" && strings.HasPrefix(o.Name, e.owner)
	case port.OwnerUnknown:
		return e.owner == "" && !p.OwnerPending && !p.Contained
	}
	return false
}

// mayMatch reports whether e matches p with the owner that an engine, or a search for
// the process, may name.
func (e engineInternal) mayMatch(p *port.Publication) bool {
	if !e.hasPort(p) {
		return false
	}
	if p.Owner.Kind == port.OwnerUnknown && !p.Contained && slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool { return o.Source == port.SourceSocket }) {
		return true
	}
	return e.pods && p.Owner.Kind < port.OwnerService
}

func (e engineInternal) hasPort(p *port.Publication) bool {
	return (e.protocol == 0 || e.protocol == p.Protocol) && (!e.loopback || p.Address.IsLoopback()) &&
		slices.ContainsFunc(e.ports, func(r PortRange) bool { return r.First <= p.Port && p.Port <= r.Last })
}

// process reports whether a process of that name is the engine. k3s and RKE2 add what
// they run as: "k3s-server".
func (e engineInternal) process(name string) bool {
	if e.owner == "k3s" || e.owner == "rke2" {
		name, _, _ = strings.Cut(name, "-")
	}
	return name == e.owner
}

// withheld returns why all origins withhold the port, no reason if one does not.
func withheld(origins []port.OriginInfo) port.Reason {
	reasons := make([]port.Reason, len(origins))
	for i := range origins {
		if reasons[i] = origins[i].Withheld; reasons[i].IsZero() {
			return port.Reason{}
		}
	}
	return port.Join(reasons...)
}
