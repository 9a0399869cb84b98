// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Forwards is the output of "forward ls -o json".
type Forwards struct {
	// Generation is higher where the requests are newer, in one run of the process.
	Generation uint64      `json:"generation"`
	File       string      `json:"file"`
	Requests   []Requested `json:"requests"` // in the order in which they are evaluated
}

// Requested is a request that was made at run time, and its effect.
type Requested struct {
	Request       forwards.Request `json:"request"`
	Undo          forwards.Request `json:"undo"`           // undoes it
	Until         time.Time        `json:"until,omitzero"` // of one that exposes: its end
	State         string           `json:"state"`          // of the ports that it names: the best; "denied" for one that denies; "" if it names none, or is not in effect
	Reason        string           `json:"reason"`         // of the state; of one that denies: whether it closes nothing
	Code          port.Code        `json:"code,omitempty"` // of the reason
	HostAddresses []netip.AddrPort `json:"hostAddresses"`
	Ports         int              `json:"ports"`          // how many it names now, open or not
	Note          string           `json:"note,omitempty"` // what is not as requested, though the state is good
}

// ForwardChange is the result of a change, and the requests that are in effect then.
type ForwardChange struct {
	forwards.Result
	Forwards
	// Open is, after a port was exposed, at which addresses of this system other machines
	// may reach it; empty if nothing serves it.
	Open []netip.AddrPort `json:"open,omitempty"`
	// Until is, where Open is not empty, when the last of the rules ends that open these
	// addresses.
	Until time.Time `json:"until,omitzero"`
	// Always is, after a port was exposed, at which addresses they may reach it also without
	// that: the configuration, or what the guest asks for, opens them.
	Always []netip.AddrPort `json:"always,omitempty"`
}

// listForwards serves GET /v1/forwards.
func (s *Server) listForwards(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.forwards())
}

// changeForwards serves POST /v1/forwards.
func (s *Server) changeForwards(w http.ResponseWriter, r *http.Request) {
	if why := onlyReads(r); why != "" {
		text(w, http.StatusForbidden, why)
		return
	}
	var q forwards.Request
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields() // a newer client must not have half of its request carried out
	if err := dec.Decode(&q); err != nil {
		text(w, http.StatusBadRequest, err.Error())
		return
	}
	q, err := s.ofGuest(q)
	var result forwards.Result
	if err == nil {
		result, err = s.o.Forwards.Do(q)
	}
	if err != nil {
		text(w, http.StatusConflict, strings.ReplaceAll(err.Error(), "\n", "; "))
		return
	}
	switch q.Op {
	case forwards.Expose:
		s.awaitExposed(r.Context(), q)
	case forwards.Forward, forwards.Allow:
		if q.Demand != "" {
			s.awaitDemand(r.Context())
		}
		s.awaitOpened(r.Context(), q)
	}
	w.Header().Set("Content-Type", "application/json")
	change := ForwardChange{Result: result, Forwards: s.forwards()}
	if q.Op == forwards.Expose {
		ports := s.o.Provider.List().Publications
		change.Open, change.Always = openTo(ports, q.Match(), localAddresses())
		change.Until = exposedUntil(ports, q.Match())
	}
	if q.Op == forwards.Allow && len(result.Added) == 0 {
		change.Closed = cmp.Or(change.Closed, denial(s.o.Provider.List().Publications, q.Match()))
	}
	_ = json.NewEncoder(w).Encode(change)
}

// denial says by which rule the ports that are selected are denied, "" if they are not.
func denial(ports []Publication, m rules.Match) (why string) {
	if len(m.Ports) == 0 {
		return ""
	}
	for _, p := range namedBy(&m, ports) {
		if p.State != port.Denied || !p.Code.NamesRule() {
			return ""
		}
		why = cmp.Or(why, p.Reason+p.inGuest())
	}
	return why
}

// forwards returns the requests, with the state of the ports that they name.
func (s *Server) forwards() Forwards {
	f := forwardsOf(s.o.Forwards, s.o.Provider.List().Publications)
	for i := range f.Requests {
		s.explainDemand(&f.Requests[i])
	}
	return f
}

// forwardsOf describes the requests of a store.
func forwardsOf(store *forwards.Store, ports []Publication) Forwards {
	f := Forwards{Generation: store.Generation(), File: store.Path(), Requests: []Requested{}}
	for _, e := range store.List() {
		f.Requests = append(f.Requests, requested(e, ports))
	}
	return f
}

