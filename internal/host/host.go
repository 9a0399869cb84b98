// SPDX-License-Identifier: Apache-2.0

// Package host is the peer on the machine whose user wants to reach the guests'
// ports. It follows each guest's publications over a link, opens listeners for
// them and carries what connects there to the guest.
package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/compact"
	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/trace"
	"github.com/fairlead/fairlead/internal/wire"
)

// Guest is one guest that the host follows.
type Guest struct {
	// Name is how the guest is called in status and in conflicts; unique.
	Name string
	// Dial makes a proved session. It is called again after every loss.
	Dial func(ctx context.Context) (link.Session, error)
	// Dials says that the guest dials: Dial waits for it, as long as it takes.
	Dials bool
}

// Policy has the last word on where a publication appears; rules.Set is one.
type Policy interface {
	Host(guest string, p port.Publication, asked []netip.AddrPort) port.Ruling
}

// Network opens listeners; own.Sockets is one.
type Network interface {
	Listen(ctx context.Context, network, address string) (net.Listener, error)
	ListenPacket(ctx context.Context, network, address string) (*own.UDPConn, error)
}

// Options configure a Host. Only Guests is required.
type Options struct {
	// Logger receives one line per transition. Nil discards.
	Logger *slog.Logger
	Guests []Guest
	// Policy decides where publications appear. Nil means rules that keep all on
	// the host's loopback.
	Policy Policy
	// Network opens listeners. Nil means the machine's own.
	Network Network
	// Trace reports flows to those who debug a port. Nil reports none.
	Trace *trace.Hub
	// Holders finds the holder of a port that is in use. Nil asks the system.
	Holders HolderFinder
	// Held are addresses that no publication gets.
	Held []Held

	// MovedFile keeps which other ports were opened on conflicts, so that a restarted host
	// opens the same. Empty keeps none.
	MovedFile string

	// Grace is how long listeners outlive a lost guest. 0 means 10 s, a negative
	// value none.
	Grace time.Duration
	// Hold is how long a connection waits for a guest that is being reconnected.
	// 0 means 3 s, a negative value not at all.
	Hold time.Duration
	// UDPIdle ends a UDP client's flow without datagrams in either direction.
	// 0 means 60 s.
	UDPIdle time.Duration
	// BackoffMin and BackoffMax bound the wait between attempts to reach a guest.
	// 0 means 100 ms and 10 s.
	BackoffMin, BackoffMax time.Duration

	// MaxListeners bounds the host addresses of one guest. 0 means 4,096.
	MaxListeners int
	// MaxFlows bounds the flows of one guest at one time, for TCP and UDP each. 0
	// means 8,192.
	MaxFlows int
	// MaxUDPClients bounds the clients of one UDP port; the least recently used is
	// dropped for a new one. 0 means 1,024.
	MaxUDPClients int
}

