// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// chain follows one publication from the kernel to the host.
func (f *Facts) chain(p *Publication) Chain {
	c := Chain{Publication: p.Key.String(), Guest: p.Guest, GuestName: p.GuestName}
	for _, o := range p.Origins {
		c.Steps = append(c.Steps, f.seen(o))
	}
	c.Steps = append(c.Steps, p.ownerStep())
	if !f.Host || !p.Decision.Allow {
		c.Steps = append(c.Steps, ruleStep(p))
	}
	for _, w := range p.Warnings() {
		c.Steps = append(c.Steps, Step{Step: "label", Mark: Warning, Text: w})
	}
	if p.Decision.Allow && (!f.Host || len(p.Dials) > 0) {
		c.Steps = append(c.Steps, p.dialStep())
		if p.ProxyProtocol != port.ProxyProtocolNone {
			c.Steps = append(c.Steps, p.proxyStep())
		}
	}
	if p.Decision.Allow {
		c.Steps = append(c.Steps, p.sinkSteps()...)
	}
	if p.URL != "" {
		c.Steps = append(c.Steps, Step{Step: "name", Mark: OK, Text: p.URL})
	}
	if g, lost := f.lostGuest(p); lost {
		c.Steps = append(c.Steps, Step{Step: "guest", Mark: Failing, Text: "not connected: " + g.Error})
	}
	c.Verdict, c.Summary, c.Next = f.judge(f.whole(p))
	return c
}

// whole returns a publication with what its port has in the other family: a verdict is about the
// port.
func (f *Facts) whole(p *Publication) *Publication {
	k, ok := p.Key.OtherFamily()
	i := slices.IndexFunc(f.Publications, func(q Publication) bool {
		return ok && q.Key == k && q.Guest == p.Guest && q.Owner.Same(p.Owner)
	})
	if i < 0 {
		return p
	}
	first, second := p, &f.Publications[i]
	if second.Compare(first.Key) < 0 {
		first, second = second, first
	}
	switch {
	case first.Decision.Allow && second.Decision.Allow:
		all := *first
		all.Dial = slices.Concat(first.Dial, second.Dial)
		all.Dials = slices.Concat(first.Dials, second.Dials)
		all.Outcomes = slices.Concat(first.Outcomes, second.Outcomes)
		return &all
	case second.Decision.Allow:
		first, second = second, first
	case !first.Decision.Allow:
		return p
	}
	if second.Decision.Reason.Kind() == port.Withholds { // nobody serves that family
		return first
	}
	all := *first
	all.closed = second
	return &all
}

func (f *Facts) seen(o port.OriginInfo) Step {
	s := Step{Step: "seen", Mark: OK, Text: o.Source}
	if d := o.Detail.String(); d != "" {
		s.Text += ": " + d
	}
	if f.NetNS != "" && o.Source == "socket" {
		s.Text += ", in " + f.NetNS
	}
	if !o.Since.IsZero() {
		since := o.Since.UTC().Truncate(time.Millisecond)
		s.Since = &since
	}
	if !o.Withheld.IsZero() {
		s.Mark = Warning
		s.Text += ": " + o.Withheld.String()
	}
	for _, src := range f.Sources {
		if src.Name == o.Source && src.State == "stale" {
			s.Mark = Warning
			s.Text += " (may be out of date: " + src.Error + ")"
		}
	}
	return s
}

func (p *Publication) ownerStep() Step {
	var all []string
	if p.Owner.Kind != port.OwnerUnknown {
		all = append(all, Owner(p.Owner))
	}
	for _, o := range p.Beside() {
		name := "an unknown process"
		if o.Kind != port.OwnerUnknown {
			name = Owner(o.Owner)
		}
		all = append(all, name)
	}
	s := Step{Step: "owner", Mark: OK, Text: strings.Join(all, " and ")}
	switch {
	case len(all) == 0:
		s.Mark, s.Text = Warning, "unknown"
	case p.Holder != "":
		s.Mark = Warning
		s.Text += ", but " + p.Holder + " has the socket, as an audit will see"
	}
	return s
}

// Owner returns a human-readable name of an owner.
func Owner(o port.Owner) string {
	s := o.Kind.String()
	if o.Name != "" {
		s += " " + o.Name
	}
	if o.ID != "" && o.ID != o.Name {
		id := o.ID
		if len(id) == 64 { // a container's
			id = id[:12]
		}
		s += " (" + id + ")"
	}
	if o.Namespace != "" {
		s += " of " + o.Namespace
	}
	if o.Cluster != "" {
		s += ", in cluster " + o.Cluster
	}
	if h := o.Held; h != nil {
		s += ", as " + h.Engine + " of user " + h.User + " says; rules take it for process " + h.Process
	}
	return s + nodeOf(o)
}

