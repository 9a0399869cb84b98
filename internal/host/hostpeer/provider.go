// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/host/route"
	"github.com/fairlead/fairlead/internal/link/wss"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/names"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// provider implements status.Provider; guests are the sources.
type provider struct {
	host    *host.Host
	connect []config.Guest // where the guests are
	refused func(guest string) wss.Refused
	names   *route.Router // nil if names are not served

	forwards *forwards.Store // the run-time rules; needed by Explain only
	dials    *rate.Limiter   // of Explain
}

var _ status.Provider = provider{}

func (p provider) List() status.List {
	v, titles := p.host.View(), status.GuestNames(p.peers())
	l := status.List{Generation: v.Generation(), Publications: make([]status.Publication, 0, v.Len()), Sources: p.Sources()}
	for _, pub := range v.All() {
		l.Publications = append(l.Publications, p.row(pub, titles))
	}
	others := p.host.Unpublished().View()
	for _, u := range others.All() {
		l.Publications = append(l.Publications, describe(u, titles))
	}
	if others.Len() > 0 {
		slices.SortStableFunc(l.Publications, func(a, b status.Publication) int { return a.Key.Compare(b.Key) })
	}
	return l
}

// row makes a row of a publication, with the names that lead to it. Titles are those of guests.
func (p provider) row(pub host.Row, titles map[string]string) status.Publication {
	row := describe(pub, titles)
	row.Names = p.namesOf(&pub)
	row.URL = p.url(&pub, row.Names)
	return row
}

// namesOf returns the names that lead to a publication.
func (p provider) namesOf(pub *host.Row) []string {
	if p.names == nil {
		return nil
	}
	return p.names.Table().NamesOf(route.PortOf(pub))
}

// url returns the URL of a port by the first of its names; over TLS by the one without its number,
// as certificates have it.
func (p provider) url(pub *host.Row, list []string) string {
	if p.names == nil || len(list) == 0 {
		return ""
	}
	name := list[0]
	if pub.Port == route.TLSPort {
		name = cmp.Or(p.names.Table().NameOf(route.PortOf(pub)), name)
	}
	return p.names.URL(name, pub.Port)
}

// report describes the names of ports, and whether they are served.
func (p provider) report() names.Report {
	if p.names == nil {
		return names.Report{Domain: names.Local, Listeners: []names.Listener{}, Names: route.Names(p.host, p.host.View(), names.Local).Entries()}
	}
	return p.names.Report()
}

func (p provider) Sources() []status.Source {
	list := []status.Source{}
	for _, g := range p.guests() {
		s := status.Source{Name: g.Name, State: "stale", Error: g.Error}
		if g.Connected {
			s.State, s.Method = "live", g.Peer.Proof
		}
		for _, r := range g.Unread {
			s.Warnings = append(s.Warnings, fmt.Sprintf("a NAT rule is not supported, so it is not published: %s: %s (%s)", r.Where, r.Rule, r.Reason))
		}
		if g.Omitted > 0 {
			s.Warnings = append(s.Warnings, fmt.Sprintf("%d more ports are not published; `fairlead ls` in the guest shows them", g.Omitted))
		}
		list = append(list, s)
	}
	return list
}

// peers describes the guests.
func (p provider) peers() []status.Peer {
	list := []status.Peer{}
	for _, g := range p.guests() {
		s := status.Peer{State: status.PeerConnected, Guest: g.Name, Name: g.Peer.Name, Version: g.Peer.Version, Endpoint: p.endpoint(g.Name),
			Error: g.Error, Code: g.Code, Remote: g.Remote, Since: g.Since.UTC()}
		if !g.Connected {
			s.State = status.PeerAway
			s.Next = explain.NextOnHost(s.Code, s.Endpoint, s.Remote, s.Label())
		}
		list = append(list, s)
	}
	names := status.GuestNames(list)
	for i := range list {
		list[i].Title = names[list[i].Guest]
	}
	return list
}

// guests returns the state of the guests. Their errors do not repeat where the guest is. Of a
// guest that dials they have why it was refused since.
func (p provider) guests() []host.GuestStatus {
	list := p.host.Guests()
	for i := range list {
		list[i].Error = strings.TrimPrefix(list[i].Error, "dial link "+p.endpoint(list[i].Name)+": ")
		if r := p.refused(list[i].Name); !list[i].Connected && r.At.After(list[i].Since) {
			list[i].Error += fmt.Sprintf("; refused %s at %s: %v", r.Peer, r.At.UTC().Format(time.TimeOnly), r.Err)
		}
	}
	return list
}

