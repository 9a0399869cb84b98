// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// Labels of containers, and annotations of Services, that ask for something.
const (
	LabelExpose   = port.LabelPrefix + "expose"    // yes, no, loopback or all
	LabelHostPort = port.LabelPrefix + "host-port" // a host port, an offset, or GUESTPORT=HOSTPORT
	LabelName     = port.LabelPrefix + "name"      // a name for it on the host
)

const labelRules = "labels" // the step of an explanation

// maxLabelText is how many bytes of a label's value are read, and quoted.
const maxLabelText = 256

// WithLabels returns s, obeying labels of containers and Services or not. They decide after
// all rules and before the defaults, and never open what the configuration would not: what
// asks for more has no effect and is a warning of the decision.
func (s *Set) WithLabels(obey bool) *Set {
	t := *s
	t.labels = obey
	return &t
}

// wish is what the labels of one owner ask for, about one port.
type wish struct {
	expose   string      // how LabelExpose is written, empty if it asks for nothing
	deny     bool        // it asks to close the port
	address  HostAddress // it asks for these addresses
	hostPort string      // how LabelHostPort is written, empty if it asks for nothing
	to       HostPort
	name     string   // a DNS label in lower case
	bad      []string // what cannot be read
}

// labelled reports whether an owner has labels that count.
func labelled(o *port.Owner) bool {
	return o.Kind >= port.OwnerService && slices.ContainsFunc([]string{LabelExpose, LabelHostPort, LabelName}, func(k string) bool {
		_, ok := o.Labels[k]
		return ok
	})
}

// wishOf reads the labels of an owner for a guest port.
func wishOf(o *port.Owner, n uint16) (w wish) {
	read := func(key string, f func(string) error) {
		v, ok := o.Labels[key]
		if !ok {
			return
		}
		err := fmt.Errorf("longer than %d bytes", maxLabelText)
		if len(v) <= maxLabelText {
			err = f(strings.TrimSpace(v))
		}
		if err != nil {
			w.bad = append(w.bad, complaint(o, key, v, err.Error()))
		}
	}
	read(LabelExpose, w.readExpose)
	read(LabelHostPort, func(v string) error { return w.readHostPort(v, n) })
	read(LabelName, w.readName)
	return w
}

// complaint is a warning about a label, whose value comes from the guest.
func complaint(o *port.Owner, key, value, why string) string {
	what := "label"
	if o.Kind == port.OwnerService {
		what = "label or annotation"
	}
	name := o.Name
	if o.Namespace != "" {
		name = o.Namespace + "/" + name
	}
	return fmt.Sprintf("%s %q: %s %s: %q: %s; it has no effect", o.Kind, name, what, key, shorten(value), why)
}

func shorten(s string) string {
	if len(s) <= maxLabelText {
		return s
	}
	return strings.ToValidUTF8(s[:maxLabelText], "") + "..."
}

func (w *wish) readExpose(v string) error {
	switch strings.ToLower(v) {
	case "yes", "true":
	case "no", "false":
		w.deny = true
	case "loopback":
		w.address = Loopback()
	case "all":
		w.address = All()
	default:
		return errors.New("want yes, no, loopback or all")
	}
	w.expose = strings.ToLower(v)
	return nil
}

// readHostPort reads what the label says of guest port n. A value for other ports alone asks
// for nothing.
func (w *wish) readHostPort(v string, n uint16) error {
	want := errors.New(`want a host port (8081), an offset ("+1000"), or GUESTPORT=HOSTPORT with commas between, each guest port once`)
	seen := make(map[uint16]HostPort)
	for part := range strings.SplitSeq(v, ",") {
		from, host, named := strings.Cut(part, "=")
		guest := n // of a value without a guest port
		if !named {
			host = v
		} else if g, ok := parsePort(strings.TrimSpace(from)); ok && g != 0 {
			guest = g
		} else {
			return want
		}
		to, err := ParseHostPort(strings.TrimSpace(host))
		if _, twice := seen[guest]; err != nil || twice {
			return want
		}
		seen[guest] = to
	}
	if to, ok := seen[n]; ok {
		w.hostPort, w.to = strings.Join(strings.Fields(v), " "), to
	}
	return nil
}

func (w *wish) readName(v string) error {
	v = strings.ToLower(v)
	ok := v != "" && len(v) <= 63 && v[0] != '-' && v[len(v)-1] != '-'
	for _, c := range []byte(v) {
		ok = ok && ('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-')
	}
	if !ok {
		return errors.New("want a name of at most 63 letters, digits and hyphens")
	}
	w.name = v
	return nil
}

// title names the labels that decide.
func (w *wish) title() string {
	var list []string
	if w.expose != "" {
		list = append(list, LabelExpose+": "+w.expose)
	}
	if w.hostPort != "" && !w.deny {
		list = append(list, LabelHostPort+": "+w.hostPort)
	}
	if len(list) == 1 {
		return "label " + list[0]
	}
	return labelRules + " " + strings.Join(list, ", ")
}

// rule makes the labels that decide a rule, which tells owners apart.
func (w *wish) rule(o *port.Owner) *rule {
	m := Match{Labels: make(map[string]string)}
	for _, k := range []string{LabelExpose, LabelHostPort} {
		if v, ok := o.Labels[k]; ok {
			m.Labels[k] = v
		}
	}
	return &rule{Rule: Rule{Match: m, Deny: w.deny}, ref: port.RuleRef{Kind: port.RuleLabel, Name: w.title()}}
}