func (o *Options) validate() error {
	names := make(map[string]bool)
	for i, g := range o.Guests {
		switch {
		case g.Name == "":
			return fmt.Errorf("host: guest %d: no name", i+1)
		case names[g.Name]:
			return fmt.Errorf("host: guest %q: named twice", g.Name)
		case g.Dial == nil:
			return fmt.Errorf("host: guest %q: no Dial", g.Name)
		}
		names[g.Name] = true
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{{&o.Grace, 10 * time.Second}, {&o.Hold, 3 * time.Second}} {
		*d.v = max(cmp.Or(*d.v, d.def), 0)
	}
	for _, d := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{
		{"UDPIdle", &o.UDPIdle, time.Minute},
		{"BackoffMin", &o.BackoffMin, 100 * time.Millisecond},
		{"BackoffMax", &o.BackoffMax, 10 * time.Second},
	} {
		if *d.v < 0 {
			return fmt.Errorf("host: %s %v: want a positive duration", d.name, *d.v)
		}
		*d.v = cmp.Or(*d.v, d.def)
	}
	o.BackoffMax = max(o.BackoffMax, o.BackoffMin)
	for _, n := range []struct {
		name string
		v    *int
		def  int
	}{
		{"MaxListeners", &o.MaxListeners, 4096},
		{"MaxFlows", &o.MaxFlows, 8192},
		{"MaxUDPClients", &o.MaxUDPClients, 1024},
	} {
		if *n.v < 0 {
			return fmt.Errorf("host: %s %d: want a positive number", n.name, *n.v)
		}
		*n.v = cmp.Or(*n.v, n.def)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Policy == nil {
		set, err := rules.New(rules.Loopback(), nil)
		if err != nil {
			return fmt.Errorf("host: default rules: %w", err)
		}
		o.Policy = set
	}
	if o.Network == nil {
		o.Network = new(own.Sockets)
	}
	if o.Holders == nil {
		o.Holders = systemHolders()
	}
	return nil
}

// ID names a publication of one guest.
type ID struct {
	Guest string `json:"guest"`
	port.Key
}

// Compare orders by port, protocol, address and guest.
func (i ID) Compare(j ID) int {
	if c := i.Key.Compare(j.Key); c != 0 {
		return c
	}
	return cmp.Compare(i.Guest, j.Guest)
}

// Row is one port of a guest: what the guest says of it, and what became of it here. It is
// immutable. Text of the fact is to be quoted.
type Row struct {
	Guest string
	*port.Fact
	Outcomes []port.Outcome // one per host address after the policy, at least one; none of a port that the guest does not publish
	Since    time.Time      // when the host first received it
	Exposed  time.Time      // until when a rule opens it wider than usual; zero if none does
	Lost     bool           // its guest is not connected any more, or has not reported it again: what is open leads nowhere
}

// ID names the row.
func (r Row) ID() ID { return ID{r.Guest, r.Key} }

// State is the best of the outcomes.
func (r Row) State() port.State {
	var best port.State
	for _, o := range r.Outcomes {
		best = max(best, o.State)
	}
	return best
}

// View is what all guests publish, at one generation.
type View = table.View[ID, Row]

// Subscription notifies of changes of the View.
type Subscription = table.Subscription[ID, Row]

// GuestStatus is how one guest is doing.
type GuestStatus struct {
	Name         string
	Connected    bool      // there is a session, and its first snapshot was applied
	Peer         link.Peer // of the last session
	Error        string    // why there is no session
	Code         string    // of the error: a link.Refusal or one of the constants; empty if it has none
	Remote       bool      // the guest refused us, with the code
	Since        time.Time // when Connected or Error last changed
	Generation   uint64    // of the guest's set that is applied
	Publications int
	Flows        int           // open now
	Unread       []wire.Unread // NAT rules that the guest does not understand; shared and immutable
	Omitted      int           // unpublished ports that the guest has not sent
}

// Stats are counts since the start, but for what is open now.
type Stats struct {
	Listeners        int    `metric:"host_listeners" help:"Currently open host ports."`
	Conflicts        uint64 `metric:"host_listen_errors_total" label:"reason=conflict: in use by another program" help:"Failed attempts to open a host port."`
	ListenFailures   uint64 `metric:"host_listen_errors_total" label:"reason=error"`
	OpenTCP          int    `metric:"host_flows_open" label:"protocol=tcp" help:"Currently open flows."`
	OpenUDP          int    `metric:"host_flows_open" label:"protocol=udp"`
	OK               uint64 `metric:"host_flows_total" label:"result=ok" help:"Flows by result. Every result except \x60ok\x60 is an error."`
	Refused          uint64 `metric:"host_flows_total" label:"result=refused by the guest"`
	Unlinked         uint64 `metric:"host_flows_total" label:"result=disconnected: the guest was"`
	OverLimit        uint64 `metric:"host_flows_total" label:"result=limit"`
	OutOfDescriptors uint64 `metric:"host_flows_total" label:"result=descriptors: too few were left"`
	ToGuest          uint64 `metric:"host_flow_bytes_total" label:"direction=to_guest" help:"Payload bytes forwarded."`
	ToHost           uint64 `metric:"host_flow_bytes_total" label:"direction=to_host"`
	DatagramsDropped uint64 `metric:"host_udp_dropped_total" label:"kind=datagram" help:"UDP datagrams and clients dropped because a limit was reached."`
	UDPEvicted       uint64 `metric:"host_udp_dropped_total" label:"kind=client that was idle longest"`
	Snapshots        uint64 `metric:"host_link_updates_total" label:"kind=snapshot applied" help:"Updates received from guests, and resyncs requested of them."`
	Changes          uint64 `metric:"host_link_updates_total" label:"kind=change applied"`
	Resyncs          uint64 `metric:"host_link_updates_total" label:"kind=resync requested"`
}

// Host follows guests. Create it with New; Run does the work.
type Host struct {
	opt      Options
	table    *table.Table[ID, Row]
	others   *table.Table[ID, Row] // ports that guests do not publish
	meter    forward.Meter         // A is the client
	acceptor *own.Acceptor
	stats    struct {
		tcp, udp, listeners                       atomic.Int64
		ok, refused, unlinked, overLimit, dropped atomic.Uint64
		evicted, snapshots, changes, resyncs      atomic.Uint64
		conflicts, failures                       atomic.Uint64
	}
	timers schedule.Signal // to runTimers: something may be due
	lookup schedule.Signal // to findHolders: holders are to be looked up

	// mu guards all below, and the fields of guests, publications, claims,
	// groups and slots that say so. It is held over listen(2), not over more.
	mu      sync.Mutex
	running bool
	policy  Policy
	renewed bool // policy was set and is not applied yet
	guests  []*guest
	groups  map[groupKey]*group
	touched map[*group]struct{} // to be decided at the end of this step
	changed map[*publication]struct{}
	anyPort map[*slot]struct{} // slots of any free port
	retries schedule.Deadlines[*slot]
	unheld  map[*slot]struct{} // holder to be looked up
	moved   map[ID]move        // ports that were opened instead of others
	unsaved schedule.Signal    // moved is to be written
	peak    compact.Peak       // of groups

	wg sync.WaitGroup // listeners and flows
}

// New returns a host.
func New(opt Options) (*Host, error) {
	opt.Guests = slices.Clone(opt.Guests)
	if err := opt.validate(); err != nil {
		return nil, err
	}
	h := &Host{
		opt:      opt,
		table:    table.New[ID, Row](ID.Compare),
		others:   table.New[ID, Row](ID.Compare),
		timers:   schedule.NewSignal(),
		lookup:   schedule.NewSignal(),
		policy:   opt.Policy,
		acceptor: own.NewAcceptor(opt.Logger, own.ForFlow),
		groups:   make(map[groupKey]*group),
		touched:  make(map[*group]struct{}),
		changed:  make(map[*publication]struct{}),
		anyPort:  make(map[*slot]struct{}),
		unheld:   make(map[*slot]struct{}),
		moved:    loadMoved(opt.MovedFile, opt.Logger),
		unsaved:  schedule.NewSignal(),
	}
	for _, g := range opt.Guests {
		h.guests = append(h.guests, newGuest(h, g))
	}
	before := len(h.moved)
	maps.DeleteFunc(h.moved, func(id ID, _ move) bool { // of a guest that is not configured any more
		return !slices.ContainsFunc(h.guests, func(g *guest) bool { return g.name == id.Guest })
	})
	if len(h.moved) < before {
		h.unsaved.Notify()
	}
	return h, nil
}

// View returns the current publications.
func (h *Host) View() View { return h.table.View() }

// Subscribe returns a subscription to the publications; the caller closes it.
func (h *Host) Subscribe() *Subscription { return h.table.Subscribe() }

// Guests returns how the guests are doing, in the order of Options.Guests.
func (h *Host) Guests() []GuestStatus {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]GuestStatus, 0, len(h.guests))
	for _, g := range h.guests {
		out = append(out, g.describe())
	}
	return out
}

