// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/port"
)

// FuzzModel takes random steps with a host of one guest, and compares what the host keeps of
// a guest that was restarted, and where it opens ports that are in use, with a model.
func FuzzModel(f *testing.F) {
	for seed := range uint64(200) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		synctest.Test(t, func(t *testing.T) {
			m := newModel(t, seed)
			defer m.stop()
			for range 60 {
				op := m.op()
				synctest.Wait()
				m.log = append(m.log, op)
				if err := m.check(); err != nil {
					t.Fatalf("seed %d: %v\n%v", seed, err, m.log)
				}
			}
		})
	})
}

// model is what the host is to know. What it asks of moved ports are rules, and no numbers.
type model struct {
	t       *testing.T
	r       *rand.Rand
	network *memory
	file    string
	h       *Host
	stop    func()
	log     []string

	on     port.OnConflict
	denied uint16 // the guest port that the host's rules deny, 0 for none

	peer, sender    link.Peer
	life            int
	connected, away bool
	generation      uint64
	kept            map[port.Key]bool // of each publication
	closed          map[port.Key]bool // denied by the guest's rules
	keptEnd, grace  time.Time
	was             map[port.Key]uint16 // where it was open under rules that move ports
	freed           map[netip.AddrPort]time.Time
	open            map[port.Key]*memoryListener // at the last check
	last            map[port.Key]bool            // what kept was then
	number          map[port.Key]uint16          // where each was to be then
	ruled           bool                         // the rules have changed since
}

// universe are all publications: two servers of one host address, both families of a port, and
// two owners in the families of another.
var universe = []port.Key{
	key(port.TCP, any4, 80), key(port.TCP, any6, 80), key(port.TCP, lan, 80), key(port.TCP, any4, 81), key(port.TCP, any6, 81), key(port.TCP, any4, 82),
}

func publishing(k port.Key) port.Fact {
	p := pub(k)
	if k.Port == 81 {
		p.Owner = port.Owner{Kind: port.OwnerProcess, ID: k.Address.String()}
	}
	return p
}

// twin returns the publication of the same owner in the other family.
func twin(k port.Key) port.Key {
	other, ok := k.OtherFamily()
	if !ok || k.Port == 81 {
		return port.Key{}
	}
	return other
}

func newModel(t *testing.T, seed uint64) *model {
	m := &model{
		t: t, r: rand.New(rand.NewPCG(seed, 0)), network: newMemory(), file: filepath.Join(t.TempDir(), "moved.json"),
		peer: link.Peer{Name: "box", Identity: "0"}, on: port.OnConflictNext,
		was: make(map[port.Key]uint16), number: make(map[port.Key]uint16), freed: make(map[netip.AddrPort]time.Time),
	}
	m.start()
	return m
}

func (m *model) start() {
	m.h = idle(m.t, Options{Network: m.network, Holders: nobody{}, MovedFile: m.file, Policy: m.policy()}, "vm")
	ctx, cancel := context.WithCancel(m.t.Context())
	over := make(chan struct{})
	go func() {
		m.h.runTimers(ctx)
		close(over)
	}()
	m.stop = func() {
		cancel()
		<-over
		m.h.withdraw()
		m.h.wg.Wait()
	}
	m.connected, m.away, m.sender, m.keptEnd, m.grace = false, false, link.Peer{}, time.Time{}, time.Time{}
	m.open, m.last = nil, nil
	m.kept, m.closed = make(map[port.Key]bool), make(map[port.Key]bool)
}

func (m *model) policy() Policy {
	list := []rules.Rule{{OnConflict: m.on}}
	if m.denied != 0 {
		list = slices.Insert(list, 0, rules.Rule{Match: rules.Match{Ports: []rules.PortRange{{First: m.denied, Last: m.denied}}}, Deny: true})
	}
	return policy(m.t, rules.Loopback(), list...)
}

// op does something, and says what.
func (m *model) op() string {
	switch m.r.IntN(14) {
	case 0, 1, 2:
		return m.change()
	case 3:
		return m.snapshot(m.r.IntN(3) > 0)
	case 4:
		m.lose()
		return "lost " + m.snapshot(m.r.IntN(3) > 0)
	case 5:
		m.lose()
		m.life++
		m.peer = link.Peer{Name: [...]string{"box", "box", "box", "other"}[m.r.IntN(4)], Identity: fmt.Sprint(m.life)}
		return fmt.Sprintf("restart of %s %s", m.peer.Name, m.snapshot(m.r.IntN(4) > 0))
	case 6:
		m.lose()
		return "lost"
	case 7:
		return m.report()
	case 8, 9, 10:
		return m.wait([...]time.Duration{time.Second, 9 * time.Second, 16 * time.Second, 25 * time.Second}[m.r.IntN(4)])
	case 11:
		m.on = [...]port.OnConflict{port.OnConflictNext, port.OnConflictAny, port.OnConflictWait}[m.r.IntN(3)]
		m.denied = [...]uint16{0, 0, 81}[m.r.IntN(3)]
		m.h.SetPolicy(m.policy())
		m.ruled = true
		return fmt.Sprintf("rules %s, deny %d", m.on, m.denied)
	case 12:
		return m.take()
	}
	list := m.h.movedNow()
	m.stop()
	if err := writeMoved(m.file, list); err != nil {
		m.t.Fatal(err)
	}
	m.start()
	return "host restarted"
}

