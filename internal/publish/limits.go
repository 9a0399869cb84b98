// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"sync"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/publish/ask"
)

// Limits bounds what one container may use.
type Limits struct {
	Ports       int // leases and programs at the same time, and requests for one
	Connections int // through all of its leases at the same time
	Requests    int // for a lease, in a second
}

// tenants are the containers that use the socket.
type tenants struct {
	limits Limits

	mu   sync.Mutex
	byID map[string]*tenant
}

// tenant is one container.
type tenant struct {
	of          *tenants
	requests    *rate.Limiter
	ports       int
	connections int
}

// sweepAbove is from how many tenants on idle ones are forgotten.
const sweepAbove = 64

// enter admits a request of a container; leave must be called if there is no error.
func (ts *tenants) enter(container string) (*tenant, error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t := ts.byID[container]
	if t == nil {
		ts.sweep()
		t = &tenant{of: ts, requests: rate.NewLimiter(rate.Limit(ts.limits.Requests), ts.limits.Requests)}
		ts.byID[container] = t
	}
	switch {
	case !t.requests.Allow():
		return nil, ask.Refuse(ask.ReasonLimit, "more than %d requests in a second", ts.limits.Requests)
	case t.ports >= ts.limits.Ports:
		return nil, ask.Refuse(ask.ReasonLimit, "the container has %d ports and programs already", ts.limits.Ports)
	}
	t.ports++
	return t, nil
}

// leave counts a request out. t may be nil.
func (t *tenant) leave() {
	if t == nil {
		return
	}
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.ports--
}

// sweep forgets containers that use nothing. ts.mu is held.
func (ts *tenants) sweep() {
	if len(ts.byID) < sweepAbove {
		return
	}
	for id, t := range ts.byID {
		if t.ports == 0 && t.connections == 0 && t.requests.Tokens() >= float64(ts.limits.Requests) {
			delete(ts.byID, id)
		}
	}
}

// connect counts a connection in, unless there are too many; disconnect counts it out.
func (t *tenant) connect() bool {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.connections >= t.of.limits.Connections {
		return false
	}
	t.connections++
	return true
}

func (t *tenant) disconnect() {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.connections--
}
