// SPDX-License-Identifier: Apache-2.0

// Package status lets people and programs query a running agent or host. It has the
// JSON model, the server of the control socket and the page, and the client. It only
// reads views, except for the log level and the rules that are added at run time.
package status

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// SchemaVersion is the version of all JSON documents that commands print. It changes
// when a field is removed or changes its meaning; fields may be added at any time.
const SchemaVersion = 1

// List is the output of "ls -o json". Its form is stable.
type List struct {
	Generation   uint64        `json:"generation"`
	Publications []Publication `json:"publications"`
	Sources      []Source      `json:"sources"`
	Peers        []Peer        `json:"peers"`             // the host of an agent, the guests of a host
	Role         string        `json:"role,omitempty"`    // "agent", "host" or RoleCluster
	Version      string        `json:"version,omitempty"` // of that process
}

// RoleCluster is the role of a list of the nodes of a cluster. It has no host addresses.
const RoleCluster = "cluster"

// Peer is the other side of a link: the host of an agent, or one guest of a host.
type Peer struct {
	State    string    `json:"state"`            // one of the constants
	Guest    string    `json:"guest,omitempty"`  // on a host: the guest as publications name it
	Title    string    `json:"title,omitempty"`  // on a host: how the guest is shown, see GuestNames
	Name     string    `json:"name"`             // of the machine, as it reported; empty if unknown
	Endpoint string    `json:"endpoint"`         // the guest's, or the address of the host's connection
	Version  string    `json:"version"`          // as it reported; empty if unknown
	Error    string    `json:"error"`            // why it is not connected; the names of two hosts that compete for an agent
	Next     string    `json:"next"`             // what to do about it
	Code     string    `json:"code,omitempty"`   // of the error; empty if it has none
	Remote   bool      `json:"remote,omitempty"` // on a host: the guest refused it, with the code
	Since    time.Time `json:"since,omitzero"`
}

// Label is the name that the configuration of a host gives to the guest; empty if none.
func (p Peer) Label() string {
	if p.Guest == p.Endpoint {
		return ""
	}
	return p.Guest
}

// id identifies a guest in publications.
func (p Peer) id() string { return cmp.Or(p.Guest, p.Endpoint) }

// GuestNames returns how the guests of a host are shown: by the name in the configuration,
// else by the one that the guest reported, if no other guest has it, else by the endpoint.
func GuestNames(peers []Peer) map[string]string {
	count, names := map[string]int{}, map[string]string{}
	for _, p := range peers {
		count[cmp.Or(p.Label(), p.Name)]++
	}
	for _, p := range peers {
		name := cmp.Or(p.Label(), p.Name)
		if count[name] > 1 {
			name = p.Label()
		}
		names[p.id()] = cmp.Or(name, p.Endpoint)
	}
	return names
}

// The states of a peer.
const (
	PeerConnected = "connected"
	PeerRefused   = "refused" // the last one that tried
	PeerAway      = "away"
)

