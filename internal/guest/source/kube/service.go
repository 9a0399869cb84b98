// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/guest/source/kube/object"
	"github.com/fairlead/fairlead/internal/port"
)

// maxPods bounds how many pods a port is tried at directly.
const maxPods = 3

// protocolTCP is the protocol of a port that names none.
const protocolTCP = "TCP"

// service is what a port needs of a Service.
type service struct {
	namespace, name string
	labels          map[string]string
	open            bool         // it has node ports
	clusterIPs      []netip.Addr // valid ones; none if headless
	families        []bool       // is IPv4, in order of preference
	ingress         []netip.Addr // of the load balancer
	external        []netip.Addr
	ranges          []string // the load balancer's clients are limited to these
	ports           []servicePort
	bad             []string // what cannot be read
}

type servicePort struct {
	name     string
	protocol string
	port     int32
	nodePort int32
}

func (s service) id() string { return s.namespace + "/" + s.name }

func (s service) owner(cluster string) port.Owner {
	return port.Owner{Kind: port.OwnerService, ID: s.id(), Name: s.name, Namespace: s.namespace, Cluster: cluster, Labels: s.labels}
}

// compact takes out of a Service what a port needs; the rest can go.
func compact(o *object.Service) service {
	s := service{namespace: o.Namespace, name: o.Name}
	switch o.Spec.Type {
	case object.NodePort, object.LoadBalancer:
		s.open = true
	case object.ExternalName:
		return s
	}
	s.labels = engine.Labels(o.Labels, "kubectl.kubernetes.io/")
	for k, v := range o.Annotations { // what a Service asks for has values that labels cannot have
		if strings.HasPrefix(k, port.LabelPrefix) {
			if s.labels == nil {
				s.labels = make(map[string]string)
			}
			s.labels[k] = v
		}
	}
	addrs := func(what string, all []string) (out []netip.Addr) {
		for _, a := range all {
			ip, err := netip.ParseAddr(a)
			if ip = ip.Unmap(); err != nil || neverOfACluster(ip) {
				s.bad = append(s.bad, fmt.Sprintf("service %q: %s %q is no address of a Service", s.id(), what, a))
				continue
			}
			out = append(out, ip)
		}
		return out
	}
	ips := o.Spec.ClusterIPs
	if len(ips) == 0 && o.Spec.ClusterIP != "" {
		ips = []string{o.Spec.ClusterIP}
	}
	if !slices.Contains(ips, object.NoClusterIP) {
		s.clusterIPs = addrs("cluster IP", ips)
	}
	for _, f := range o.Spec.IPFamilies {
		s.families = append(s.families, f == object.IPv4)
	}
	if len(s.families) == 0 {
		for _, ip := range s.clusterIPs {
			s.families = append(s.families, ip.Is4())
		}
	}
	if len(s.families) == 0 {
		s.families = []bool{true}
	}
	s.external = addrs("external IP", o.Spec.ExternalIPs)
	if o.Spec.Type == object.LoadBalancer {
		for _, in := range o.Status.LoadBalancer.Ingress {
			if in.IP != "" { // a name is not this node's to answer for
				s.ingress = append(s.ingress, addrs("load balancer address", []string{in.IP})...)
			}
		}
		for _, r := range o.Spec.LoadBalancerSourceRanges {
			if r = strings.TrimSpace(r); r != "0.0.0.0/0" && r != "::/0" {
				s.ranges = append(s.ranges, r)
			}
		}
	}
	for _, p := range o.Spec.Ports {
		s.ports = append(s.ports, servicePort{
			name: p.Name, protocol: cmp.Or(p.Protocol, protocolTCP), port: p.Port, nodePort: p.NodePort,
		})
	}
	return s
}

// neverOfACluster reports whether a cluster gives an address to no Service. A server that
// names one may want it dialled, or its port in place of the guest's own: the guest's loopback,
// or a cloud's metadata.
func neverOfACluster(a netip.Addr) bool {
	return a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified()
}

// endpoints is what is needed of an EndpointSlice.
type endpoints struct {
	id        string // of its Service; "" has the slice left out
	name      string
	ports     []slicePort
	addresses []netip.Addr           // that serve
	facts     map[string]engine.Fact // of its pods, until they are reported
	objects   []string               // facts that were reported
}

type slicePort struct {
	name     string
	protocol string
	port     int32
}

// serviceOf returns the Service that a slice is of, or "".
func serviceOf(o *object.EndpointSlice) string {
	name := o.Labels[object.LabelService]
	if name == "" || o.AddressType == object.FQDN {
		return ""
	}
	return o.Namespace + "/" + name
}

// compactSlice takes out of an EndpointSlice what is needed; the rest can go.
func compactSlice(o *object.EndpointSlice) endpoints {
	e := endpoints{id: serviceOf(o), name: o.Namespace + "/" + o.Name}
	if e.id == "" {
		return e
	}
	for _, p := range o.Ports {
		sp := slicePort{protocol: protocolTCP}
		if p.Name != nil {
			sp.name = *p.Name
		}
		if p.Protocol != nil {
			sp.protocol = *p.Protocol
		}
		if p.Port != nil {
			sp.port = *p.Port
		}
		e.ports = append(e.ports, sp)
	}
	for _, ep := range o.Endpoints {
		// An absent condition counts as true.
		if c := ep.Conditions; c.Ready != nil && !*c.Ready && (c.Serving == nil || !*c.Serving) {
			continue
		}
		for _, a := range ep.Addresses {
			if ip, err := netip.ParseAddr(a); err == nil && !ip.IsLinkLocalUnicast() && !ip.IsMulticast() {
				e.addresses = append(e.addresses, ip.Unmap())
			}
		}
	}
	e.facts = podFacts(e.name, o)
	return e
}

