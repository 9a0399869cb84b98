// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/fairlead/fairlead/internal/port"
)

// whoisQuery asks whose a process is.
type whoisQuery struct {
	Cgroups []string `json:"cgroups"` // of the process, most specific first, without roots
}

// whoisAnswer has one of its fields.
type whoisAnswer struct {
	Owner   *port.Owner `json:"owner,omitempty"`
	Refused string      `json:"refused,omitempty"`
}

// NoContainer is why an agent names no container for a process.
type NoContainer string

// Error implements error.
func (e NoContainer) Error() string { return string(e) }

// maxWhoisQuery is more than a /proc/PID/cgroup has, in bytes.
const maxWhoisQuery = 128 << 10

// whois names the container of a process, by its cgroups.
func (s *Server) whois(w http.ResponseWriter, r *http.Request) {
	var q whoisQuery
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxWhoisQuery)).Decode(&q); err != nil {
		text(w, http.StatusBadRequest, err.Error())
		return
	}
	var answer whoisAnswer
	if owner, err := s.o.Container(q.Cgroups); err != nil {
		answer.Refused = err.Error()
	} else {
		answer.Owner = &owner
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// Whois asks an agent which container a process belongs to, by its cgroups. The error is a
// NoContainer if the agent answers that it is none, or that it cannot tell.
func (c *Client) Whois(ctx context.Context, cgroups []string) (port.Owner, error) {
	a, err := ask[whoisAnswer](ctx, c, http.MethodPost, "/v1/whois", whoisQuery{cgroups}, 0)
	switch {
	case err != nil:
		return port.Owner{}, err
	case a.Owner == nil:
		return port.Owner{}, NoContainer(a.Refused)
	}
	return *a.Owner, nil
}
