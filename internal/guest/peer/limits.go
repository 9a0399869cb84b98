// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peer

import (
	"sync"

	"golang.org/x/time/rate"
)

// Limits bounds what one client may use: a container, or a user of the guest.
type Limits struct {
	Uses        int // requests that are served at the same time, as long as what they led to lasts
	Connections int // that it has carried at the same time, see Tenant.Connect
	Requests    int // in a second
}

// Tenants are those who use a socket.
type Tenants struct {
	limits Limits

	mu   sync.Mutex
	byID map[string]*Tenant
}

// Tenant is one of them.
type Tenant struct {
	of          *Tenants
	requests    *rate.Limiter
	uses        int
	connections int
}

func newTenants(l Limits) *Tenants { return &Tenants{limits: l, byID: make(map[string]*Tenant)} }

// sweepAbove is from how many tenants on idle ones are forgotten.
const sweepAbove = 64

// Enter admits a request of a tenant; leave must be called if there is no error.
func (ts *Tenants) Enter(id string) (*Tenant, error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t := ts.byID[id]
	if t == nil {
		ts.sweep()
		t = &Tenant{of: ts, requests: rate.NewLimiter(rate.Limit(ts.limits.Requests), ts.limits.Requests)}
		ts.byID[id] = t
	}
	switch {
	case !t.requests.Allow():
		return nil, Refuse(ReasonLimit, "more than %d requests in a second", ts.limits.Requests)
	case t.uses >= ts.limits.Uses:
		return nil, Refuse(ReasonLimit, "it has %d requests served already", ts.limits.Uses)
	}
	t.uses++
	return t, nil
}

// leave counts a request out. t may be nil.
func (t *Tenant) leave() {
	if t == nil {
		return
	}
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.uses--
}

// sweep forgets tenants that use nothing. ts.mu is held.
func (ts *Tenants) sweep() {
	if len(ts.byID) < sweepAbove {
		return
	}
	for id, t := range ts.byID {
		if t.uses == 0 && t.connections == 0 && t.requests.Tokens() >= float64(ts.limits.Requests) {
			delete(ts.byID, id)
		}
	}
}

// Connect counts a connection in, unless there are too many; Disconnect counts it out.
func (t *Tenant) Connect() bool {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if t.connections >= t.of.limits.Connections {
		return false
	}
	t.connections++
	return true
}

// Disconnect counts a connection out.
func (t *Tenant) Disconnect() {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.connections--
}

// Usage returns how many requests and connections a tenant has now.
func (ts *Tenants) Usage(id string) (uses, connections int) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t := ts.byID[id]; t != nil {
		return t.uses, t.connections
	}
	return 0, 0
}
