// SPDX-License-Identifier: Apache-2.0

// Package host is the peer on the machine whose user wants to reach the guests'
// ports. It follows each guest's publications over a link, opens listeners for
// them and carries what connects there to the guest.
//
// All that decides which port is open is changed in steps, one at a time: a change of a guest,
// what is due, a new policy. A step begins with Host.lock, which gives what the lock guards
// (locked, and through it lockedGuest, publication, claim, group and slot), and ends with
// unlock, which decides and publishes what the step touched. listen(2) is called within the
// step, because its result decides what else is opened. Outside are traffic (flows, udpPort;
// door and target are what it needs of slots and claims), sessions, the look-up of who holds
// a port, and files.
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

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/port/table"
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
	err := errors.Join(
		positive("UDPIdle", &o.UDPIdle, time.Minute),
		positive("BackoffMin", &o.BackoffMin, 100*time.Millisecond),
		positive("BackoffMax", &o.BackoffMax, 10*time.Second),
		positive("MaxListeners", &o.MaxListeners, 4096),
		positive("MaxFlows", &o.MaxFlows, 8192),
		positive("MaxUDPClients", &o.MaxUDPClients, 1024),
	)
	if err != nil {
		return err
	}
	o.Grace = max(cmp.Or(o.Grace, 10*time.Second), 0)
	o.Hold = max(cmp.Or(o.Hold, 3*time.Second), 0)
	o.BackoffMax = max(o.BackoffMax, o.BackoffMin)
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

// positive sets an option that is not set, and refuses one that is negative.
func positive[T time.Duration | int](name string, v *T, unset T) error {
	if *v < 0 {
		return fmt.Errorf("host: %s %v: want a positive value", name, *v)
	}
	*v = cmp.Or(*v, unset)
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
	guests  []*guest        // in the order of Options.Guests
	running atomic.Bool     // Run was called
	timers  schedule.Signal // to runTimers: something may be due
	lookup  schedule.Signal // to findHolders: holders are to be looked up
	unsaved schedule.Signal // to saveMoved: moved is to be written
	wg      sync.WaitGroup  // listeners and flows

	mu    sync.Mutex // see lock; held over listen(2), not over more
	state locked
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
		unsaved:  schedule.NewSignal(),
		acceptor: own.NewAcceptor(opt.Logger, own.ForFlow),
	}
	h.state = locked{
		Host:    h,
		ctx:     context.Background(),
		policy:  opt.Policy,
		groups:  make(map[groupKey]*group),
		moved:   loadMoved(opt.MovedFile, opt.Logger),
		touched: make(map[*group]struct{}),
		changed: make(map[*publication]struct{}),
		anyPort: make(map[*slot]struct{}),
		unheld:  make(map[*slot]struct{}),
	}
	for _, o := range opt.Guests {
		g := newGuest(h, o)
		h.guests = append(h.guests, g)
		h.state.guests = append(h.state.guests, &g.state)
	}
	maps.DeleteFunc(h.state.moved, func(id ID, _ move) bool { // of a guest that is not configured any more
		return !slices.ContainsFunc(h.guests, func(g *guest) bool { return g.name == id.Guest })
	})
	return h, nil
}

// View returns the current publications.
func (h *Host) View() View { return h.table.View() }

// Subscribe returns a subscription to the publications; the caller closes it.
func (h *Host) Subscribe() *Subscription { return h.table.Subscribe() }

// Guests returns how the guests are doing, in the order of Options.Guests.
func (h *Host) Guests() []GuestStatus {
	l := h.lock()
	defer l.unlock()
	out := make([]GuestStatus, 0, len(l.guests))
	for _, g := range l.guests {
		s := g.status
		s.Publications, s.Flows = len(g.pubs), g.flows.Len()
		out = append(out, s)
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
func (h *Host) SetPolicy(p Policy) {
	l := h.lockToOpen()
	defer l.unlock()
	l.policy = p
	for _, g := range l.guests {
		g.reconsider()
	}
}

// Run follows the guests until ctx ends, then closes all and returns nil. It may
// be called once.
func (h *Host) Run(ctx context.Context) error {
	if h.running.Swap(true) {
		return errors.New("host: run a second time")
	}
	l := h.lock()
	l.ctx = ctx
	l.unlock()
	var loops sync.WaitGroup
	for _, g := range h.guests {
		loops.Go(func() { g.run(ctx) })
	}
	loops.Go(func() { h.runTimers(ctx) })
	loops.Go(func() { h.findHolders(ctx) })
	loops.Go(func() { h.saveMoved(ctx) })
	loops.Wait()
	h.withdraw()
	h.wg.Wait()
	return nil
}

// withdraw closes all listeners.
func (h *Host) withdraw() {
	l := h.lock()
	defer l.unlock()
	for _, g := range l.guests {
		g.withdraw()
	}
}