// awaitTime is how long a change may take to have its effect: an agent or host applies rules
// soon after it got them, and may be unable to open a port.
const awaitTime = time.Second

// await waits until a change has its effect, or for a while.
func await(ctx context.Context, done func() bool) {
	for deadline := time.Now().Add(awaitTime); time.Now().Before(deadline); {
		if done() || schedule.Sleep(ctx, awaitTime/50) != nil {
			return
		}
	}
}

// awaitExposed waits until the ports of a request are opened by it, which may not be the only one
// that exposes them.
func (s *Server) awaitExposed(ctx context.Context, q forwards.Request) {
	list := s.o.Forwards.List()
	i := slices.IndexFunc(list, func(e forwards.Entry) bool { return e.Request == q })
	if i < 0 {
		return
	}
	until, at, match := list[i].Until, q.HostAddress(), q.Match()
	await(ctx, func() bool {
		return !slices.ContainsFunc(s.o.Provider.List().Publications, func(p Publication) bool {
			if !match.Names(p.Guest, p.Protocol, p.Port) || p.Unpublished || p.Waits != "" {
				return false
			}
			// Another rule may expose it for longer, and at other addresses.
			return !p.exposed() || p.ExposedUntil.Before(until) || p.ExposedUntil.After(until) && p.narrower(at)
		})
	})
}

// awaitDemand waits until what is asked for by name was looked for.
func (s *Server) awaitDemand(ctx context.Context) {
	await(ctx, func() bool {
		return !slices.ContainsFunc(s.forwards().Requests, func(f Requested) bool { return f.Code == port.LookedFor })
	})
}

// awaitOpened waits until the port of a request that opens it is open as it asks for.
func (s *Server) awaitOpened(ctx context.Context, q forwards.Request) {
	match, at := q.Match(), q.HostAddress()
	if len(match.Ports) == 0 {
		return // of an owner, or all: others are closed anyway
	}
	moves := q.OnConflict == port.OnConflictNext.String() || q.OnConflict == port.OnConflictAny.String()
	await(ctx, func() bool {
		return !slices.ContainsFunc(s.o.Provider.List().Publications, func(p Publication) bool {
			closed := p.State == port.Denied || p.State == port.Pending && p.Code == port.Unstated || moves && p.State == port.Conflict
			return !p.Unpublished && p.named(&match) && (closed || p.narrower(at))
		})
	})
}

// openTo returns where other machines can reach the ports that are selected, on a system
// with these addresses: for a time, and always.
func openTo(ports []Publication, match rules.Match, local []netip.Addr) (open, always []netip.AddrPort) {
	for _, p := range ports {
		if !match.Names(p.Guest, p.Protocol, p.Port) {
			continue
		}
		to := &always
		if p.exposed() {
			to = &open
		}
		for _, a := range p.HostAddresses {
			*to = appendReached(*to, a, local)
		}
	}
	return open, always
}

// appendReached appends where other machines reach a listener at an address, unless the list
// has it.
func appendReached(list []netip.AddrPort, a netip.AddrPort, local []netip.Addr) []netip.AddrPort {
	at := []netip.Addr{a.Addr()}
	if a.Addr().IsUnspecified() {
		at = local
	}
	for _, ip := range at {
		to := netip.AddrPortFrom(ip, a.Port())
		if !ip.IsLoopback() && ip.Is4() == a.Addr().Is4() && !slices.Contains(list, to) {
			list = append(list, to)
		}
	}
	return list
}

// localAddresses returns the addresses at which other machines may reach this system:
// without those of the link alone.
func localAddresses() (list []netip.Addr) {
	addrs, _ := net.InterfaceAddrs() // what cannot be listed is not named
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap().IsGlobalUnicast() {
				list = append(list, ip.Unmap())
			}
		}
	}
	return list
}

// Forwards returns the requests that were made at run time.
func (c *Client) Forwards(ctx context.Context) (Forwards, error) {
	return ask[Forwards](ctx, c, http.MethodGet, "/v1/forwards", nil, 0)
}

// ChangeForwards makes a request.
func (c *Client) ChangeForwards(ctx context.Context, q forwards.Request) (ForwardChange, error) {
	return ask[ForwardChange](ctx, c, http.MethodPost, "/v1/forwards", q, 0)
}
