// SPDX-License-Identifier: Apache-2.0

// Package explain decides why a port is, or is not, reachable on the host, and what to
// do next. It is pure: package gather collects the facts.
package explain

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// Query is a question about a port.
type Query struct {
	Port     uint16
	Protocol port.Protocol // 0 for both
	// Dial lets the dial targets be tried: TCP only, and only if the port is
	// published.
	Dial bool
}

// asks reports whether the query is about protocol p.
func (q Query) asks(p port.Protocol) bool { return q.Protocol == 0 || q.Protocol == p }

// Facts is what is known about a port.
type Facts struct {
	Query        Query
	Now          time.Time
	Host         bool // the query is to a host, which knows publications and guests only
	NetNS        string
	RulesFile    string // the file to add a rule to
	ForwardsFile string // of run-time rules; empty if none can be added
	// HostPorts are the host ports that ports of fairlead have or want, as far as they are known.
	HostPorts    []port.Slot
	OtherPorts   []OtherPort // on a host: that are open at this number
	Refused      *Refusal    // the last host that was refused, if none is connected
	Publications []Publication
	Sockets      []Socket // in the watched network namespace, without a publication
	Elsewhere    []Socket // in other network namespaces
	Unread       []Unread
	Sources      []Source
	Similar      []port.Slot // publications whose number differs by one digit
	Missing      []string    // what could not be checked, and why
}

// OtherPort is a guest port that is open on the host at another number.
type OtherPort struct {
	port.Slot
	Guest string // how it is shown
}

// Publication is one entry of the merged table with its outcomes.
type Publication struct {
	port.Publication
	Guest string // on a host: identifies it
	// GuestName is how the guest is shown.
	GuestName string
	URL       string // on a host that serves names: leads to it by one; empty otherwise
	// Holder is who has the socket if that is not the owner: "pid 811 (nginx)", or "no process".
	Holder   string
	Rules    []rules.Step
	Dials    []Dial
	Outcomes []port.SinkOutcome

	closed *Publication // of the other family of the port, if that is closed and this one is not
}

// Answer is the result of dialling a target.
type Answer string

// The answers of a dial target.
const (
	Answers  Answer = "answers"
	Refuses  Answer = "refuses"
	Silent   Answer = "does not answer"
	Errs     Answer = "fails"
	Own      Answer = "is fairlead's own" // never dialled
	NotTried Answer = "not tried"
)

// Dial is one dial target and whether it answers.
type Dial struct {
	Target netip.AddrPort // zero on a host, where the guest says only whether one answers
	Answer Answer
	Detail string // the error, or why it was not tried
}

// String names the target, its answer and the detail.
func (d Dial) String() string {
	s := "the server in the guest"
	if d.Target.IsValid() {
		s = d.Target.String()
	}
	s += " " + string(d.Answer)
	if d.Detail != "" {
		s += " (" + d.Detail + ")"
	}
	return s
}

// Socket is a socket with the port of the query.
type Socket struct {
	Protocol  port.Protocol
	Address   netip.AddrPort
	Kind      SocketKind
	Own       bool // fairlead's
	NetNS     string
	Process   string     // "pid 811 (nginx)", empty if unknown
	Container port.Owner // zero if none is known
}

// SocketKind is what a socket does.
type SocketKind string

// The kinds of sockets.
const (
	Listening SocketKind = "listening"
	Bound     SocketKind = "bound"  // TCP, bound and not listening
	Client    SocketKind = "client" // UDP with a peer, or on a port chosen by the kernel
)

// Unread is an unsupported NAT rule that names the port or, if Unsure, may be about it.
type Unread struct {
	Where  string `json:"where"` // table and chains, from hook to rule
	Rule   string `json:"rule"`  // its text
	Reason string `json:"reason"`
	Unsure bool   `json:"-"`
	Guest  string `json:"-"` // on a host: how the guest that has the rule is shown
}

