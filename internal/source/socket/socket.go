// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package socket is the source of ports that have a socket of their own: TCP
// listeners, TCP sockets that are bound only, and bound UDP sockets of the
// watched network namespace, as the observer sees them.
package socket

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/cgroup"
	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/registry"
)

// Name is the source's name in rules and status.
const Name = port.SourceSocket

// Observer is what the source needs of an observer.
type Observer interface {
	Run(ctx context.Context, h observer.Handler) error
}

// Options configures a Source.
type Options struct {
	Observer Observer
	// Own reports whether a socket cookie is of the agent's own: never published.
	Own    func(cookie uint64) bool
	Logger *slog.Logger
}

func (o Options) validate() error {
	switch {
	case o.Observer == nil:
		return errors.New("socket source: Observer is missing")
	case o.Own == nil:
		return errors.New("socket source: Own is missing")
	case o.Logger == nil:
		return errors.New("socket source: Logger is missing")
	}
	return nil
}

// Source turns sockets into bindings.
type Source struct{ o Options }

// New returns a source. It starts nothing.
func New(o Options) (*Source, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	return &Source{o}, nil
}

// Name returns "socket".
func (s *Source) Name() string { return Name }

// Run feeds the registry until ctx ends.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	tree, err := cgroup.Open("")
	if err != nil {
		s.o.Logger.Warn("cgroups cannot be read; sockets are not attributed to containers", "err", err)
	} else {
		defer func() { _ = tree.Close() }()
	}
	h := &handler{feed: feed, own: s.o.Own, ifname: interfaceName, processes: newProcesses(newProcfs(), tree)}
	defer h.stop()
	return s.o.Observer.Run(ctx, h)
}

// boundDelay is how long a TCP socket that was bound may take until it listens.
// Nearly all do at once, and to say both would cost a second pass through all
// tables just when the first message is wanted.
const boundDelay = 5 * time.Millisecond

// handler translates.
type handler struct {
	feed   registry.Feed
	own    func(uint64) bool
	ifname func(index uint32) string

	mu        sync.Mutex // guards what follows, and the order of what is fed
	processes *processes
	bound     map[uint64]port.Binding // by cookie: not told yet, as it may listen at once
	timer     *time.Timer             // tells what is bound; nil before the first
	stopped   bool
}

func (h *handler) Replace(sockets []observer.Socket) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bound = make(map[uint64]port.Binding) // among all
	h.processes.next()
	set := make([]port.Binding, 0, len(sockets))
	keep := make(map[uint64]struct{}, len(sockets))
	for i := range sockets {
		if !h.own(sockets[i].Cookie) {
			set = append(set, h.binding(&sockets[i]))
			keep[sockets[i].Cookie] = struct{}{}
		}
	}
	h.processes.retain(keep)
	h.feed.Replace(set)
}

func (h *handler) Apply(events []observer.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	// Within a batch the last event of a cookie decides.
	var last map[uint64]int
	var c port.Change
	if len(events) > 1 {
		last = make(map[uint64]int, len(events))
		for i := range events {
			last[events[i].Socket.Cookie] = i
		}
		c.Put = make([]port.Binding, 0, len(last))
	}
	h.processes.next()
	for i := range events {
		s := &events[i].Socket
		if last != nil && last[s.Cookie] != i {
			continue
		}
		switch {
		case h.own(s.Cookie):
			delete(h.bound, s.Cookie)
		case events[i].Gone:
			c.Drop = append(c.Drop, origin(s))
			delete(h.bound, s.Cookie)
			h.processes.forget(s.Cookie)
		case h.mayListen(s):
			h.bound[s.Cookie] = h.binding(s)
		default:
			delete(h.bound, s.Cookie)
			c.Put = append(c.Put, h.binding(s))
		}
	}
	if h.timer != nil && len(h.bound) == 0 {
		h.timer.Stop()
	}
	if len(c.Put)+len(c.Drop) > 0 {
		h.feed.Apply(c)
	}
}

// mayListen reports whether a socket is one that was bound just now. Its process
// is looked at while it lives, and the socket is told when it listens, or after
// boundDelay.
func (h *handler) mayListen(s *observer.Socket) bool {
	if s.Listening || s.Observed == 0 || h.stopped {
		return false
	}
	if _, young := h.bound[s.Cookie]; young {
		return true
	}
	if h.processes.knows(s.Cookie) {
		return false // it was told, and maybe as one that listens
	}
	switch {
	case len(h.bound) > 0:
	case h.timer == nil:
		h.bound = make(map[uint64]port.Binding)
		h.timer = time.AfterFunc(boundDelay, h.tellBound)
	default:
		h.timer.Reset(boundDelay)
	}
	return true
}