// obey applies the labels of p's owner to what the rules and the defaults decide by d.
// Winner is the rule that decided, nil if it was a default.
func (s *Set) obey(p *port.Publication, d port.Ruling, winner *rule) (port.Ruling, *rule) {
	if d.Pending() {
		return d, winner
	}
	if p.OwnerPending {
		if winner == nil && d.Allow {
			r := &rule{ref: port.RuleRef{Kind: port.RuleLabel}}
			return port.Ruling{Decision: port.Decision{Rule: r.ref, Reason: port.Because(port.OwnerAwaited)}}, r
		}
		return d, winner
	}
	if !labelled(&p.Owner) {
		return d, winner
	}
	w := wishOf(&p.Owner, p.Port)
	by := winner
	if winner == nil && d.Allow {
		d, by = s.grant(p, d, &w)
	} else {
		w.refuse(p, &d)
	}
	d.Alias, d.Warnings = "", w.bad
	if d.Allow {
		d.Alias = w.name
	}
	return d, by
}

// refuse notes what cannot be had because d decides.
func (w *wish) refuse(p *port.Publication, d *port.Ruling) {
	switch {
	case w.expose == "" || w.deny:
	case !d.Allow && !d.Withheld():
		w.complain(&p.Owner, LabelExpose, "the port is denied by "+d.Rule.String())
	case d.Allow && !w.within(d.Host):
		w.complain(&p.Owner, LabelExpose, "wider than "+d.Rule.String()+" allows")
	}
}

func (w *wish) complain(o *port.Owner, key, why string) {
	w.bad = append(w.bad, complaint(o, key, o.Labels[key], why))
}

// within reports whether the addresses that w asks for are none beyond those of a list.
func (w *wish) within(list []netip.AddrPort) bool {
	return !slices.ContainsFunc(list, func(a netip.AddrPort) bool { return !covered(w.address.of(a.Addr()), list) })
}

// grant decides as the labels ask, as far as they ask for nothing beyond d, the default's
// decision, which allows p.
func (s *Set) grant(p *port.Publication, d port.Ruling, w *wish) (port.Ruling, *rule) {
	if w.expose != "" && !w.within(d.Host) {
		w.complain(&p.Owner, LabelExpose, "wider than the configuration allows")
		w.expose, w.address = "", Asked()
	}
	if w.hostPort != "" && !w.deny {
		if why := s.mayMove(p, w.to); why != "" {
			w.complain(&p.Owner, LabelHostPort, why)
			w.hostPort, w.to = "", HostPort{}
		}
	}
	if w.expose == "" && w.hostPort == "" {
		return d, nil
	}
	r := w.rule(&p.Owner)
	if w.deny {
		return deny(r.ref, port.DeniedByRule), r
	}
	r.HostPort, r.HostAddress = w.to, w.address
	d = r.decide(r.ref, d.Host)
	d.Yields = slices.ContainsFunc(d.Host, func(a netip.AddrPort) bool { return a.Port() != p.Port })
	return d, r
}

// mayMove returns why a label may not give p another host port, "" if it may. Where the
// rules deny a port, nobody gets its number on the host.
func (s *Set) mayMove(p *port.Publication, to HostPort) string {
	n, ok := to.of(p.Port)
	switch {
	case slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool { return o.Source == port.SourcePublish }):
		return "the container asked for the port itself, and publish.allow says which it may have"
	case !ok:
		return fmt.Sprintf("host port %d%s is not within 1 to 65535", p.Port, to)
	case n == 0 || n == p.Port:
		return ""
	}
	q, plain := *p, s.WithLabels(false)
	q.Port, q.Others = n, nil
	if d, _, _ := plain.decideOne(&q); !d.Allow {
		return "host port " + strconv.Itoa(int(n)) + " is denied by " + d.Rule.String()
	}
	return ""
}

// mayTake returns the rule of a host that denies a host port which labels of a guest ask
// for, nil if none does.
func (s *Set) mayTake(guest string, p *port.Publication, asked []netip.AddrPort) (*rule, uint16) {
	for _, a := range asked {
		if a.Port() == 0 || a.Port() == p.Port {
			continue
		}
		q := *p
		q.Port = a.Port()
		r, _ := first(s.rules, guest, &q, false)
		if r == nil {
			r, _ = first(s.runtime, guest, &q, false)
		}
		if r != nil && r.Deny {
			return r, a.Port()
		}
	}
	return nil, 0
}

// explainLabels returns how labels apply to p, on which winner decides by d.
func (s *Set) explainLabels(p *port.Publication, d port.Ruling, winner *rule) (step Step, ok bool) {
	if !s.labels && !labelled(&p.Owner) {
		return step, false
	}
	step.Rule = labelRules
	switch {
	case !s.labels:
		step.Why = "not obeyed: the configuration does not have labels: true"
	case winner != nil && winner.ref.Kind == port.RuleLabel && d.Pending():
		step.Why, step.Decides = notKnownYet(), true
	case winner != nil && winner.ref.Kind == port.RuleLabel:
		step.Rule, step.Matched, step.Decides, step.Why = winner.ref.String(), true, true, winner.does()
		if !d.Reason.IsZero() && d.Reason.Code() != port.DeniedByRule {
			step.Why = d.Reason.String() // for another owner
		}
	case p.OwnerPending:
		step.Why = notKnownYet()
	case !labelled(&p.Owner):
		step.Why = "the owner has no label " + LabelExpose + ", " + LabelHostPort + " or " + LabelName
	default:
		step.Matched = true
		step.Why = "passed over: " + cmp.Or(d.Rule, defaultAllow).String() + " decides"
		if winner == nil {
			step.Why = "change nothing"
		}
	}
	if d.Alias != "" {
		step.Why += ", name " + d.Alias
	}
	return step, true
}
