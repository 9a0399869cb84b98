// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
)

// Forwards is the output of "forward ls -o json".
type Forwards struct {
	File  string        `json:"file"`
	Rules []ForwardRule `json:"rules"` // in the order in which they are evaluated
}

// ForwardRule is one rule that was added at run time.
type ForwardRule struct {
	Name          string           `json:"name"` // "forward 8080/tcp"; empty of one without a name
	Action        string           `json:"action"`
	HostPort      string           `json:"hostPort"`    // as in a rule; "same" if it has none
	HostAddress   string           `json:"hostAddress"` // as in a rule; "asked" if it has none
	Guest         string           `json:"guest,omitempty"`
	State         string           `json:"state"`  // of the ports that it names: the best; "denied" for one that denies; "" if it names none
	Reason        string           `json:"reason"` // of the state
	HostAddresses []netip.AddrPort `json:"hostAddresses"`
}

// notServed is the reason of a rule that allows a port that does not exist yet.
const notServed = "nothing in the guest serves it yet"

// ForwardChange is the result of a change, and the rules that are in effect then.
type ForwardChange struct {
	forwards.Result
	Forwards
}

// listForwards serves GET /v1/forwards.
func (s *Server) listForwards(w http.ResponseWriter, _ *http.Request) {
	f, err := s.forwards()
	if err != nil {
		text(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(f)
}

// changeForwards serves POST /v1/forwards.
func (s *Server) changeForwards(w http.ResponseWriter, r *http.Request) {
	var q forwards.Request
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields() // a newer client must not have half of its request carried out
	if err := dec.Decode(&q); err != nil {
		text(w, http.StatusBadRequest, err.Error())
		return
	}
	result, err := s.o.Forwards.Do(q)
	if err != nil {
		text(w, http.StatusConflict, strings.ReplaceAll(err.Error(), "\n", "; "))
		return
	}
	f, err := s.forwards()
	if err != nil {
		text(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(ForwardChange{result, f})
}

func (s *Server) forwards() (Forwards, error) {
	list, err := s.o.Forwards.List()
	if err != nil {
		return Forwards{}, err
	}
	f := Forwards{File: s.o.Forwards.Path(), Rules: []ForwardRule{}}
	ports := s.o.Provider.List().Publications
	for _, r := range list {
		f.Rules = append(f.Rules, describeRule(r, ports))
	}
	return f, nil
}

// describeRule describes a rule and the ports that it is about.
func describeRule(r rules.Rule, ports []Publication) ForwardRule {
	f := ForwardRule{
		Name: r.Name, Action: "allow", HostPort: r.HostPort.String(), HostAddress: r.HostAddress.String(), Guest: r.Match.Guest,
		HostAddresses: []netip.AddrPort{},
	}
	if r.Deny {
		f.Action, f.State = "deny", port.Denied.String()
		return f
	}
	if len(r.Match.Ports) == 0 {
		return f
	}
	f.State, f.Reason = port.Pending.String(), notServed
	found := false
	var best port.State
	for _, p := range ports {
		if !r.Match.Names(p.Guest, p.Protocol, p.Port) {
			continue
		}
		if !found || p.State > best {
			found, best = true, p.State
			f.State, f.Reason = p.shownState(), p.Reason
		}
		for _, a := range p.HostAddresses {
			if !slices.Contains(f.HostAddresses, a) {
				f.HostAddresses = append(f.HostAddresses, a)
			}
		}
	}
	return f
}

// Forwards returns the rules that were added at run time.
func (c *Client) Forwards(ctx context.Context) (Forwards, error) {
	return ask[Forwards](ctx, c, http.MethodGet, "/v1/forwards", 0)
}

// ChangeForwards changes these rules.
func (c *Client) ChangeForwards(ctx context.Context, q forwards.Request) (v ForwardChange, err error) {
	body, err := json.Marshal(q)
	if err != nil {
		return v, err
	}
	resp, err := c.do(ctx, http.MethodPost, "/v1/forwards", string(body), c.patience)
	if err != nil {
		return v, err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		return v, fmt.Errorf("control socket %s: %w", c.path, err)
	}
	return v, nil
}