func (m *model) guest() *guest { return m.h.guests[0] }

func (m *model) some() (keys []port.Key) {
	rare := 2 + m.r.IntN(3)
	for _, k := range universe {
		if m.r.IntN(rare) == 0 {
			keys = append(keys, k)
		}
	}
	return keys
}

// snapshot has the guest send all that it publishes, in a new session if there is none.
func (m *model) snapshot(partial bool) string {
	keys := m.some()
	m.generation++
	step := whole(m.generation)
	for _, k := range keys {
		step.Put = append(step.Put, publishing(k))
	}
	if partial {
		step.Partial = []string{"docker"}
	}
	for k, kept := range m.kept {
		stays := kept || m.sender.Identity != m.peer.Identity
		if slices.Contains(keys, k) {
			m.kept[k] = false
		} else if partial && stays && m.sender.Name == m.peer.Name && !m.closed[k] && k.Port != m.denied {
			m.kept[k] = true
		} else {
			delete(m.kept, k)
		}
	}
	m.published(keys)
	l := m.guest().lock()
	l.status.Peer = m.peer
	l.unlock()
	m.apply(step)
	if !m.connected {
		m.guest().linked(nil)
	}
	m.sender, m.connected, m.away, m.grace = m.peer, true, false, time.Time{}
	return fmt.Sprintf("snapshot of %v, partial: %t", keys, partial)
}

func (m *model) apply(step replica.Step[port.Key, port.Fact]) {
	if err := m.guest().applyWanted(m.t.Context(), step); err != nil {
		m.t.Fatal(err)
	}
}

func (m *model) published(keys []port.Key) {
	for _, k := range keys {
		m.kept[k] = false
	}
	if !slices.Contains(slices.Collect(maps.Values(m.kept)), true) {
		m.keptEnd = time.Time{}
	} else if m.keptEnd.IsZero() {
		m.keptEnd = time.Now().Add(keptFor)
	}
}

// drop withdraws what is kept.
func (m *model) drop() {
	maps.DeleteFunc(m.kept, func(_ port.Key, kept bool) bool { return kept })
	m.keptEnd = time.Time{}
}

// change has the guest publish a few ports and withdraw others.
func (m *model) change() string {
	if !m.connected {
		return m.snapshot(true)
	}
	m.generation++
	step := change(m.generation)
	partial := m.r.IntN(4) > 0
	if partial {
		step.Partial = []string{"docker"}
	}
	put, gone := m.some(), m.some()
	gone = slices.DeleteFunc(gone, func(k port.Key) bool { return slices.Contains(put, k) || m.r.IntN(2) == 0 })
	for _, k := range put {
		step.Put = append(step.Put, publishing(k))
	}
	step.Removed = gone
	for _, k := range gone {
		delete(m.kept, k)
	}
	m.published(put)
	if !partial {
		m.drop()
	}
	m.apply(step)
	return fmt.Sprintf("put %v, removed %v, partial: %t", put, gone, partial)
}

// lose ends the session.
func (m *model) lose() {
	m.guest().parted()
	m.guest().lost(errors.New("lost"), "", false)
	if len(m.kept)+len(m.closed) > 0 && m.grace.IsZero() {
		m.grace = time.Now().Add(10 * time.Second)
	}
	m.away = m.away || m.connected
	m.connected = false
}

// report has the guest report which ports it does not publish, and why.
func (m *model) report() string {
	keys := m.some()
	step := replica.Step[port.Key, port.Fact]{Whole: true}
	clear(m.closed)
	for _, k := range keys {
		reason := [...]port.Reason{denial, waiting, withheld}[m.r.IntN(3)]
		step.Put = append(step.Put, port.Fact{Key: k, Decision: port.Decision{Reason: reason}})
		m.closed[k] = reason == denial
		if m.kept[k] && m.closed[k] {
			delete(m.kept, k)
		}
	}
	m.published(nil)
	if err := m.guest().applyUnpublished(m.t.Context(), step); err != nil {
		m.t.Fatal(err)
	}
	return fmt.Sprintf("does not publish %v, denies %v", keys, m.closed)
}

func (m *model) wait(d time.Duration) string {
	time.Sleep(d)
	now := time.Now()
	if !m.keptEnd.IsZero() && !m.keptEnd.After(now) {
		m.drop()
	}
	if !m.grace.IsZero() && !m.grace.After(now) {
		clear(m.kept)
		clear(m.closed)
		m.grace, m.keptEnd = time.Time{}, time.Time{}
	}
	return fmt.Sprint("wait ", d)
}

// take has another program of the host take an address that is free, or leave it.
func (m *model) take() string {
	a := netip.AddrPortFrom([...]netip.Addr{lo4, netip.IPv6Loopback()}[m.r.IntN(2)], uint16(80+m.r.IntN(5)))
	taken := !m.network.taken[a.String()]
	if m.network.isOpen(a) {
		return "nothing"
	}
	m.network.take(a.String(), taken)
	if !taken {
		m.freed[a] = time.Now()
	}
	return fmt.Sprintf("%s is taken: %t", a, taken)
}