// podFacts returns which pods have the addresses of a slice.
func podFacts(slice string, o *object.EndpointSlice) map[string]engine.Fact {
	facts := make(map[string]engine.Fact)
	for _, ep := range o.Endpoints {
		ref := ep.TargetRef
		if ref == nil || ref.Kind != "Pod" || ref.Name == "" {
			continue
		}
		ns := cmp.Or(ref.Namespace, o.Namespace)
		for _, a := range ep.Addresses {
			ip, err := netip.ParseAddr(a)
			if err != nil {
				continue
			}
			facts[slice+" "+a] = engine.Fact{
				Owner:     port.Owner{Kind: port.OwnerContainer, ID: ns + "/" + ref.Name, Name: ref.Name, Namespace: ns},
				Addresses: []netip.Addr{ip.Unmap()},
			}
		}
	}
	return facts
}

// declare makes the bindings of a Service of a cluster, sorted by origin. What nothing serves
// has no dial target, if the endpoints are known.
func (s service) declare(cluster string, serving []endpoints, known bool) (bindings []port.Binding, warnings []string) {
	owner := s.owner(cluster)
	warnings = slices.Clone(s.bad)
	if !s.open && len(s.external) == 0 {
		return nil, warnings // only the cluster reaches it
	}
	for _, p := range s.ports {
		text := fmt.Sprintf("%s port %d/%s", s.id(), p.port, strings.ToLower(p.protocol))
		if p.name != "" {
			text += " (" + p.name + ")"
		}
		proto, err := port.ParseProtocol(p.protocol)
		if err != nil {
			if s.open && p.nodePort != 0 || len(s.ingress)+len(s.external) > 0 {
				warnings = append(warnings, fmt.Sprintf("service %q: port %d/%s is not supported, only tcp and udp are published", s.id(), p.port, strings.ToLower(p.protocol)))
			}
			continue
		}
		if p.port < 1 || p.port > 65535 || p.nodePort < 0 || p.nodePort > 65535 {
			warnings = append(warnings, fmt.Sprintf("service %q: port %d, node port %d: want 1 to 65535", s.id(), p.port, p.nodePort))
			continue
		}
		pods, served := s.pods(p, serving)
		served = served || !known
		add := func(kind string, addr netip.Addr, number int32, own netip.Addr, withheld port.Reason) {
			b := port.Binding{
				Key:      port.Key{Protocol: proto, Address: addr, Port: uint16(number)},
				Origin:   port.Origin{ID: s.id() + "/" + kind + "/" + proto.String() + "/" + netip.AddrPortFrom(addr, uint16(number)).String()},
				Owner:    owner,
				Detail:   port.NewDetail(text + ", " + kind),
				Withheld: withheld,
			}
			if !served {
				b.Detail = port.NewDetail(text + ", " + kind + ": nothing serves this, it has no ready endpoints")
				bindings = append(bindings, b)
				return
			}
			// The cluster's own address answers in each mode of kube-proxy; a
			// node port on loopback only in some.
			for _, ip := range s.clusterIPs {
				if ip.Is4() == addr.Is4() && withheld.IsZero() {
					b.Dial = append(b.Dial, netip.AddrPortFrom(ip, uint16(p.port)))
				}
			}
			b.Dial = append(b.Dial, netip.AddrPortFrom(own, uint16(number)))
			for _, pod := range pods {
				if pod.Addr().Is4() == addr.Is4() && withheld.IsZero() {
					b.Dial = append(b.Dial, pod)
				}
			}
			bindings = append(bindings, b)
		}
		if s.open && p.nodePort != 0 {
			for _, v4 := range s.families {
				any := netip.IPv6Unspecified()
				if v4 {
					any = netip.IPv4Unspecified()
				}
				add("node port", any, p.nodePort, port.Loopback(any), port.Reason{})
			}
		}
		var withheld port.Reason
		if len(s.ranges) > 0 {
			withheld = port.Because(port.FromSources, strings.Join(s.ranges, ", "))
		}
		for _, ip := range s.ingress {
			add("load balancer", ip, p.port, ip, withheld)
		}
		for _, ip := range s.external {
			add("external IP", ip, p.port, ip, port.Reason{})
		}
	}
	slices.SortFunc(bindings, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	bindings = slices.CompactFunc(bindings, func(a, b port.Binding) bool { return a.Origin == b.Origin })
	return bindings, warnings
}

// pods returns a few places where a port is served, and whether it is at all.
func (s service) pods(p servicePort, serving []endpoints) (pods []netip.AddrPort, served bool) {
	for _, e := range serving {
		for _, sp := range e.ports {
			if sp.name != p.name || sp.protocol != p.protocol || len(e.addresses) == 0 {
				continue
			}
			served = true
			for _, a := range e.addresses {
				if len(pods) < maxPods && sp.port > 0 && sp.port <= 65535 {
					pods = append(pods, netip.AddrPortFrom(a, uint16(sp.port)))
				}
			}
		}
	}
	slices.SortFunc(pods, netip.AddrPort.Compare)
	return slices.Compact(pods), served
}
