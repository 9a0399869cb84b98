// SPDX-License-Identifier: Apache-2.0

package port

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// SourceDemand is the source of ports that nobody published and that a user asked for.
const SourceDemand = "demand"

// Demand names a port of a container or of a Service of Kubernetes that somebody asks for,
// published or not. The zero value is none. It is comparable.
type Demand struct {
	Slot // of the container or of the Service, never of this machine

	// Service says that it is a Service; else it is a container.
	Service bool
	// Scope is the namespace; of a container it may also be the Compose project, with a name
	// that is the Compose service. Empty is any, of containers only.
	Scope string
	// Name is the container's or the Service's.
	Name string
}

// Longest names in a Demand, in bytes. Kubernetes has the longest: 253.
const (
	maxDemandScope = 128
	maxDemandName  = 253
)

// wantDemand is what ParseDemand reads.
const wantDemand = "want CONTAINER:PORT, PROJECT/SERVICE:PORT, NAMESPACE/POD:PORT or svc/NAMESPACE/NAME:PORT, with /udp for UDP"

// serviceWord begins the text of a Demand for a Service.
const serviceWord = "svc"

// ParseDemand reads what String returns; /tcp may be left out.
func ParseDemand(s string) (d Demand, err error) {
	bad := func(why string) (Demand, error) { return Demand{}, fmt.Errorf("%q: %s: %s", s, why, wantDemand) }
	owner, at, ok := cutLast(s, ":")
	if !ok {
		return bad("no port")
	}
	number, protocol, named := strings.Cut(at, "/")
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 || number[0] == '+' || number[0] == '0' {
		return bad(fmt.Sprintf("port %q is not from 1 to 65535", number))
	}
	d.Slot = Slot{TCP, uint16(n)}
	if named {
		switch protocol {
		case "tcp":
		case "udp":
			d.Protocol = UDP
		default:
			return bad(fmt.Sprintf("protocol %q is not tcp or udp", protocol))
		}
	}
	parts := strings.Split(owner, "/")
	switch _, err := strconv.ParseUint(owner, 10, 16); {
	case err == nil || IsAddress(owner):
		return bad(owner + " is a port or an address, and no name")
	case parts[0] == serviceWord && len(parts) == 3:
		d.Service, d.Scope, d.Name = true, parts[1], parts[2]
	case parts[0] == serviceWord && len(parts) > 1:
		return bad("a Service has a namespace and a name")
	case len(parts) == 2:
		d.Scope, d.Name = parts[0], parts[1]
	case len(parts) == 1:
		d.Name = parts[0]
	default:
		return bad("too many names")
	}
	if !demandName(d.Name, maxDemandName) || len(parts) > 1 && !demandName(d.Scope, maxDemandScope) {
		return bad("a name has letters, digits, '.', '_' and '-' alone, and is not too long")
	}
	return d, nil
}

// IsAddress reports whether s is localhost or an IP address, which a URL has in brackets.
func IsAddress(s string) bool {
	_, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"))
	return err == nil || strings.EqualFold(s, "localhost")
}

func cutLast(s, sep string) (before, after string, ok bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// demandName reports whether s can be the name of a container, Service, project or namespace.
func demandName(s string, most int) bool {
	return s != "" && len(s) <= most && !strings.ContainsFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-')
	})
}

// IsZero reports whether it is none.
func (d Demand) IsZero() bool { return d == Demand{} }

// Owner returns the text without the port: "web", "shop/web", "svc/default/web".
func (d Demand) Owner() string {
	s := d.Name
	if d.Scope != "" {
		s = d.Scope + "/" + s
	}
	if d.Service {
		s = serviceWord + "/" + s
	}
	return s
}

// String returns for example "web:80/tcp", "shop/web:53/udp" or "svc/default/web:80/tcp", and
// "" for the zero value.
func (d Demand) String() string {
	if d.IsZero() {
		return ""
	}
	return d.Owner() + ":" + d.Slot.String()
}
