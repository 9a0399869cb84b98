// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/config/words"
	"github.com/fairlead/fairlead/internal/port"
)

// RuleQuery describes a port that may not exist.
type RuleQuery struct {
	Key    port.Key   `json:"key"`
	Source string     `json:"source"`
	Demand string     `json:"demand,omitempty"` // by which it was asked for, see port.Demand; Source is demand then
	Owner  port.Owner `json:"owner"`
	Guest  string     `json:"guest,omitempty"` // on a host: whose port it is, as `ls` shows it or as rules match it
}

// RuleVerdict is what rules decide about a port: the output of "explain --rules -o json".
type RuleVerdict struct {
	Publication string       `json:"publication"`
	Demand      string       `json:"demand,omitempty"` // that of the query
	Guest       string       `json:"guest,omitempty"`  // on a host, where the rules name guests: as rules match it
	Allow       bool         `json:"allow"`
	Rule        string       `json:"rule"`
	Reason      string       `json:"reason"`
	Code        port.Code    `json:"code,omitempty"` // of the reason
	Host        []string     `json:"hostAddresses"`
	Steps       []rules.Step `json:"steps"`
	Warnings    []string     `json:"warnings,omitempty"` // labels of the owner without effect
}

func (q RuleQuery) publication() port.Publication {
	p := port.Publication{Fact: port.Fact{Key: q.Key, Owner: q.Owner, Source: q.Source}, Origins: []port.OriginInfo{{Origin: port.Origin{Source: q.Source, ID: q.Demand}}}}
	if q.Demand != "" {
		p.SetNamed("", []string{q.Demand})
	}
	return p
}

// Decide applies the rules of an agent to the port.
func (q RuleQuery) Decide(set *rules.Set) (RuleVerdict, error) {
	if q.Guest != "" {
		return RuleVerdict{}, errors.New("an agent has no guests: run this on the host, or without --guest")
	}
	p := q.publication()
	return q.verdict(p, set.Decide(p), set.Explain(p)), nil
}

// DecideHost applies the rules of a host with these guests to the port, for which the guest
// asks as an agent without rules does. The guest may be left out where it does not matter.
func (q RuleQuery) DecideHost(set *rules.Set, guests []Peer) (RuleVerdict, error) {
	p, names := q.publication(), GuestNames(guests)
	asked := p
	asked.Origins = []port.OriginInfo{{Origin: port.Origin{Source: port.SourceDemand}}} // no default denies that
	host := rules.Empty(rules.Loopback()).Decide(asked).Host
	var list []RuleVerdict
	var titles []string
	for _, g := range guests {
		titles = append(titles, names[g.id()])
		if q.Guest == "" || q.Guest == g.id() || q.Guest == names[g.id()] {
			d, steps := set.ExplainHost(g.id(), p, host)
			v := q.verdict(p, d, steps)
			v.Guest = g.id()
			list = append(list, v)
		}
	}
	switch {
	case len(guests) == 0 && q.Guest == "":
		d, steps := set.ExplainHost("", p, host)
		return q.verdict(p, d, steps), nil
	case len(list) == 0:
		return RuleVerdict{}, fmt.Errorf("--guest %q: this host has no such guest: want %s", q.Guest, words.OneOf(titles))
	case len(list) == 1:
		return list[0], nil
	}
	for _, v := range list[1:] {
		if v.Allow != list[0].Allow || v.Reason != list[0].Reason || !slices.Equal(v.Host, list[0].Host) || !slices.Equal(v.Steps, list[0].Steps) {
			return RuleVerdict{}, fmt.Errorf("the rules depend on the guest: give one with --guest: %s", words.OneOf(titles))
		}
	}
	list[0].Guest = ""
	return list[0], nil
}

func (q RuleQuery) verdict(p port.Publication, d port.Ruling, steps []rules.Step) RuleVerdict {
	v := RuleVerdict{
		Publication: p.String(), Demand: q.Demand, Allow: d.Allow, Rule: d.Rule.String(), Reason: d.Reason.String(), Code: d.Reason.Code(), Host: []string{}, Steps: steps, Warnings: d.Warnings,
	}
	for _, a := range d.Host {
		v.Host = append(v.Host, a.String())
	}
	return v
}

// testRules serves /v1/rules.
func (s *Server) testRules(w http.ResponseWriter, r *http.Request) {
	var q RuleQuery
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRuleQuery)).Decode(&q); err != nil {
		text(w, http.StatusBadRequest, err.Error())
		return
	}
	decide := q.Decide
	if s.o.Role == "host" {
		decide = func(set *rules.Set) (RuleVerdict, error) { return q.DecideHost(set, s.peers()) }
	}
	v, err := decide(s.o.Rules())
	if err != nil {
		text(w, http.StatusConflict, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// maxRuleQuery is more than an owner's labels have, in bytes.
const maxRuleQuery = 64 << 10

// TestRules asks an agent or a host what its current rules decide about a port.
func (c *Client) TestRules(ctx context.Context, q RuleQuery) (RuleVerdict, error) {
	return ask[RuleVerdict](ctx, c, http.MethodPost, "/v1/rules", q, 0)
}