// clusterLabels are by which tools mark the containers that are nodes of their clusters, with
// the cluster's name.
var clusterLabels = [...]struct{ tool, label string }{
	{"kind", "io.x-k8s.kind.cluster"},
	{"k3d", "k3d.cluster"},
	{"minikube", "name.minikube.sigs.k8s.io"},
}

// nodeOf says of a container that is a node of a cluster which one that is.
func nodeOf(o port.Owner) string {
	if o.Kind != port.OwnerContainer {
		return ""
	}
	for _, c := range clusterLabels {
		if name := o.Labels[c.label]; name != "" {
			return fmt.Sprintf(", of the %s cluster %s", c.tool, name)
		}
	}
	return ""
}

func ruleStep(p *Publication) Step {
	d := p.Decision
	s := Step{Step: "rule", Mark: OK, Text: d.Rule.String()}
	for _, r := range p.Rules {
		if r.Decides && r.Why != "" && d.Allow {
			s.Text += ": " + r.Why
		}
	}
	if !d.Allow {
		s.Mark = Failing
		switch {
		case d.Reason.Rule() == d.Rule:
			s.Text = d.Reason.String()
		case !d.Reason.IsZero():
			s.Text += ": " + d.Reason.String()
		}
		return s
	}
	s.Text += ", at " + addresses(d.Host) + " on the host"
	return s
}

func (p *Publication) dialStep() Step {
	s := p.dialsStep()
	for _, o := range p.Origins {
		if o.Doubt != "" {
			s.Text += "; clients outside may reach another server: " + o.Doubt
			if s.Mark == OK {
				s.Mark = Warning
			}
			break
		}
	}
	return s
}

// proxyStep says what the server is told of its clients. Only the host peer knows them.
func (p *Publication) proxyStep() Step {
	s := Step{Step: "proxy", Mark: OK, Text: fmt.Sprintf("the server is told the client's address by the PROXY protocol (%s)", p.ProxyProtocol)}
	var hides []string
	for _, o := range p.Outcomes {
		if o.Sink != "hostlink" && o.State == port.Active && !slices.Contains(hides, o.Sink) {
			hides = append(hides, o.Sink)
		}
	}
	if len(hides) > 0 {
		s.Mark = Warning
		s.Text += fmt.Sprintf("; by way of %s clients reach it without that, or with their address hidden: only `fairlead host` knows it", strings.Join(hides, " and "))
	}
	return s
}

func (p *Publication) dialsStep() Step {
	s := Step{Step: "dial", Mark: Skipped}
	switch {
	case len(p.Dials) > 0:
	case len(p.Dial) == 0:
		s.Mark, s.Text = Failing, "no server is known"
		return s
	default:
		s.Text = "not tried: " + p.Dial[0].String()
		return s
	}
	var texts []string
	for _, d := range p.Dials {
		texts = append(texts, d.String())
		switch d.Answer {
		case Answers:
			s.Mark = OK
		case NotTried:
		default:
			if s.Mark != OK {
				s.Mark = Failing
			}
		}
	}
	s.Text = strings.Join(texts, "; ")
	return s
}

var outcomeMarks = map[port.State]Mark{port.Active: OK, port.Pending: Warning}

func (p *Publication) sinkSteps() []Step {
	var steps []Step
	for _, o := range p.Outcomes {
		mark, ok := outcomeMarks[o.State]
		if !ok {
			mark = Failing
		}
		s := Step{Step: "sink " + o.Sink, Mark: mark, Text: o.State.String()}
		switch at := o.HostAddress; {
		case o.Reason.IsZero() && at.IsValid():
			s.Text += " at " + at.String()
		case !o.Reason.IsZero():
			s.Text += ": " + located(o)
		}
		if !o.Since.IsZero() {
			since := o.Since.UTC().Truncate(time.Millisecond)
			s.Since = &since
		}
		steps = append(steps, s)
	}
	if len(steps) == 0 {
		steps = append(steps, Step{Step: "sink", Mark: Warning, Text: "no sink has reported yet"})
	}
	return steps
}

func addresses(list []netip.AddrPort) string {
	texts := make([]string, len(list))
	for i, a := range list {
		texts[i] = a.String()
	}
	return strings.Join(texts, " and ")
}