// Publication is one row: what a guest says of a port, and what Describe makes of that and of its
// outcomes. All text of the fact comes from the guest and is not trusted.
type Publication struct {
	port.Fact
	HostAddresses []netip.AddrPort `json:"hostAddresses"` // where it is reachable now
	State         port.State       `json:"state"`         // the best outcome
	Reason        string           `json:"reason"`
	Code          port.Code        `json:"code,omitempty"` // of the first of the reasons
	Origins       []Origin         `json:"origins"`
	DialTarget    string           `json:"dialTarget"`
	Since         time.Time        `json:"since"`
	// SinceAtLeast reports that the port was open before Since, for an unknown time.
	SinceAtLeast bool      `json:"sinceAtLeast,omitempty"`
	Outcomes     []Outcome `json:"outcomes"`
	Guest        string    `json:"guest,omitempty"`     // on a host: whose publication it is
	GuestName    string    `json:"guestName,omitempty"` // how the guest is shown
	Node         string    `json:"node,omitempty"`      // in a list of a cluster
	Rule         string    `json:"rule,omitempty"`
	Warnings     []string  `json:"warnings,omitempty"` // labels of the owner without effect, and why
	Names        []string  `json:"names,omitempty"`    // on a host that serves names: that lead to it, shortest first
	// URL leads to it by the first of Names, on a host that serves names; empty otherwise.
	URL string `json:"url,omitempty"`
	// Lost reports, on a host, that the guest is not connected, or was restarted and has not
	// reported the port again: what is open leads nowhere.
	Lost bool `json:"lost,omitempty"`
	// ExposedUntil is, on a host, until when other machines may reach the port by a rule that
	// was added for a time. It is zero for ports that the configuration opens to them.
	ExposedUntil time.Time `json:"exposedUntil,omitzero"`
	// Unpublished reports, on a host, that the guest does not publish the port: it is denied,
	// withheld or pending there. It has no host address and no outcomes.
	Unpublished bool `json:"unpublished,omitempty"`
	// Waits is the name by which a port is asked for that is not there yet, as in Demands:
	// Address is empty then, Port is the container's or the Service's.
	Waits string `json:"waits,omitempty"`
}

// Because sets the reason of the state.
func (p *Publication) Because(r port.Reason) { p.Reason, p.Code = r.String(), r.Code() }

// shownState is the state of the row in tables and filters.
func (p Publication) shownState() string {
	if p.Lost && p.State == port.Active {
		return lostState
	}
	return p.State.String()
}

// age is for how long the port is open at a time: ">5m" where it was open before it was seen.
func (p Publication) age(now time.Time) string {
	age := Age(now.Sub(p.Since))
	if p.SinceAtLeast {
		return ">" + age
	}
	return age
}

// exposed reports whether other machines can reach the port by a rule for a time.
func (p Publication) exposed() bool { return p.State == port.Active && !p.ExposedUntil.IsZero() }

// guestAddress is Address, or the name of the owner whose address is not known yet.
func (p Publication) guestAddress() string {
	if d, err := port.ParseDemand(p.Waits); err == nil {
		return d.Owner()
	}
	return p.Address.String()
}

// Origin is one reason for a publication.
type Origin struct {
	Source string    `json:"source"`
	Detail string    `json:"detail"`
	Doubt  string    `json:"doubt,omitempty"` // why a connection of the guest may reach another server than clients do
	Since  time.Time `json:"since"`
}

// Outcome is the result of one sink at one host address.
type Outcome struct {
	Sink        string     `json:"sink"`
	State       port.State `json:"state"`
	HostAddress string     `json:"hostAddress"`
	Reason      string     `json:"reason"`
	Code        port.Code  `json:"code,omitempty"` // as of a Publication
	Since       time.Time  `json:"since"`
}

// Source is the state of one source, or of one guest on a host.
type Source struct {
	Name   string `json:"name"`
	State  string `json:"state"`
	Method string `json:"method"`
	Error  string `json:"error"`
	// Warnings name entries that the source had to ignore.
	Warnings []string `json:"warnings,omitempty"`
}

func (s Source) equal(t Source) bool {
	return s.Name == t.Name && s.State == t.State && s.Method == t.Method && s.Error == t.Error && slices.Equal(s.Warnings, t.Warnings)
}

// Ready reports whether every source has reported a complete set.
func (l List) Ready() bool {
	for _, s := range l.Sources {
		if s.State == "starting" {
			return false
		}
	}
	return true
}

// Provider supplies the data of an agent or a host.
type Provider interface {
	// List returns the current state.
	List() List
	// Sources returns the current sources, never nil.
	Sources() []Source
	// Changes calls f with the current state and then with each change, until ctx
	// ends or f fails. Changes that come faster than f returns are coalesced.
	Changes(ctx context.Context, f func(Delta) error) error
}

// Delta is a change: rows to put, and keys to remove.
type Delta struct {
	Generation uint64
	Put        []Publication
	Removed    []RowID
}

