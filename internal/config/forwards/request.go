// SPDX-License-Identifier: Apache-2.0

// Package forwards keeps the requests that users make while fairlead runs: ports that are
// forwarded, denied, allowed or exposed until that is undone. They are in a file of their
// own, so that they survive restarts and the configuration is never written to.
package forwards

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// Op is what a request does.
type Op string

// The operations. Remove and Hide only undo; the others are kept until they are undone.
const (
	Forward Op = "forward" // forward a port
	Remove  Op = "rm"      // undo all that was requested for a port
	Deny    Op = "deny"    // close what is selected, until Allow
	Allow   Op = "allow"   // undo Deny, or allow what a default denies
	Expose  Op = "expose"  // open a port wider, for a time
	Hide    Op = "hide"    // undo Expose
)

// kept are the operations that are kept, with the kind of the rule that each makes.
var kept = map[Op]port.RuleKind{Forward: port.RuleForward, Deny: port.RuleDeny, Allow: port.RuleAllow, Expose: port.RuleExpose}

// Request is a change. It selects one port, or for Deny and Allow also an owner or all.
// Requests compare with ==.
type Request struct {
	Op       Op            `json:"op"`
	Protocol port.Protocol `json:"protocol,omitzero"`
	Port     uint16        `json:"port,omitempty"`  // of the guest
	Owner    string        `json:"owner,omitempty"` // name of the owner; may be a glob
	All      bool          `json:"all,omitempty"`
	// Demand is a port of a container or Service, published or not, in place of Port: what
	// port.ParseDemand reads. Not of Expose and Hide.
	Demand  string `json:"demand,omitempty"`
	Guest   string `json:"guest,omitempty"`   // on a host: of this guest only; may be a glob
	To      uint16 `json:"to,omitempty"`      // of Forward: the host port; 0 is the guest's
	Bind    string `json:"bind,omitempty"`    // of Forward and Expose: the host address, as a rule's hostAddress
	Seconds int64  `json:"seconds,omitempty"` // of Expose: for how long

	OnConflict string `json:"onConflict,omitempty"` // of Forward, on a host: as a rule's
}

// about is the part of a request that says what it selects.
func (q Request) about() Request {
	return Request{Protocol: q.Protocol, Port: q.Port, Owner: q.Owner, All: q.All, Demand: q.Demand, Guest: q.Guest}
}

// as is a request of another operation that selects the same.
func (q Request) as(op Op) Request {
	q = q.about()
	q.Op = op
	return q
}

// Undo returns the request that undoes one that is kept. A forward is undone together with all
// else that was requested for its port.
func (q Request) Undo() Request {
	return q.as(map[Op]Op{Forward: Remove, Allow: Remove, Deny: Allow, Expose: Hide}[q.Op])
}

// target names what the request selects: "8080/tcp", "web:80/tcp", "owner web", "all".
func (q Request) target() string {
	s := "all"
	switch {
	case q.Demand != "":
		s = q.Demand
	case q.Port != 0:
		s = q.slot().String()
	case q.Owner != "":
		s = "owner " + q.Owner
	}
	if q.Guest != "" {
		s += " of guest " + q.Guest
	}
	return s
}

// String names the request: "forward 8080/tcp".
func (q Request) String() string { return string(q.Op) + " " + q.target() }

// demand is the port that is asked for by name, the zero value if none is.
func (q Request) demand() port.Demand {
	d, _ := port.ParseDemand(q.Demand) // checked reports what is wrong with it
	return d
}

// slot is the port that the request names, the zero value if it names none.
func (q Request) slot() port.Slot {
	if q.Demand != "" {
		return q.demand().Slot
	}
	return port.Slot{Protocol: q.Protocol, Port: q.Port}
}

// Match returns which ports the request selects.
func (q Request) Match() rules.Match {
	m := rules.Match{Demand: q.demand(), Name: q.Owner, Guest: q.Guest}
	if slot := q.slot(); slot.Port != 0 {
		m.Protocol, m.Ports = slot.Protocol, []rules.PortRange{{First: slot.Port, Last: slot.Port}}
	}
	return m
}

// HostAddress returns the host addresses that the request names.
func (q Request) HostAddress() rules.HostAddress {
	if q.Op == Expose && q.Bind == "" {
		return rules.All()
	}
	if q.Bind == "" {
		return rules.Asked()
	}
	at, _ := rules.ParseHostAddress(q.Bind) // checked reports what is wrong with it
	return at
}