// judge returns the verdict about a publication, and what to do.
func (f *Facts) judge(p *Publication) (v port.Verdict, summary, next string) {
	name := p.Slot().String()
	if !p.Decision.Allow {
		return f.judgeDenied(p)
	}
	by := map[port.State][]port.SinkOutcome{}
	for _, o := range p.Outcomes {
		by[o.State] = append(by[o.State], o)
	}
	if active := by[port.Active]; len(active) > 0 {
		return f.judgeActive(p, active, by[port.Conflict])
	}
	for _, s := range []port.State{port.Conflict, port.Denied, port.Failed, port.Pending} {
		if len(by[s]) == 0 {
			continue
		}
		o := by[s][0]
		switch s {
		case port.Conflict:
			return port.VerdictConflict, fmt.Sprintf("%s is not reachable on the host: %s", name, located(o)), f.advise(p, o.Reason, o)
		case port.Denied:
			v, by := cmp.Or(o.Reason.Verdict(), port.VerdictHostDenied), o.Sink
			if v == port.VerdictHostDenied {
				by = "the host"
			}
			return v, fmt.Sprintf("%s is not reachable: %s refuses it: %s", name, by, o.Reason), f.advise(p, o.Reason, o)
		case port.Failed:
			return port.VerdictFailed, fmt.Sprintf("%s is not reachable: %s failed: %s", name, o.Sink, o.Reason), f.advise(p, o.Reason, o)
		default:
			v, next := o.Reason.Verdict(), f.advise(p, o.Reason, o)
			if v == port.VerdictNoHost && f.Refused != nil {
				return v, fmt.Sprintf("%s is published, but no host is connected; %s", name, f.Refused.Text(f.Now)), f.Refused.Next()
			}
			if v == port.VerdictNoHost {
				return v, fmt.Sprintf("%s is published, but no host is connected", name), next
			}
			return port.VerdictPending, fmt.Sprintf("%s is published, and %s has not reported yet", name, o.Sink), next
		}
	}
	return port.VerdictPending, fmt.Sprintf("%s is allowed, and no sink has reported yet", name), "ask again in a moment"
}

// located returns the reason of an outcome with its host address.
func located(o port.SinkOutcome) string {
	at := o.HostAddress.String()
	if o.HostAddress.IsValid() && !slices.ContainsFunc(o.Reason.Args(), func(arg string) bool { return strings.Contains(arg, at) }) {
		return at + ": " + o.Reason.String()
	}
	return o.Reason.String()
}

func (f *Facts) judgeActive(p *Publication, active, conflicts []port.SinkOutcome) (v port.Verdict, summary, next string) {
	name := p.Slot().String()
	if g, lost := f.lostGuest(p); lost {
		return port.VerdictGuestLost, fmt.Sprintf("%s does not answer on the host: guest %s is not connected: %s", name, g.title(), g.Error), g.Next
	}
	var at []netip.AddrPort
	for _, o := range active {
		if o.HostAddress.IsValid() {
			at = append(at, o.HostAddress)
		}
	}
	where := "on the host"
	if len(at) > 0 {
		where += " at " + addresses(at)
	}
	tried, answered := 0, false
	for _, d := range p.Dials {
		if d.Answer != NotTried {
			tried++
			answered = answered || d.Answer == Answers
		}
	}
	v, is := port.VerdictActive, "reachable"
	if !answered {
		v, is = port.VerdictUntested, "open, not tested,"
	}
	silent, isSilent := p.containerSilent()
	switch {
	case isSilent:
		return port.VerdictNoAnswer, fmt.Sprintf("%s is open %s, but %s", name, where, silent),
			"check the container: its server must listen on this port, and not on the container's loopback alone"
	case p.paused():
		return port.VerdictNoAnswer, fmt.Sprintf("%s is open %s, but %s is paused", name, where, Owner(p.Owner)), "unpause the container"
	case len(p.Dial) == 0 && !f.Host:
		return port.VerdictNotServed, fmt.Sprintf("%s is open %s, but nothing in the guest serves it", name, where),
			"start the server behind it" + declarer(p)
	case tried > 0 && !answered && f.Host:
		return port.VerdictNoAnswer, fmt.Sprintf("%s is open %s, but %s", name, where, p.Dials[0]),
			fmt.Sprintf("check the server: `fairlead explain %s` in the guest says more", name)
	case tried > 0 && !answered:
		return port.VerdictNoAnswer, fmt.Sprintf("%s is open %s, but its server does not answer: %s %s", name, where, p.Dials[0].Target, p.Dials[0].Answer),
			fmt.Sprintf("check the server: in the guest, a connection to %s must work first", p.Dials[0].Target)
	case len(conflicts) > 0:
		o := conflicts[0]
		return port.VerdictPartial, fmt.Sprintf("%s is %s %s, but not everywhere: %s", name, is, where, located(o)),
			fmt.Sprintf("use %s, or %s", at[0], f.advise(p, o.Reason, o))
	case p.closed != nil:
		return port.VerdictPartial, fmt.Sprintf("%s is %s %s, but not at %s of the guest: %s", name, is, where, p.closed.AddrPort(), p.closed.Decision.Reason),
			f.advise(p.closed, p.closed.Decision.Reason, port.SinkOutcome{})
	case len(at) > 0 && !slices.ContainsFunc(at, func(a netip.AddrPort) bool { return a.Addr().Is4() }):
		return port.VerdictOneFamily, fmt.Sprintf("%s is %s %s: the guest serves IPv6 only", name, is, where),
			fmt.Sprintf("connect to %s or to localhost; for 127.0.0.1 the server must listen on IPv4 too (0.0.0.0 or a dual-stack [::])", at[0])
	case len(at) > 0 && at[0].Port() != p.Port:
		return v, fmt.Sprintf("%s is %s %s, another port than in the guest%s", name, is, where, p.otherPort(at[0])), ""
	}
	return v, fmt.Sprintf("%s is %s %s", name, is, where), ""
}