// endpoint returns where a guest is.
func (p provider) endpoint(id string) string {
	for _, g := range p.connect {
		if g.ID() == id {
			return g.Endpoint.String()
		}
	}
	return id
}

// describe makes a row of a port. Names are those of guests.
func describe(r host.Row, names map[string]string) status.Publication {
	row := status.Describe(publication(r), outcomes(r))
	row.Guest, row.GuestName, row.Lost, row.Unpublished = r.Guest, names[r.Guest], r.Lost, !r.Decision.Allow
	if slices.ContainsFunc(row.HostAddresses, func(a netip.AddrPort) bool { return !a.Addr().IsLoopback() }) {
		row.ExposedUntil = r.Exposed.UTC() // else the addresses that it is exposed at are not open
	}
	return row
}

// outcomes are those of the only sink that a host has.
func outcomes(r host.Row) (list []port.SinkOutcome) {
	for _, o := range r.Outcomes {
		list = append(list, port.SinkOutcome{Sink: "host", Outcome: o})
	}
	return list
}

// publication returns a port as far as the host knows it. Its origins are the first, and what it
// was asked for by.
func publication(r host.Row) port.Publication {
	p := port.Publication{Fact: *r.Fact, Since: r.Since}
	add := func(o port.Origin, detail string) {
		p.Origins = append(p.Origins, port.OriginInfo{Origin: o, Detail: port.NewDetail(detail), Since: r.Since})
	}
	demands := r.Demands()
	if r.Source != port.SourceDemand || len(demands) == 0 {
		add(port.Origin{Source: r.Source}, "")
	}
	for _, d := range demands {
		add(port.Origin{Source: port.SourceDemand, ID: d}, "asked for as "+d)
	}
	return p
}

// beside is what a row has that changes without its publication: with other ports, with the
// listeners of names, or with guests.
type beside struct{ title, names, url string }

func (p provider) besideOf(pub *host.Row, titles map[string]string) beside {
	list := p.namesOf(pub)
	return beside{titles[pub.Guest], strings.Join(list, " "), p.url(pub, list)}
}

// namesShare bounds the time that is spent on the names of all ports, for one watch, to one
// part in so many: each change may be a reason to compare them.
const namesShare = 4

func (p provider) Changes(ctx context.Context, f func(status.Delta) error) error {
	sub, others := p.host.Subscribe(), p.host.Unpublished().Subscribe()
	defer sub.Close()
	defer others.Close()
	var listeners schedule.Signal
	if p.names != nil {
		changed, stop := p.names.Watch()
		defer stop()
		listeners = changed
	}
	sent := make(map[host.ID]beside)
	var before map[string]string // titles that were sent
	for first := true; ; first = false {
		if !first {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-sub.C():
			case <-others.C():
			case <-listeners:
			}
		}
		began := time.Now()
		view, change := sub.Take()
		titles := status.GuestNames(p.peers())
		d := status.Delta{Generation: view.Generation()}
		for _, id := range change.Keys {
			if pub, ok := view.Get(id); ok {
				sent[id] = p.besideOf(&pub, titles)
				d.Put = append(d.Put, p.row(pub, titles))
			} else {
				delete(sent, id)
				d.Removed = append(d.Removed, status.RowID{Key: id.Key, Guest: id.Guest})
			}
		}
		retitled := !first && !maps.Equal(titles, before)
		before = titles
		if retitled || p.names != nil {
			for id, pub := range view.All() {
				if b := p.besideOf(&pub, titles); sent[id] != b {
					sent[id] = b
					d.Put = append(d.Put, p.row(pub, titles))
				}
			}
		}
		unpublished, otherChange := others.Take()
		for _, id := range otherChange.Keys {
			if u, ok := unpublished.Get(id); ok {
				d.Put = append(d.Put, describe(u, titles))
			} else {
				d.Removed = append(d.Removed, status.RowID{Key: id.Key, Guest: id.Guest, Unpublished: true})
			}
		}
		if retitled {
			for _, u := range unpublished.All() {
				d.Put = append(d.Put, describe(u, titles))
			}
		}
		rest := schedule.Rest(time.Since(began), namesShare)
		if err := f(d); err != nil {
			return err
		}
		if p.names != nil && schedule.Sleep(ctx, rest) != nil {
			return ctx.Err()
		}
	}
}
