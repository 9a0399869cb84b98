// SPDX-License-Identifier: Apache-2.0

// Package gvproxy is the sink for the port forwarder of gvisor-tap-vsock, which
// Rancher Desktop's host-switch and Podman machine's gvproxy serve.
//
// The sink lists the peer's forwards when a connection is made, when one ends (the
// connection of the last call is kept open, so that a restart is noticed at once),
// after an answer that the list does not explain, and every Audit. In between, it
// applies its own changes to its copy of the list.
package gvproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Options configures a Sink. Logger is required.
type Options struct {
	// URLs are tried in order: http://HOST[:PORT] or unix:///PATH, each with an
	// optional ?guest=ADDRESS, the guest's address as the peer knows it, and
	// &peer=ADDRESS, from which it connects. Without them, these are the addresses of
	// the connection. DefaultURLs if empty.
	URLs []string
	// Bridges serve what the peer cannot connect to; nil for none. The sink closes
	// them at the end of Run.
	Bridges *peer.Bridges
	// Memory is the file that lists which of the peer's entries are ours; "" for none.
	Memory peer.Memory
	// Timeout bounds each call; 2 s if 0.
	Timeout time.Duration
	// Audit is the time between two listings of the peer's forwards; 30 s if 0.
	Audit time.Duration
	// Dial is a net.Dialer's if nil.
	Dial   func(ctx context.Context, network, address string) (net.Conn, error)
	Logger *slog.Logger

	retryMax    time.Duration // retryMax if 0
	narrowMin   time.Duration // narrowMin if 0
	farewell    time.Duration // peer.Farewell if 0
	othersGrace time.Duration // othersGrace if 0
	markers     []string      // peer.PodmanMarkers if empty
}

// Sink keeps the entries of one peer. It implements reconcile.Sink.
type Sink struct {
	o          Options
	log        *slog.Logger
	apis       []*api
	wake       schedule.Signal
	look       schedule.Signal // notifies Run that the peer must be listed
	retryMoved schedule.Signal // notifies Run of another retry time
	relist     schedule.Signal // like look, but the peer is listed once a second at most

	mu     sync.Mutex
	api    *api // nil while no peer answers
	reason port.Reason
	retry  time.Time // of the first entry that is to be tried again

	syncing sync.Mutex // held by Sync, while listing, and at the end; guards what follows
	closed  bool
	driver  *peer.Driver
	have    peer.Targets[entry] // the peer's list, as far as it is tcp and udp
	refused peer.Targets[refused]
	unsure  peer.Targets[struct{}]  // asked for, without an answer, since have is new
	left    map[port.Slot]time.Time // slots that others' entries left, and until when they are left alone
	pauses  map[port.Slot]*pause
	listed  bool // have is new
	again   bool // narrower addresses are to be asked for in place of a wildcard
	podman  bool // Podman opens the ports of its containers
}

