// SPDX-License-Identifier: Apache-2.0

// Package peertest runs the sinks for foreign peers in tests, as the agent runs
// them, and imitates a peer.
package peertest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// Sink is a sink that watches its peer while it runs.
type Sink interface {
	reconcile.Sink
	Run(ctx context.Context) error
}

// Rig is a sink with the reconciler that drives it.
type Rig struct {
	t        testing.TB
	pubs     *table.Table[port.Key, port.Publication]
	outcomes *table.Table[port.Key, reconcile.Outcomes]
	// Stop ends the sink as the end of the agent does, and returns when it has
	// ended. It may be called more than once.
	Stop func()
}

// New starts a sink. It ends with the test at the latest.
func New(t testing.TB, sink Sink) *Rig {
	t.Helper()
	r := &Rig{t: t, pubs: table.New[port.Key, port.Publication](port.Key.Compare)}
	rec := reconcile.New(r.pubs, []reconcile.Sink{sink}, reconcile.Options{Logger: slog.New(slog.DiscardHandler)})
	r.outcomes = rec.Outcomes()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, run := range []func(context.Context) error{rec.Run, sink.Run} {
		wg.Go(func() {
			if err := run(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("run: %v", err)
			}
		})
	}
	r.Stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(r.Stop)
	return r
}

// Key reads "tcp 0.0.0.0:80".
func Key(t testing.TB, s string) port.Key {
	t.Helper()
	var protocol, addr string
	if _, err := fmt.Sscan(s, &protocol, &addr); err != nil {
		t.Fatalf("key %q: %v", s, err)
	}
	p, err := port.ParseProtocol(protocol)
	a, aerr := netip.ParseAddrPort(addr)
	if err := errors.Join(err, aerr); err != nil {
		t.Fatal(err)
	}
	return port.Key{Protocol: p, Address: a.Addr(), Port: a.Port()}
}

// Pub returns a publication that asks for host addresses. A key that ends with "+" makes it one
// half of a socket at [::] that takes both families.
func Pub(t testing.TB, key string, hosts ...string) port.Publication {
	t.Helper()
	p := port.Publication{
		Fact:    port.Fact{Decision: port.Decision{Allow: true, Rule: port.RuleRef{Kind: port.RuleDefault}}},
		Origins: []port.OriginInfo{{Origin: port.Origin{Source: "socket", ID: "1"}}},
	}
	if n := len(key) - 1; key[n] == '+' {
		key = key[:n]
		p.Owner = port.Owner{Kind: port.OwnerProcess, Name: "server", ID: "7"}
		p.Origins[0].Mapped = strings.Contains(key, "0.0.0.0")
	}
	p.Key = Key(t, key)
	for _, h := range hosts {
		p.Decision.Host = append(p.Decision.Host, netip.MustParseAddrPort(h))
	}
	return p
}

// Put adds publications, in one step.
func (r *Rig) Put(pubs ...port.Publication) {
	r.pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, p := range pubs {
			tx.Put(p.Key, p)
		}
	})
}

// Remove removes publications, in one step.
func (r *Rig) Remove(keys ...string) {
	r.t.Helper()
	r.pubs.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, k := range keys {
			tx.Delete(Key(r.t, k))
		}
	})
}

// Outcomes returns the outcomes that the sink reported of a publication.
func (r *Rig) Outcomes(key string) []port.Outcome {
	r.t.Helper()
	k := Key(r.t, key)
	reported, _ := r.outcomes.View().Get(k)
	out := make([]port.Outcome, len(reported))
	for i, o := range reported {
		out[i] = o.Outcome
	}
	return out
}

// WantGone waits until the sink has reported the end of a removed publication. Until
// then its last outcome could be taken for one of a publication that was put again.
func (r *Rig) WantGone(key string) {
	r.t.Helper()
	wait.Until(r.t, key+" is gone", func() error {
		if out := r.Outcomes(key); len(out) != 0 {
			return fmt.Errorf("outcomes are %+v", out)
		}
		return nil
	})
}

// WantState waits until the only outcome of a publication is of a state, and
// returns it.
func (r *Rig) WantState(key string, state port.State) port.Outcome {
	r.t.Helper()
	return r.WantReason(key, state, "")
}

// WantReason waits until the only outcome of a publication is of a state, for a reason
// that contains a text, and returns it.
func (r *Rig) WantReason(key string, state port.State, reason string) (o port.Outcome) {
	r.t.Helper()
	wait.Until(r.t, fmt.Sprintf("%s is %s %s", key, state, reason), func() error {
		out := r.Outcomes(key)
		if len(out) != 1 || out[0].State != state || !strings.Contains(out[0].Reason.String(), reason) {
			return fmt.Errorf("outcomes are %+v", out)
		}
		o = out[0]
		return nil
	})
	return o
}
