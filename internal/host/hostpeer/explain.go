// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// dialTimeout is how long the guest has to answer: more than it gives the server
// (forward.ServerOptions), so that of a server that is silent the guest says so.
const dialTimeout = 6 * time.Second

// newDials bounds the dials that questions cause, as package gather does in the guest.
func newDials() *rate.Limiter { return rate.NewLimiter(rate.Every(250*time.Millisecond), 8) }

var _ status.Explainer = provider{}

// Explain implements status.Explainer with what a host knows: the publications of
// guests and their outcomes, what guests report that they do not publish, and whether a
// server answers its guest.
func (p provider) Explain(ctx context.Context, q explain.Query) (explain.Report, error) {
	f := explain.Facts{Query: q, Now: time.Now(), Host: true, ForwardsFile: p.forwards.Path()}
	peers := p.peers()
	names, next := status.GuestNames(peers), make(map[string]string)
	for _, g := range peers {
		next[g.Guest] = g.Next
	}
	for _, g := range p.guests() {
		s := explain.Source{Name: g.Name, Title: names[g.Name], State: "live", Error: g.Error, Next: next[g.Name]}
		if !g.Connected {
			s.State = "stale"
		}
		f.Sources = append(f.Sources, s)
		f.Unread = append(f.Unread, unread(g, names)...)
	}
	f.Unread = explain.UnreadAbout(f.Unread, q.Port)
	asked := make(map[int]host.Row) // by the index in f.Publications
	for _, pub := range p.host.View().All() {
		for _, o := range pub.Outcomes {
			f.HostPorts = append(f.HostPorts, port.Slot{Protocol: pub.Protocol, Port: o.HostAddress.Port()})
		}
		if pub.Port != q.Port {
			other := explain.OtherPort{Slot: pub.Slot(), Guest: names[pub.Guest]}
			if leadsTo(pub, q.Port) && !slices.Contains(f.OtherPorts, other) {
				f.OtherPorts = append(f.OtherPorts, other)
			}
			continue
		}
		e := explain.Publication{
			Publication: publication(pub), Guest: pub.Guest, GuestName: names[pub.Guest], URL: p.url(&pub, p.namesOf(&pub)), Outcomes: outcomes(pub),
		}
		if q.Dial && pub.Protocol == port.TCP && q.Protocol != port.UDP && !pub.Lost {
			if p.dials.Allow() {
				asked[len(f.Publications)] = pub
			} else {
				e.Dials = []explain.Dial{{Answer: explain.NotTried, Detail: "asked too often"}}
			}
		}
		f.Publications = append(f.Publications, e)
	}
	var dials sync.WaitGroup
	for i, pub := range asked {
		dials.Go(func() { f.Publications[i].Dials = []explain.Dial{p.dial(ctx, pub)} })
	}
	dials.Wait()
	for _, u := range p.host.Unpublished().View().All() {
		if u.Key.Port == q.Port {
			f.Publications = append(f.Publications, explain.Publication{Publication: publication(u), Guest: u.Guest, GuestName: names[u.Guest]})
		}
	}
	return explain.Evaluate(f), nil
}

// dial has the guest dial the server of a publication, as for a client, and sends nothing.
func (p provider) dial(ctx context.Context, pub host.Row) explain.Dial {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	at := netip.AddrPortFrom(port.Loopback(pub.Address), pub.Port)
	flow, err := p.host.Dial(ctx, ctx, host.Reach{ID: pub.ID(), Owner: pub.Owner, At: at})
	if err == nil {
		_ = flow.Close()
	}
	return answer(ctx, err)
}

// answer is what a dial that ended with err, within ctx, says of the server.
func answer(ctx context.Context, err error) (d explain.Dial) {
	var reply *host.FlowError
	switch {
	case err == nil:
		d.Answer = explain.Answers
	case errors.As(err, &reply) && reply.Status == wire.FlowRefused:
		d.Answer, d.Detail = explain.Refuses, reply.Reason
	case errors.As(err, &reply) && reply.Status == wire.FlowUnreachable:
		d.Answer, d.Detail = explain.Silent, reply.Reason
	case ctx.Err() != nil:
		d.Answer, d.Detail = explain.NotTried, "the guest does not answer"
	default:
		d.Answer, d.Detail = explain.NotTried, err.Error()
	}
	return d
}

// leadsTo reports whether a publication is open at a host port.
func leadsTo(pub host.Row, n uint16) bool {
	return slices.ContainsFunc(pub.Outcomes, func(o port.Outcome) bool { return o.State == port.Active && o.HostAddress.Port() == n })
}

// unread returns the NAT rules that a guest does not understand. Names are those of guests.
func unread(g host.GuestStatus, names map[string]string) (list []explain.Unread) {
	for _, r := range g.Unread {
		list = append(list, explain.Unread{Guest: cmp.Or(names[g.Name], g.Name), Where: r.Where, Rule: r.Rule, Reason: r.Reason})
	}
	return list
}