// New checks the options, reads the memory and starts nothing: see Run.
func New(o Options) (*Sink, error) {
	if o.Logger == nil {
		return nil, errors.New("gvproxy: a logger is required")
	}
	if o.Timeout < 0 || o.Audit < 0 {
		return nil, fmt.Errorf("gvproxy: timeout %v, audit %v: want 0 (the default) or more", o.Timeout, o.Audit)
	}
	o.Timeout = cmp.Or(o.Timeout, 2*time.Second)
	o.Audit = cmp.Or(o.Audit, 30*time.Second)
	o.retryMax = cmp.Or(o.retryMax, retryMax)
	o.narrowMin = cmp.Or(o.narrowMin, narrowMin)
	o.farewell = cmp.Or(o.farewell, peer.Farewell)
	o.othersGrace = cmp.Or(o.othersGrace, othersGrace)
	if len(o.markers) == 0 {
		o.markers = peer.PodmanMarkers()
	}
	if o.Dial == nil {
		d := &net.Dialer{
			Timeout: peer.DialTimeout,
			// Connections over a virtual network that is gone do not end by themselves.
			KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 3 * time.Second, Interval: time.Second, Count: 3},
		}
		d.SetMultipathTCP(false)
		o.Dial = d.DialContext
	}
	if len(o.URLs) == 0 {
		o.URLs = DefaultURLs()
	}
	s := &Sink{
		o: o, log: o.Logger, reason: port.Because(port.NotConnected),
		wake: schedule.NewSignal(), look: schedule.NewSignal(), retryMoved: schedule.NewSignal(), relist: schedule.NewSignal(),
		have: make(peer.Targets[entry]), refused: make(peer.Targets[refused]), unsure: make(peer.Targets[struct{}]),
		left: make(map[port.Slot]time.Time), pauses: make(map[port.Slot]*pause),
	}
	var err error
	if s.podman, err = opensContainerPorts(o.markers...); err != nil {
		s.log.Warn("cannot read Podman's marker; leaving its ports to Podman", "err", err)
	}
	for _, u := range o.URLs {
		a, err := newAPI(u, o.Dial, o.Timeout)
		if err != nil {
			return nil, err
		}
		s.apis = append(s.apis, a)
	}
	s.driver = peer.NewDriver(o.Memory, o.Bridges, s.wake, o.Logger)
	return s, nil
}

// Name implements reconcile.Sink.
func (s *Sink) Name() string { return "gvproxy" }

// Wake implements reconcile.Sink.
func (s *Sink) Wake() <-chan struct{} { return s.wake }

// Run watches the peer until ctx ends, and then removes the entries that are ours.
func (s *Sink) Run(ctx context.Context) error {
	defer func() {
		for _, a := range s.apis {
			a.close()
		}
	}()
	var wg sync.WaitGroup
	// Connections do not end when a virtual network breaks, but its interface goes
	// down or loses its carrier.
	wg.Go(func() { peer.WatchNetwork(ctx, s.log, s.relist.Notify) })
	defer wg.Wait()
	pace := peer.NewPace()
	for ctx.Err() == nil {
		a := s.find(ctx)
		pace.Begin(a != nil)
		if a == nil {
			pace.Down(ctx)
			continue
		}
		if s.await(ctx, a) {
			pace.End(ctx)
		}
	}
	s.leave(context.WithoutCancel(ctx))
	s.driver.Close()
	return ctx.Err()
}

// What await does at a time.
type due uint8

const (
	dueAudit  due = iota // list the peer's forwards
	dueRelist            // the same, after links or addresses changed, or an answer made it likely that it has others
	dueRetry             // wake Sync: entries are to be tried again
)

// await waits for a reason to list the peer's forwards again, and reports whether
// that is the end of a connection.
func (s *Sink) await(ctx context.Context, a *api) (ended bool) {
	begin := time.Now()
	var deadlines schedule.Deadlines[due]
	deadlines.Set(dueAudit, begin.Add(s.o.Audit))
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		deadlines.Set(dueRetry, s.nextRetry())
		timer.Reset(time.Until(deadlines.Next()))
		select {
		case <-ctx.Done():
			return false
		case <-a.ended:
			return true
		case <-s.look:
			return false
		case <-s.retryMoved:
		case <-s.relist: // containers bring links too: not more often than each second
			deadlines.Set(dueRelist, begin.Add(time.Second))
		case <-timer.C:
			now := time.Now()
			if deadlines.Due(dueAudit, now) || deadlines.Due(dueRelist, now) {
				return false
			}
			if deadlines.Due(dueRetry, now) {
				s.setRetry(time.Time{})
				s.wake.Notify()
			}
		}
	}
}

// nextRetry returns when the next entry is to be tried again, zero for never.
func (s *Sink) nextRetry() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.retry
}

// setRetry sets it, and reports whether it is another time.
func (s *Sink) setRetry(at time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := !s.retry.Equal(at)
	s.retry = at
	return changed
}