// Stats returns the counts.
func (h *Host) Stats() Stats {
	s := &h.stats
	return Stats{
		OpenTCP: int(s.tcp.Load()), OpenUDP: int(s.udp.Load()), Listeners: int(s.listeners.Load()),
		OK: s.ok.Load(), Refused: s.refused.Load(), Unlinked: s.unlinked.Load(), OverLimit: s.overLimit.Load(), OutOfDescriptors: h.acceptor.Refused(),
		DatagramsDropped: s.dropped.Load(), UDPEvicted: s.evicted.Load(),
		ToGuest: h.meter.AToB.Load(), ToHost: h.meter.BToA.Load(),
		Snapshots: s.snapshots.Load(), Changes: s.changes.Load(), Resyncs: s.resyncs.Load(),
		Conflicts: s.conflicts.Load(), ListenFailures: s.failures.Load(),
	}
}

// SetPolicy replaces the policy, for example after the rules were reloaded.
// Listeners that are still allowed stay open; flows that are now denied are reset.
// A running Host applies it soon after, any other when it runs.
func (h *Host) SetPolicy(p Policy) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.policy, h.renewed = p, true
	h.timers.Notify()
}

// Run follows the guests until ctx ends, then closes all and returns nil. It may
// be called once.
func (h *Host) Run(ctx context.Context) error {
	h.mu.Lock()
	again := h.running
	h.running = true
	h.mu.Unlock()
	if again {
		return errors.New("host: run a second time")
	}
	var loops sync.WaitGroup
	for _, g := range h.guests {
		loops.Go(func() { g.run(ctx) })
	}
	loops.Go(func() { h.runTimers(ctx) })
	loops.Go(func() { h.findHolders(ctx) })
	loops.Go(func() { h.saveMoved(ctx) })
	loops.Wait()

	h.mu.Lock()
	for _, g := range h.guests {
		g.withdraw()
	}
	h.commit(ctx)
	h.mu.Unlock()
	h.wg.Wait()
	return nil
}

