// SPDX-License-Identifier: Apache-2.0

// Package forwards keeps the rules that users add while fairlead runs: ports that are
// forwarded, denied or allowed until that is undone. They are in a file of their
// own, so that they survive restarts and the configuration is never written to.
package forwards

import (
	"cmp"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
)

// Op is what a request does.
type Op string

// The operations.
const (
	Add    Op = "add"    // forward a port
	Remove Op = "rm"     // undo all that was requested for a port
	Deny   Op = "deny"   // close what is selected, until Allow
	Allow  Op = "allow"  // undo Deny, or allow what a default denies
	Expose Op = "expose" // open a port wider, for a time
	Hide   Op = "hide"   // undo Expose
)

// Request is a change. It selects one port, or for Deny and Allow also an owner or all.
type Request struct {
	Op       Op            `json:"op"`
	Protocol port.Protocol `json:"protocol,omitzero"`
	Port     uint16        `json:"port,omitempty"`  // of the guest
	Owner    string        `json:"owner,omitempty"` // name of the owner; may be a glob
	All      bool          `json:"all,omitempty"`
	// Demand is a port of a container or Service, published or not, in place of Port: what
	// port.ParseDemand reads. Not of Expose and Hide.
	Demand  string `json:"demand,omitempty"`
	Guest   string `json:"guest,omitempty"`   // on a host: of this guest only
	To      uint16 `json:"to,omitempty"`      // of Add: the host port; 0 is the guest's
	Bind    string `json:"bind,omitempty"`    // of Add and Expose: the host address, as a rule's hostAddress
	Seconds int64  `json:"seconds,omitempty"` // of Expose: for how long

	OnConflict string `json:"onConflict,omitempty"` // of Add, on a host: as a rule's
}

// normal returns the request with the demand in the form in which rules have it.
func (q Request) normal() (Request, error) {
	if q.Demand == "" {
		return q, nil
	}
	d, err := port.ParseDemand(q.Demand)
	q.Demand = d.String()
	return q, err
}

// target names what the request selects: "8080/tcp", "web:80/tcp", "owner web", "all".
func (q Request) target() string {
	s := "all"
	switch {
	case q.Demand != "":
		s = q.Demand
	case q.Port != 0:
		s = fmt.Sprintf("%d/%s", q.Port, q.Protocol)
	case q.Owner != "":
		s = "owner " + q.Owner
	}
	if q.Guest != "" {
		s += " of guest " + q.Guest
	}
	return s
}

// Check returns why the request would be refused by any store.
func (q Request) Check() error { return q.validate() }

// validate checks what the request needs on its own.
func (q Request) validate() error {
	selected := 0
	for _, is := range []bool{q.Port != 0, q.Demand != "", q.Owner != "", q.All} {
		if is {
			selected++
		}
	}
	switch {
	case !slices.Contains([]Op{Add, Remove, Deny, Allow, Expose, Hide}, q.Op):
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
	case q.Op != Add && (q.To != 0 || q.OnConflict != "") || q.Op != Add && q.Op != Expose && q.Bind != "":
		return fmt.Errorf("%s: only a forward has a host port and a host address", q.Op)
	}
	for _, s := range []string{q.Owner, q.Guest} {
		if strings.ContainsFunc(s, breaks) || len(s) > 256 {
			return fmt.Errorf("%q: want a name without control characters, of at most 256 bytes", s)
		}
	}
	return nil
}

// breaks reports whether a file of rules cannot have a character in a line: it is a control
// character or breaks the line, or it stands for bytes that are no text.
func breaks(r rune) bool {
	return unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || r == unicode.ReplacementChar
}

// kind is the first word of the names of the rules that a request makes.
type kind string

const (
	kindDeny    kind = "deny"
	kindForward kind = "forward"
	kindAllow   kind = "allow"
	kindExpose  kind = "expose"
)

// rank is the place of a rule that a request made among such rules: what closes a port comes before
// what opens one, what names a container or Service before what names a port, one guest before all,
// and what exposes last. It returns false for other rules, which remain where they are.
func rank(r rules.Rule) (int, bool) {
	word, _, _ := strings.Cut(r.Name, " ")
	n, ok := map[kind]int{kindDeny: 0, kindForward: 5, kindAllow: 5, kindExpose: 6}[kind(word)]
	if !ok || n != 5 {
		return n, ok
	}
	if r.Match.Guest != "" {
		n--
	}
	if !r.Match.Demand.IsZero() {
		n -= 2
	}
	return n, ok
}

// Undo returns the request that undoes a rule, unless it is not one that a request makes.
// A forward is undone together with all else that was added for its port.
func Undo(r rules.Rule) (Request, bool) {
	word, _, _ := strings.Cut(r.Name, " ")
	op, ok := map[kind]Op{kindDeny: Allow, kindForward: Remove, kindAllow: Remove, kindExpose: Hide}[kind(word)]
	q := Request{Op: op, Owner: r.Match.Name, Guest: r.Match.Guest, Demand: r.Match.Demand.String()}
	if len(r.Match.Ports) > 0 && q.Demand == "" {
		q.Protocol, q.Port = r.Match.Protocol, r.Match.Ports[0].First
	}
	q.All = q.Port == 0 && q.Demand == "" && q.Owner == ""
	return q, ok && q.validate() == nil && r.Name == word+" "+q.target() && makes(kind(word), r)
}