// otherPort says why the port is another one at an address.
func (p *Publication) otherPort(at netip.AddrPort) string {
	for _, o := range p.Outcomes {
		if o.HostAddress == at && o.State == port.Active && !o.Reason.IsZero() {
			return ": " + o.Reason.String()
		}
	}
	if p.Decision.Rule == (port.RuleRef{}) { // on a host
		return ""
	}
	return ", by " + p.Decision.Rule.String()
}

// ByContainer reports whether an engine declared the port for a container.
func ByContainer(p port.Publication) bool {
	return p.Owner.Kind == port.OwnerContainer &&
		slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool {
			return slices.Contains([]string{"docker", "podman", "containerd"}, o.Source)
		})
}

// containerSilent describes a container that refuses connections which a relay of its
// engine has accepted.
func (p *Publication) containerSilent() (text string, ok bool) {
	if !ByContainer(p.Publication) {
		return "", false
	}
	for _, d := range p.Dials {
		switch {
		case d.Target.Addr().IsLoopback():
		case d.Answer == Answers:
			return "", false
		case d.Answer == Refuses && text == "":
			text = fmt.Sprintf("%s does not listen: %s %s", Owner(p.Owner), d.Target, d.Answer)
		}
	}
	return text, text != ""
}

// paused reports whether an engine has paused the container.
func (p *Publication) paused() bool {
	return ByContainer(p.Publication) && slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool { return o.Paused })
}

// lostGuest returns the guest of a publication on a host if it is not connected.
func (f *Facts) lostGuest(p *Publication) (Source, bool) {
	for _, s := range f.Sources {
		if f.Host && s.Name == p.Guest && s.State == "stale" {
			return s, true
		}
	}
	return Source{}, false
}

func declarer(p *Publication) string {
	if p.Owner.Kind == port.OwnerUnknown {
		return ""
	}
	return ": " + Owner(p.Owner)
}

// judgeDenied is judge of a port that is not allowed.
func (f *Facts) judgeDenied(p *Publication) (v port.Verdict, summary, next string) {
	name, d := p.Slot().String(), p.Decision
	summary = fmt.Sprintf("%s is not published: %s", name, d.Reason)
	switch d.Reason.Code() {
	case port.OwnerContested:
		summary = fmt.Sprintf("%s is not published: %s depends on who owns it: %s", name, d.Rule, d.Reason)
	case port.OwnerAwaited:
		summary = fmt.Sprintf("%s is not published yet: %s depends on who owns it, and no engine has named its owner", name, d.Rule)
	}
	return cmp.Or(d.Reason.Verdict(), port.VerdictDenied), summary, f.advise(p, d.Reason, port.SinkOutcome{})
}

// inGuest names where a command must run, if not here.
func (f *Facts) inGuest() string {
	if f.Host {
		return " in the guest"
	}
	return ""
}

func (f *Facts) rulesFile() string {
	if f.Host {
		return "the agent's configuration in the guest"
	}
	if f.RulesFile == "" {
		return "the agent's configuration"
	}
	return f.RulesFile
}