// runTimers does what is due: retries, ends of grace periods, a new policy.
func (h *Host) runTimers(ctx context.Context) {
	for {
		h.mu.Lock()
		if ctx.Err() == nil {
			h.due(ctx, time.Now())
		}
		next := h.next()
		h.mu.Unlock()
		if schedule.Wait(ctx, next, h.timers) != nil {
			return
		}
	}
}

// due does what is due now. h.mu is held.
func (h *Host) due(ctx context.Context, now time.Time) {
	h.renew()
	for _, g := range h.guests {
		if !g.graceEnd.IsZero() && !g.graceEnd.After(now) {
			g.graceEnd = time.Time{}
			if n := len(g.pubs); n > 0 {
				g.log.Info("grace period expired; closing listeners", "publications", n)
			}
			g.withdraw()
		}
		if !g.keptEnd.IsZero() && !g.keptEnd.After(now) {
			g.removeKept("its time is over")
		}
	}
	// What is due soon is done now: one wake-up for many.
	for _, s := range h.retries.TakeAll(now.Add(retrySlack)) {
		h.retry(ctx, s)
	}
	h.commit(ctx)
}

// renew applies a policy that was set, before anything is opened. h.mu is held; the caller
// commits.
func (h *Host) renew() {
	if !h.renewed {
		return
	}
	h.renewed = false
	for _, g := range h.guests {
		g.reconsider()
	}
}

// next returns when something is due, zero for never. h.mu is held.
func (h *Host) next() time.Time {
	at := h.retries.Next()
	for _, g := range h.guests {
		for _, end := range [...]time.Time{g.graceEnd, g.keptEnd} {
			if !end.IsZero() && (at.IsZero() || end.Before(at)) {
				at = end
			}
		}
	}
	return at
}

// publish puts what this step changed into the table, from which the guests are sent it.
// h.mu is held.
func (h *Host) publish() {
	if len(h.changed) == 0 {
		return
	}
	h.table.Update(func(tx *table.Tx[ID, Row]) {
		for p := range h.changed {
			switch p.guest.pubs[p.Key] {
			case p:
				tx.Put(p.id(), p.view())
			case nil:
				tx.Delete(p.id())
			}
		}
	})
	h.changed = compact.Clear(h.changed)
	if h.peak.Passed(len(h.groups)) {
		h.groups = compact.Map(h.groups)
		for _, g := range h.guests {
			g.pubs = compact.Map(g.pubs)
		}
	}
}
