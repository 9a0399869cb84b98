// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/demand"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/status"
)

// provided is a provider of n publications, of which every second is active, and
// of one that is gone and still held.
func provided(n int) provider {
	p := provider{
		registry.New(registry.Options{Rules: config.DefaultAgent().Rules, Logger: slog.New(slog.DiscardHandler)}),
		table.New[port.Key, reconcile.Outcomes](port.Key.Compare),
		table.New[string, demand.Waiting](strings.Compare),
	}
	set := make([]port.Binding, n)
	key := func(i int) port.Key {
		return port.Key{Protocol: port.TCP, Address: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Port: uint16(i + 1)}
	}
	for i := range set {
		set[i] = port.Binding{Key: key(i), Origin: port.Origin{ID: key(i).String()}, Dial: []netip.AddrPort{key(i).AddrPort()}}
	}
	p.registry.Feed("socket").Replace(set)
	p.outcomes.Update(func(tx *table.Tx[port.Key, reconcile.Outcomes]) {
		for i := range n {
			state := port.Conflict
			if i%2 == 0 {
				state = port.Active
			}
			tx.Put(key(i), reconcile.Outcomes{{Sink: "hostlink", Outcome: port.Outcome{State: state}}})
		}
		tx.Put(key(n), reconcile.Outcomes{{Sink: "hostlink", Outcome: port.Outcome{State: port.Active}}})
	})
	return p
}

func TestCounts(t *testing.T) {
	p := provided(1000)
	want := 0
	list := p.List().Publications
	for _, pub := range list {
		if pub.State == port.Active {
			want++
		}
	}
	if active, all := p.counts(); active != want || want != 500 || all != len(list) {
		t.Errorf("%d of %d, the list has %d of %d", active, all, want, len(list))
	}
}

// A Service without endpoints is published, and shown as what it is.
func TestUnservedPort(t *testing.T) {
	p := port.Publication{
		Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 30080}, Decision: port.Decision{Allow: true}},
	}
	var none table.View[port.Key, reconcile.Outcomes]
	if got := describe(p, none).Reason; got != "nothing is known to serve it" {
		t.Errorf("reason = %q", got)
	}
	p.Dial = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:30080")}
	if got := describe(p, none).Reason; got != "" {
		t.Errorf("reason of a port that is served = %q", got)
	}
	p.Dial, p.Decision = nil, port.Decision{Reason: port.Because(port.Unlistened)}
	if got := describe(p, none).Reason; got != "bound, not listening" {
		t.Errorf("reason of a port that is denied = %q", got)
	}
}

// What is asked for by name and waits is listed among the ports, and so are its changes.
func TestProviderListsWhatWaits(t *testing.T) {
	p := provided(1)
	put := func(reason port.Reason) {
		d, err := port.ParseDemand("svc/default/web:80")
		if err != nil {
			t.Fatal(err)
		}
		p.waiting.Update(func(tx *table.Tx[string, demand.Waiting]) {
			if tx.Delete(d.String()); !reason.IsZero() {
				tx.Put(d.String(), demand.Waiting{State: demand.State{Demand: d, Reason: reason}})
			}
		})
	}
	deltas, ctx := make(chan status.Delta, 1), t.Context()
	go func() { _ = p.Changes(ctx, func(d status.Delta) error { deltas <- d; return nil }) }()
	next := func() status.Delta {
		for d := range deltas {
			if len(d.Put)+len(d.Removed) > 0 {
				return d
			}
		}
		return status.Delta{}
	}
	if d := next(); len(d.Put) != 1 {
		t.Errorf("at first: %+v", d)
	}
	for _, reason := range []port.Reason{port.Because(port.NoService, "default", "web"), port.Because(port.NotServedYet)} {
		put(reason)
		d := next()
		if len(d.Put) != 1 || d.Put[0].Waits != "svc/default/web:80/tcp" || d.Put[0].State != port.Pending || d.Put[0].Reason != reason.String() || d.Put[0].Code != reason.Code() || d.Put[0].Address.IsValid() {
			t.Errorf("changed: %+v", d)
		}
		list := p.List().Publications
		if i := slices.IndexFunc(list, func(p status.Publication) bool { return p.Waits != "" }); len(list) != 2 || i != 1 || !reflect.DeepEqual(list[i], d.Put[0]) {
			t.Errorf("listed: %+v", list)
		}
	}
	put(port.Reason{})
	if d := next(); len(d.Put) != 0 || len(d.Removed) != 1 || d.Removed[0].Waits != "svc/default/web:80/tcp" || d.Removed[0].Port != 80 {
		t.Errorf("it is there: %+v", d)
	}
	if n := len(p.List().Publications); n != 1 {
		t.Errorf("%d rows are listed", n)
	}
}