// Source is the state of one source.
type Source struct {
	Name, State, Error string
	Title              string // how a guest is shown; empty for its Name
	Next               string // on a host: what to do about the error
}

func (s Source) title() string { return cmp.Or(s.Title, s.Name) }

// Mark is the verdict of one step.
type Mark string

// The marks.
const (
	OK      Mark = "ok"
	Warning Mark = "warning"
	Failing Mark = "failing"
	Skipped Mark = "skipped"
)

// Step is one step of the path from the kernel to the host.
type Step struct {
	Step  string     `json:"step"` // "seen", "owner", "rule", "dial", "proxy", "sink NAME", or "name"
	Mark  Mark       `json:"verdict"`
	Text  string     `json:"text"`
	Since *time.Time `json:"since,omitempty"`
}

// Chain is the path of one publication from the kernel to the host.
type Chain struct {
	Publication string       `json:"publication"`         // "tcp 0.0.0.0:8080"
	Guest       string       `json:"guest,omitempty"`     // on a host: as `ls -o json` has it
	GuestName   string       `json:"guestName,omitempty"` // how it is shown
	Verdict     port.Verdict `json:"verdict"`
	Summary     string       `json:"summary"`
	Next        string       `json:"next"`
	Steps       []Step       `json:"steps"`
}

// Related is something that is not the port, but may be what was meant or why it fails.
type Related struct {
	Kind port.Verdict `json:"kind"`
	Text string       `json:"text"`
}

// Report is the answer. Its JSON form is stable. Texts contain names from the guest:
// quote them before showing them.
type Report struct {
	Port     uint16       `json:"port"`
	Protocol string       `json:"protocol"` // of the query, empty for both
	Verdict  port.Verdict `json:"verdict"`
	Summary  string       `json:"summary"`
	Next     string       `json:"next"` // what to do next, empty if nothing
	Chains   []Chain      `json:"publications"`
	Related  []Related    `json:"related"`
	Missing  []string     `json:"missing"` // what could not be looked at
}

// Evaluate judges the facts. It is pure.
func Evaluate(f Facts) Report {
	r := Report{Port: f.Query.Port, Chains: []Chain{}, Related: []Related{}, Missing: f.Missing}
	if f.Query.Protocol != 0 {
		r.Protocol = f.Query.Protocol.String()
	}
	if r.Missing == nil {
		r.Missing = []string{}
	}
	best := -1
	for i := range f.Publications {
		p := &f.Publications[i]
		if !f.Query.asks(p.Protocol) {
			continue
		}
		r.Chains = append(r.Chains, f.chain(p))
		if n := len(r.Chains) - 1; best < 0 || better(r.Chains[n], r.Chains[best]) {
			best = n
		}
	}
	findings := f.related(best >= 0)
	if best >= 0 {
		c := r.Chains[best]
		r.Verdict, r.Summary, r.Next = c.Verdict, c.Summary, c.Next
	} else {
		if len(findings) == 0 {
			findings = []finding{f.nothing()}
		}
		r.Verdict, r.Summary, r.Next = findings[0].verdict, findings[0].text, findings[0].next
		findings = findings[1:]
	}
	for _, n := range append(findings, f.unsure()...) {
		r.Related = append(r.Related, Related{n.verdict, n.text})
	}
	return r
}

// quality orders verdicts of publications, best first.
var quality = []port.Verdict{
	port.VerdictActive, port.VerdictOneFamily, port.VerdictPartial, port.VerdictUntested, port.VerdictNoAnswer, port.VerdictNotServed, port.VerdictPending, port.VerdictGuestLost, port.VerdictNoHost,
	port.VerdictConflict, port.VerdictFailed, port.VerdictHostDenied, port.VerdictDenied, port.VerdictWellKnown, port.VerdictInterface,
	port.VerdictSourceOnly, port.VerdictUnlistened, port.VerdictWithheld,
}

func better(a, b Chain) bool {
	return slices.Index(quality, a.Verdict) < slices.Index(quality, b.Verdict)
}