// Check returns why the request would be refused by any store.
func (q Request) Check() error {
	_, err := q.checked()
	return err
}

// checked returns the request in the form in which it is kept, or why it is refused by any store.
func (q Request) checked() (Request, error) {
	if err := q.validate(); err != nil {
		return q, err
	}
	if q.Port == 0 {
		q.Protocol = 0
	}
	if q.Demand != "" {
		d, err := port.ParseDemand(q.Demand)
		if err != nil {
			return q, err
		}
		q.Demand = d.String()
	}
	if q.OnConflict != "" {
		if _, err := rules.ParseOnConflict(q.OnConflict); err != nil {
			return q, err
		}
	}
	if q.Bind != "" {
		at, err := rules.ParseHostAddress(q.Bind)
		if err != nil {
			return q, err
		}
		q.Bind = at.String()
	}
	return q, nil
}

// validate checks which fields are given together.
func (q Request) validate() error {
	selected := 0
	for _, is := range []bool{q.Port != 0, q.Demand != "", q.Owner != "", q.All} {
		if is {
			selected++
		}
	}
	switch {
	case kept[q.Op] == 0 && q.Op != Remove && q.Op != Hide:
		return fmt.Errorf("unknown operation %q", q.Op)
	case selected != 1:
		return fmt.Errorf("%s: want one of a port, a port of a container or Service, an owner, or all", q.Op)
	case q.Port != 0 && q.Protocol != port.TCP && q.Protocol != port.UDP:
		return fmt.Errorf("%s: want protocol tcp or udp", q.Op)
	case q.Demand != "" && (q.Op == Expose || q.Op == Hide):
		return fmt.Errorf("%s: want a port; %s is for `fairlead forward add` and rm, `fairlead deny` and allow", q.Op, q.Demand)
	case q.Port == 0 && q.Demand == "" && q.Op != Deny && q.Op != Allow:
		return fmt.Errorf("%s: want a port", q.Op)
	case q.Op == Expose && (q.Seconds < 1 || q.Seconds > int64(rules.MaxExposure/time.Second)):
		return fmt.Errorf("%s: want a time of 1s to %s", q.Op, rules.MaxExposure)
	case q.Op != Expose && q.Seconds != 0:
		return fmt.Errorf("%s: only expose is for a time", q.Op)
	case q.Op != Forward && (q.To != 0 || q.OnConflict != "") || q.Op != Forward && q.Op != Expose && q.Bind != "":
		return fmt.Errorf("%s: only a forward has a host port and a host address", q.Op)
	}
	for _, s := range []string{q.Owner, q.Guest} {
		if strings.ContainsFunc(s, breaks) || len(s) > 256 || s != "" && strings.TrimSpace(s) == "" {
			return fmt.Errorf("%q: want a name without control characters, of at most 256 bytes", s)
		}
	}
	return nil
}

// breaks reports whether a name cannot have a character: it is a control character or breaks the
// line, or it stands for bytes that are no text.
func breaks(r rune) bool {
	return unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || r == unicode.ReplacementChar
}

// checkSide returns why only the other side can have the request: a host has guests, an agent
// has none.
func (q Request) checkSide(guests bool) error {
	switch {
	case guests:
	case q.Guest != "":
		return fmt.Errorf("%s: an agent has no guests: run this on the host, or without --guest", q.Op)
	case q.OnConflict != "":
		return fmt.Errorf("%s: only a host opens another port on a conflict: run this on the host", q.Op)
	case q.Op == Expose:
		return fmt.Errorf("%s: only a host opens ports to other machines: run this on the host", q.Op)
	}
	return nil
}

// rank is the place of a request among others: what closes a port comes before what opens one,
// what names a container or Service before what names a port, one guest before several and
// these before all, and what exposes last.
func (q Request) rank() int {
	switch q.Op {
	case Deny:
		return 0
	case Expose:
		return 7
	}
	n := 6
	switch {
	case strings.ContainsAny(q.Guest, "*?"):
		n = 5
	case q.Guest != "":
		n = 4
	}
	if q.Demand != "" {
		n -= 3
	}
	return n
}

// compare orders the requests that are kept, as they are evaluated. It is zero for two of one
// operation that select the same.
func compare(a, b Entry) int {
	return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(a.Demand, b.Demand), cmp.Compare(a.Owner, b.Owner), cmp.Compare(a.Guest, b.Guest), cmp.Compare(a.Op, b.Op))
}