// find returns a peer that lists its forwards, nil if there is none. The last one is
// tried first.
func (s *Sink) find(ctx context.Context) *api {
	s.mu.Lock()
	last := s.api
	s.mu.Unlock()
	if last != nil {
		err := s.lookAt(ctx, last)
		if err == nil {
			return last
		}
		if ctx.Err() != nil {
			return nil
		}
		s.setDown(last, err)
	}
	var errs []error
	for _, a := range s.apis {
		if err := a.unknown(time.Now()); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", a.text, err))
			continue
		}
		err := s.lookAt(ctx, a)
		if err == nil {
			return a
		}
		if ctx.Err() != nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", a.text, err))
	}
	s.setAbsent(errs)
	return nil
}

// lookAt lists a peer's forwards and makes the peer the current one.
func (s *Sink) lookAt(ctx context.Context, a *api) error {
	s.mu.Lock()
	current := s.api == a
	s.mu.Unlock()
	if current { // a Sync would change the list meanwhile
		s.syncing.Lock()
		defer s.syncing.Unlock()
	}
	select { // forget a connection that ended earlier
	case <-a.ended:
	default:
	}
	all, err := a.list(ctx)
	if err != nil {
		return err
	}
	if !current {
		s.syncing.Lock()
		defer s.syncing.Unlock()
	}
	s.adopt(all, !current)
	s.mu.Lock()
	s.api, s.reason = a, port.Reason{}
	s.mu.Unlock()
	if !current {
		s.log.Info("peer found", "peer", a.text, "guest", a.guestAddr(), "forwards", len(all))
	}
	s.wake.Notify()
	return nil
}

func (s *Sink) setDown(a *api, err error) {
	s.mu.Lock()
	s.api = nil
	s.mu.Unlock()
	a.close()
	s.log.Warn("peer failed; retrying", "peer", a.text, "err", err)
}

func (s *Sink) setAbsent(errs []error) {
	var why []string
	for _, err := range errs {
		why = append(why, err.Error())
	}
	reason := port.Because(port.NoPeer, strings.Join(why, "; "))
	s.mu.Lock()
	changed := s.reason != reason
	s.reason = reason
	s.mu.Unlock()
	if changed {
		s.log.Info("no peer answers; retrying", "reason", reason)
		s.wake.Notify()
	}
}

// Sync implements reconcile.Sink. Without a peer all is pending, which is not an
// error: Wake notifies when there is one.
func (s *Sink) Sync(ctx context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	s.syncing.Lock()
	defer s.syncing.Unlock()
	if s.closed {
		return nil, nil
	}
	s.driver.Update(want, change)
	s.mu.Lock()
	a, reason := s.api, s.reason
	s.mu.Unlock()
	if a == nil {
		s.driver.KeepBridges()
		return s.driver.Pending(change, reason), nil
	}
	if s.driver.Present() || s.listed {
		s.listed = false
		s.driver.MarkAll()
	}
	err := s.driver.Apply(ctx, session{s, a})
	if s.again && err == nil {
		err = s.driver.Apply(ctx, session{s, a})
	}
	s.again = false
	s.planRetry()
	if err != nil && ctx.Err() != nil {
		return s.driver.Outcomes(), fmt.Errorf("%w: %s: %w", reconcile.ErrPending, a.text, err)
	}
	if err != nil { // Run lists the peer's forwards, and then all is applied again
		s.log.Debug("peer must be listed", "peer", a.text, "err", err)
		s.listed = true
		s.look.Notify()
	}
	return s.driver.Outcomes(), nil
}

// Reset resets the connections through bridges to publications that a rule forbids.
func (s *Sink) Reset(keys []port.Key) { s.driver.Reset(keys) }

// leave removes the entries that are ours.
func (s *Sink) leave(ctx context.Context) {
	s.syncing.Lock()
	defer s.syncing.Unlock()
	s.closed = true
	s.mu.Lock()
	a := s.api
	s.mu.Unlock()
	if a == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.o.farewell)
	defer cancel()
	s.driver.Leave(ctx, session{s, a})
}
