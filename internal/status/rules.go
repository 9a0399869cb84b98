// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
)

// RuleQuery describes a port that may not exist.
type RuleQuery struct {
	Key    port.Key   `json:"key"`
	Source string     `json:"source"`
	Owner  port.Owner `json:"owner"`
}

// RuleVerdict is what rules decide about a port: the output of "rules test -o json".
type RuleVerdict struct {
	Publication string       `json:"publication"`
	Allow       bool         `json:"allow"`
	Rule        string       `json:"rule"`
	Reason      string       `json:"reason"`
	Host        []string     `json:"hostAddresses"`
	Steps       []rules.Step `json:"steps"`
	Warnings    []string     `json:"warnings,omitempty"` // labels of the owner without effect
}

// Decide applies the rules to the port.
func (q RuleQuery) Decide(set *rules.Set) RuleVerdict {
	p := port.Publication{Key: q.Key, Owner: q.Owner, Origins: []port.OriginInfo{{Origin: port.Origin{Source: q.Source}}}}
	d := set.Decide(p)
	v := RuleVerdict{Publication: p.String(), Allow: d.Allow, Rule: d.Rule, Reason: d.Reason, Host: []string{}, Steps: set.Explain(p), Warnings: d.Warnings()}
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
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(q.Decide(s.o.Rules()))
}

// maxRuleQuery is more than an owner's labels have, in bytes.
const maxRuleQuery = 64 << 10

// ErrNoRules is returned by a process that has no agent's rules: a host peer.
var ErrNoRules = errors.New("a host peer answers here, and this command tests the rules of agents: run it in the guest, or give --config FILE")

// TestRules asks an agent what its current rules decide about a port.
func (c *Client) TestRules(ctx context.Context, q RuleQuery) (RuleVerdict, error) {
	v, err := ask[RuleVerdict](ctx, c, http.MethodPost, "/v1/rules", q, 0)
	if errors.Is(err, errNotFound) {
		err = fmt.Errorf("control socket %s: %w", c.path, ErrNoRules)
	}
	return v, err
}