func (m *model) check() error {
	m.network.mu.Lock()
	defer m.network.mu.Unlock()
	view := m.h.View()
	if view.Len() != len(m.kept) {
		return fmt.Errorf("%d publications, want %v", view.Len(), m.kept)
	}
	holds, open := make(map[netip.AddrPort]port.Key), make(map[port.Key]*memoryListener)
	for k, kept := range m.kept {
		p, ok := view.Get(ID{"vm", k})
		if !ok {
			return fmt.Errorf("%s is missing", k)
		}
		if want := kept || m.away; p.Lost != want {
			return fmt.Errorf("%s is lost: %t, want %t", k, p.Lost, want)
		}
		if len(p.Outcomes) != 1 {
			return fmt.Errorf("%s: %+v", k, p.Outcomes)
		}
		if o := p.Outcomes[0]; o.State == port.Active {
			if other, twice := holds[o.HostAddress]; twice || m.network.open[o.HostAddress.String()] == nil {
				return fmt.Errorf("%s at %s, where %s is", k, o.HostAddress, other)
			}
			holds[o.HostAddress] = k
			open[k] = m.network.open[o.HostAddress.String()]
			if old := m.open[k]; old != nil && old != open[k] && old.addr == open[k].addr && !m.joined(k) {
				return fmt.Errorf("%s was closed for a moment", k)
			}
		}
	}
	defer func() { m.open, m.last, m.ruled = open, maps.Clone(m.kept), false }()
	if n := len(m.network.open); n != len(holds) {
		return fmt.Errorf("%d ports are open, %d are active", n, len(holds))
	}
	for k := range m.kept {
		p, _ := view.Get(ID{"vm", k})
		if err := m.checkPort(k, p.Outcomes[0], holds); err != nil {
			return fmt.Errorf("%s is %+v: %w", k, p.Outcomes[0], err)
		}
	}
	return nil
}

// checkPort checks where a publication is.
func (m *model) checkPort(k port.Key, o port.Outcome, holds map[netip.AddrPort]port.Key) error {
	at := o.HostAddress.Port()
	moves := m.on != port.OnConflictWait
	switch {
	case k.Port == m.denied:
		if o.State != port.Denied {
			return errors.New("not denied")
		}
		return nil
	case !moves && at != k.Port:
		return errors.New("moved without a rule")
	case moves && !m.kept[k] && o.State != port.Active:
		return errors.New("not open anywhere")
	case o.State == port.Conflict && !m.kept[k] && m.kept[holds[o.HostAddress]]:
		return errors.New("what is only kept has its address")
	case o.State == port.Conflict && !m.busy(k, k.Port, holds) && !m.busy(k, at, holds):
		return errors.New("a conflict with nobody")
	}
	_, both := m.kept[twin(k)]
	if m.kept[k] && m.last[k] && !m.ruled && !both && at != m.number[k] {
		return fmt.Errorf("moved from %d while it was kept", m.number[k])
	}
	m.number[k] = at
	if wanted := o.State != port.Active || cmp.Or(o.Reason.Code() == port.Moved && o.Reason.Args()[0] == fmt.Sprint(k.Port), at == k.Port); !wanted {
		return errors.New("does not say where it was to be")
	}
	if !moves {
		delete(m.was, k)
		return nil
	}
	if m.was[k] == 0 && !both && at != k.Port && !m.busy(k, k.Port, holds) {
		return errors.New("moved from a number that nobody has")
	}
	if was := m.was[k]; was != 0 && was != at && !m.busy(k, was, holds) && !m.joined(k) {
		return fmt.Errorf("moved from %d, which nobody has", was)
	}
	if o.State == port.Active {
		m.was[k] = at
	}
	if kept, there := m.kept[twin(k)]; there && !kept && !m.kept[k] {
		if t, _ := m.h.View().Get(ID{"vm", twin(k)}); t.Outcomes[0].HostAddress.Port() != at {
			return fmt.Errorf("the other family is at %s", t.Outcomes[0].HostAddress)
		}
	}
	return nil
}

// joined reports whether one of the families of k came since the last check: the other may move
// to where that one is, and on.
func (m *model) joined(k port.Key) bool {
	other := twin(k)
	_, is := m.kept[other]
	_, was := m.last[other]
	_, wasThere := m.last[k]
	return is && (!was || !wasThere)
}

// busy reports whether somebody else has a number, or had it a short while ago, in the family
// of k or that of its twin.
func (m *model) busy(k port.Key, n uint16, holds map[netip.AddrPort]port.Key) bool {
	for _, a := range []netip.AddrPort{at(lo4, n), at(netip.IPv6Loopback(), n)} {
		other, held := holds[a]
		recently := !m.freed[a].IsZero() && time.Since(m.freed[a]) <= conflictMax
		if m.network.taken[a.String()] || recently || held && other != k && other != twin(k) {
			return true
		}
	}
	return false
}