// tellBound tells of the sockets that were bound and do not listen.
func (h *handler) tellBound() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped || len(h.bound) == 0 {
		return
	}
	c := port.Change{Put: slices.Collect(maps.Values(h.bound))}
	h.bound = make(map[uint64]port.Binding) // a cleared map would keep its room
	h.feed.Apply(c)
}

// stop ends what runs by itself.
func (h *handler) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
	if h.timer != nil {
		h.timer.Stop()
	}
}

func (h *handler) Stale(err error) { h.feed.Stale(err) }

// Methods says "fentry" where all capabilities use one, else what each uses.
func (h *handler) Methods(methods []kernel.Method) {
	var order []string
	uses := map[string][]string{}
	for _, r := range methods {
		if r.Capability == observer.UDPDump {
			continue // how a dump is read, not how sockets are observed
		}
		if uses[r.Name] == nil {
			order = append(order, r.Name)
		}
		uses[r.Name] = append(uses[r.Name], r.Capability)
	}
	if len(order) == 1 {
		h.feed.Method(order[0])
		return
	}
	var parts []string
	for _, name := range order {
		parts = append(parts, fmt.Sprintf("%s (%s)", name, strings.Join(uses[name], ", ")))
	}
	h.feed.Method(strings.Join(parts, ", "))
}

func origin(s *observer.Socket) port.Origin {
	return port.Origin{Source: Name, ID: strconv.FormatUint(s.Cookie, 16)}
}

func (h *handler) binding(s *observer.Socket) port.Binding {
	addr := s.Address
	if s.Device != 0 && addr.IsLinkLocalUnicast() && addr.Is6() {
		addr = addr.WithZone(h.ifname(s.Device))
	}
	hints, made := h.processes.hints(s)
	b := port.Binding{
		Key:       port.Key{Protocol: s.Protocol, Address: addr, Port: s.Port},
		Origin:    origin(s),
		DualStack: addr == netip.IPv6Unspecified() && !s.V6Only,
		Dial:      dial(addr, s.Port, s.V6Only),
		Hints:     hints,
		Observed:  s.Observed,
	}
	b.Owner, b.Detail = ownerOf(s, made)
	switch {
	case !s.Listening:
		b.Withheld = "bound, not listening"
		b.Dial = nil
	case s.Device != 0 && !addr.IsLinkLocalUnicast() && h.ifname(s.Device) != "lo":
		b.Withheld = "bound to interface " + h.ifname(s.Device) + ": not reachable from the guest itself"
		b.Dial = nil
	}
	return b
}

// dial returns where the guest itself reaches a socket bound to addr.
func dial(addr netip.Addr, p uint16, v6only bool) []netip.AddrPort {
	if !addr.IsUnspecified() {
		return []netip.AddrPort{netip.AddrPortFrom(addr, p)}
	}
	own := netip.AddrPortFrom(port.Loopback(addr), p)
	if addr.Is6() && !v6only {
		return []netip.AddrPort{netip.AddrPortFrom(port.Loopback(netip.IPv4Unspecified()), p), own}
	}
	return []netip.AddrPort{own}
}

// ownerOf names the process behind a socket, and says for people what it is.
func ownerOf(s *observer.Socket, made *process) (port.Owner, string) {
	switch {
	case s.PID == 0 && s.Comm == "":
		return port.Owner{}, "socket of an unknown process"
	case s.PID == 0:
		return port.Owner{Kind: port.OwnerProcess, Name: s.Comm}, "process of another pid namespace (" + s.Comm + ")"
	case made != nil:
		return made.owner, made.detail
	}
	return owner(s.PID, s.Comm, "")
}

// owner names a process: its number, its name and what it executes, if that is known.
func owner(pid uint32, name, exe string) (port.Owner, string) {
	id := strconv.FormatUint(uint64(pid), 10)
	detail := "pid " + id + " (" + name + ")"
	if exe != "" {
		detail += ", " + exe
	}
	return port.Owner{Kind: port.OwnerProcess, Name: name, ID: id}, detail
}

// interfaceName falls back to the number, which is as good a zone.
func interfaceName(index uint32) string {
	if i, err := net.InterfaceByIndex(int(index)); err == nil {
		return i.Name
	}
	return strconv.FormatUint(uint64(index), 10)
}