// makes reports whether r, named as a rule of kind k, matches and does only what a request can
// ask for.
func makes(k kind, r rules.Rule) bool {
	m := r.Match
	plain := rules.Match{Protocol: m.Protocol, Ports: m.Ports, Demand: m.Demand, Name: m.Name, Guest: m.Guest}
	onePort := len(m.Ports) == 0 || len(m.Ports) == 1 && m.Ports[0].First == m.Ports[0].Last
	return onePort && reflect.DeepEqual(m, plain) && r.Deny == (k == kindDeny) && r.Exposes() == (k == kindExpose)
}

// block is the text of the rule that a request makes at a time, as the item of a list.
func (q Request) block(k kind, now time.Time) string {
	var match []string
	if q.Port != 0 {
		match = append(match, "protocol: "+q.Protocol.String(), fmt.Sprintf("ports: %d", q.Port))
	}
	if d, err := port.ParseDemand(q.Demand); err == nil {
		match = append(match, "protocol: "+d.Protocol.String(), fmt.Sprintf("ports: %d", d.Port), "demand: "+quote(d.String()))
	}
	if q.Owner != "" {
		match = append(match, "name: "+quote(q.Owner))
	}
	if q.Guest != "" {
		match = append(match, "guest: "+quote(q.Guest))
	}
	lines := []string{"- name: " + quote(string(k)+" "+q.target())}
	if len(match) > 0 {
		lines = append(lines, "  match: {"+strings.Join(match, ", ")+"}")
	}
	if k == kindDeny {
		return strings.Join(append(lines, "  action: deny"), "\n")
	}
	if k == kindExpose {
		until := now.Add(time.Duration(q.Seconds) * time.Second).UTC().Format(time.RFC3339)
		return strings.Join(append(lines, "  action: expose", "  hostAddress: "+quote(cmp.Or(q.Bind, "all")), "  until: "+quote(until)), "\n")
	}
	lines = append(lines, "  action: allow")
	if q.To != 0 {
		lines = append(lines, "  hostPort: "+strconv.Itoa(int(q.To)))
	}
	if q.OnConflict != "" {
		lines = append(lines, "  onConflict: "+quote(q.OnConflict))
	}
	if q.Bind != "" {
		lines = append(lines, "  hostAddress: "+quote(q.Bind))
	}
	return strings.Join(lines, "\n")
}

// quote returns s as a double-quoted YAML text, of which JSON's are a part.
func quote(s string) string {
	b, _ := json.Marshal(s) // a string never fails
	return string(b)
}

// permit returns why a rule that allows would have no effect.
type permit func(m rules.Match, at rules.HostAddress) error

// closedBy reports whether a rule closes all ports, and so what the request selects.
func (q Request) closedBy(r rules.Rule) bool {
	guest := r.Match.Guest
	r.Match.Guest = ""
	return denies(r) && reflect.DeepEqual(r.Match, rules.Match{}) && (guest == "" || guest == q.Guest)
}

// closedWithAll says which rules close all ports, "" if none does.
func (q Request) closedWithAll(d document) string {
	rules := d.inEffect(q.closedBy)
	if rules == "" {
		return ""
	}
	return "closed with all others until `fairlead allow --all`" + rules
}

// change does what the request says to the file. It returns the names of the rules that it
// removed and added.
func (q Request) change(d document, now time.Time, permitted permit) (next document, removed, added []string, err error) {
	remove := func(kinds ...kind) {
		for _, k := range kinds {
			if i := d.made(q, k, now); i >= 0 && err == nil {
				if d, err = d.without(i); err == nil {
					removed = append(removed, string(k)+" "+q.target())
				}
			}
		}
	}
	add := func(k kind) {
		if err == nil {
			if d, err = d.add(q.block(k, now), permitted); err == nil {
				added = append(added, string(k)+" "+q.target())
			}
		}
	}
	has := func(k kind) bool { return d.made(q, k, now) >= 0 }
	switch q.Op {
	case Add:
		if !has(kindForward) {
			remove(kindAllow) // a forward allows as well
			add(kindForward)
			break
		}
		if same, perr := parseBlock(q.block(kindForward, now)); perr != nil || !equal(same, d.rules[d.made(q, kindForward, now)]) {
			err = fmt.Errorf("forward %s exists already with another host port or address: remove it first with `fairlead forward rm`", q.target())
		}
	case Remove:
		if remove(kindForward, kindAllow, kindDeny, kindExpose); len(removed) == 0 && err == nil {
			err = fmt.Errorf("nothing was added for %s: `fairlead forward ls` lists what was", q.target())
		}
	case Deny:
		remove(kindAllow)
		if !has(kindDeny) {
			add(kindDeny)
		}
	case Allow:
		switch remove(kindDeny); {
		case len(removed) > 0:
		case q.Port == 0 && err == nil:
			err = fmt.Errorf("%s is not denied%s", q.target(), d.inEffect(denies))
		case !has(kindForward) && !has(kindAllow):
			add(kindAllow)
		case err == nil:
			if closed := q.closedWithAll(d); closed != "" {
				err = fmt.Errorf("%s is allowed already, and %s", q.target(), closed)
			}
		}
	case Expose:
		remove(kindExpose) // its time begins again
		add(kindExpose)
	case Hide:
		if remove(kindExpose); len(removed) == 0 && err == nil {
			err = fmt.Errorf("%s is not exposed%s", q.target(), d.inEffect(func(r rules.Rule) bool { return r.Exposes() && r.InEffect(now) }))
		}
	}
	return d, removed, added, err
}