// RowID identifies a row of one process. The fields are those of Publication: a port that is
// denied while it is open has two rows for a moment, and several may wait for one port.
type RowID struct {
	port.Key
	Guest       string `json:"guest,omitempty"`
	Unpublished bool   `json:"unpublished,omitempty"`
	Waits       string `json:"waits,omitempty"`
}

func idOf(p Publication) RowID { return RowID{p.Key, p.Guest, p.Unpublished, p.Waits} }

// Event is one line of the watch stream.
type Event struct {
	Time        time.Time    `json:"time"`
	Type        EventType    `json:"type"`
	Publication *Publication `json:"publication,omitempty"` // its current state, or its last one if it was removed
	Previous    *port.State  `json:"previous,omitempty"`    // the previous state, if it changed
}

// EventType is what happened to a publication.
type EventType string

// The types of a watch event.
const (
	Present EventType = "present" // existed when the watch began
	Synced  EventType = "synced"  // all present ones have been sent
	Added   EventType = "added"
	Changed EventType = "changed"
	Gone    EventType = "removed"
)

// Describe makes a row of a publication and its outcomes.
func Describe(p port.Publication, outcomes []port.SinkOutcome) Publication {
	row := Publication{
		Fact: p.Fact, HostAddresses: []netip.AddrPort{}, Outcomes: []Outcome{}, Since: p.Since.UTC(), SinceAtLeast: p.SinceAtLeast,
		Rule: p.Decision.Rule.String(), Warnings: p.Warnings(),
	}
	row.Others, row.Target = p.Beside(), 0 // the rest is for a host's rules, and may be long
	for _, o := range p.Origins {
		row.Origins = append(row.Origins, Origin{Source: o.Source, Detail: o.Detail.String(), Doubt: o.Doubt, Since: o.Since.UTC()})
	}
	if len(p.Dial) > 0 {
		row.DialTarget = p.Dial[0].String()
	}
	for _, o := range outcomes {
		row.Outcomes = append(row.Outcomes, describeOutcome(o))
	}
	if !p.Decision.Allow {
		row.State = port.Denied
		row.Because(p.Decision.Reason)
		if p.Decision.Pending() {
			row.State = port.Pending
		}
		return row
	}
	row.State = port.Pending
	for i, o := range outcomes {
		if i == 0 || o.State > row.State {
			row.State = o.State
			row.Because(o.Reason)
		}
		if o.State == port.Active && o.HostAddress.IsValid() {
			row.HostAddresses = append(row.HostAddresses, o.HostAddress)
		}
	}
	if p.Decision.Labelled() && row.State == port.Active && row.Code == port.Unstated {
		row.Because(p.Decision.Rule.Because(port.ByLabel))
	}
	return row
}

func describeOutcome(o port.SinkOutcome) Outcome {
	out := Outcome{Sink: o.Sink, State: o.State, Reason: o.Reason.String(), Code: o.Reason.Code(), Since: o.Since.UTC()}
	if o.HostAddress.IsValid() {
		out.HostAddress = o.HostAddress.String()
	}
	return out
}

// DescribeWaiting makes a row of a port that is asked for by name and is not there.
func DescribeWaiting(d port.Demand, reason port.Reason, since time.Time) Publication {
	p := port.Publication{
		Fact: port.Fact{
			Key: port.Key{Protocol: d.Protocol, Port: d.Port}, Source: port.SourceDemand,
			Owner:    port.Owner{Kind: port.OwnerContainer, Name: d.Name, Namespace: d.Scope},
			Decision: port.Decision{Reason: reason}, Named: &port.Named{Demands: []string{d.String()}},
		},
		Origins: []port.OriginInfo{{Origin: port.Origin{Source: port.SourceDemand, ID: d.String()}, Since: since}}, Since: since,
	}
	if d.Service {
		p.Owner.Kind = port.OwnerService
	}
	row := Describe(p, nil)
	row.Waits = d.String()
	return row
}
