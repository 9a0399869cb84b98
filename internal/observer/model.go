// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
)

// scope is a set of kinds of sockets.
type scope uint8

const (
	scopeTCPListen scope = 1 << iota
	scopeTCPBound
	scopeUDP

	scopeAll = scopeTCPListen | scopeTCPBound | scopeUDP
)

func scopeOf(s *Socket) scope {
	switch {
	case s.Protocol == port.UDP:
		return scopeUDP
	case s.Listening:
		return scopeTCPListen
	}
	return scopeTCPBound
}

// row is one socket of a dump.
type row struct {
	socket Socket
	// client marks a UDP socket that by all that the dump says may as well be a
	// client that never was bound. It is shown only if an event said otherwise.
	client bool
}

type entry struct {
	socket Socket
	mark   uint32 // the dump that last had this socket
	// tracked says that the kernel's hooks know to report the end of this
	// socket: they do so by themselves if they saw its beginning.
	tracked bool
	// ownerSought says that /proc has been searched for the owner.
	ownerSought bool
}

// model is the state of the observer: which sockets there are, by cookie. It
// does no input or output and is not safe for concurrent use.
type model struct {
	sockets map[uint64]*entry

	// touched has the cookies that had an event since the dump under way began;
	// nil when there is none.
	touched map[uint64]struct{}
	mark    uint32

	// portless has listeners whose port was not yet chosen at the event.
	portless map[uint64]Socket

	// nameless has sockets for which the kernel had no cookie at the event, by
	// inode, so that the row of a dump can be given their process.
	nameless map[uint32]Socket

	// connecting has UDP sockets that may get a peer.
	connecting map[uint64]struct{}

	// closed has the cookies of the TCP sockets that were closed last, from
	// nextClosed on the oldest first. For a moment the kernel still has such a
	// socket, with its port: a dump may take it for one that is bound only.
	closed     [maxClosed]uint64
	nextClosed int

	// bound says that TCP sockets that do not listen are of interest.
	bound bool
}

// maxClosed is far more than there are calls of close(2) under way at one time.
const maxClosed = 64

// maxNameless bounds what waits for a dump; the dump finds the socket anyway.
const maxNameless = 4096

func newModel() *model {
	return &model{
		sockets:    make(map[uint64]*entry),
		portless:   make(map[uint64]Socket),
		nameless:   make(map[uint32]Socket),
		connecting: make(map[uint64]struct{}),
	}
}

// apply takes in one event. It returns the change to tell, if ok; and the kinds
// of sockets that a dump is needed for to understand the event.
func (m *model) apply(r *record) (e Event, ok bool, ask scope) {
	s := r.socket
	cookie := s.Cookie
	if cookie == 0 {
		// A hook that cannot make a cookie. If nobody else has made one, then no
		// dump has seen the socket and its end is of no interest.
		if r.kind != bpf.SockEventKindEVENT_BIND && r.kind != bpf.SockEventKindEVENT_LISTEN {
			return Event{}, false, 0
		}
		if s.Inode != 0 && len(m.nameless) < maxNameless {
			m.nameless[s.Inode] = s
		}
		s.Listening = s.Protocol == port.UDP || r.kind == bpf.SockEventKindEVENT_LISTEN
		return Event{}, false, scopeOf(&s)
	}
	if r.kind == bpf.SockEventKindEVENT_CHECK {
		if _, known := m.sockets[cookie]; !known {
			return Event{}, false, 0
		}
		m.connecting[cookie] = struct{}{}
		return Event{}, false, scopeUDP
	}
	if m.touched != nil {
		m.touched[cookie] = struct{}{}
	}
	delete(m.portless, cookie)
	delete(m.connecting, cookie)

	switch r.kind {
	case bpf.SockEventKindEVENT_BIND:
		s.Listening = s.Protocol == port.UDP || r.state == tcpListen
	case bpf.SockEventKindEVENT_LISTEN:
		s.Listening = true
		if s.Port == 0 {
			m.portless[cookie] = s
			return Event{}, false, scopeTCPListen
		}
	case bpf.SockEventKindEVENT_UNLISTEN:
		// Who shuts a socket down need not be who serves it.
		if old := m.sockets[cookie]; old != nil {
			s.PID, s.Comm, s.PIDSeen = old.socket.PID, old.socket.Comm, old.socket.PIDSeen
		}
	default: // close, connect
		if r.kind == bpf.SockEventKindEVENT_CLOSE && s.Protocol == port.TCP {
			m.closed[m.nextClosed] = cookie
			m.nextClosed = (m.nextClosed + 1) % maxClosed
		}
		return m.drop(cookie, s.Observed)
	}
	if s.Port == 0 || !s.Listening && !m.bound {
		return m.drop(cookie, s.Observed)
	}
	return m.put(s)
}

func (m *model) put(s Socket) (Event, bool, scope) {
	en := m.sockets[s.Cookie]
	if en == nil {
		en = new(entry)
		m.sockets[s.Cookie] = en
	} else {
		same := s
		same.Observed = en.socket.Observed
		if same.PID == en.socket.PID {
			same.PIDSeen = en.socket.PIDSeen
		}
		if same == en.socket {
			return Event{}, false, 0
		}
	}
	en.socket = s
	en.tracked = true
	return Event{Socket: s}, true, 0
}

func (m *model) drop(cookie uint64, observed int64) (Event, bool, scope) {
	en := m.sockets[cookie]
	if en == nil {
		return Event{}, false, 0
	}
	delete(m.sockets, cookie)
	s := en.socket
	s.Observed = observed
	return Event{Gone: true, Socket: s}, true, 0
}

// begin says that a dump begins: from here on, an event decides its cookie.
func (m *model) begin() {
	m.mark++
	m.touched = make(map[uint64]struct{})
}

// end says that the dump is over.
func (m *model) end() { m.touched = nil }

// merge takes in the rows of a dump and appends the changes to out. All events
// of the time of the dump must have been applied. It may be called more than
// once between begin and end; sockets that have gone are dropped by expire.
func (m *model) merge(rows []row, out []Event) []Event {
	for i := range rows {
		r := &rows[i]
		cookie := r.socket.Cookie
		if waiting, ok := m.portless[cookie]; ok && r.socket.Listening {
			delete(m.portless, cookie)
			waiting.Port, waiting.Address = r.socket.Port, r.socket.Address
			waiting.V6Only = r.socket.V6Only
			if e, ok, _ := m.put(waiting); ok {
				out = append(out, e)
			}
		} else if _, ok := m.touched[cookie]; !ok {
			out = m.mergeRow(r, out)
		}
		if en := m.sockets[cookie]; en != nil {
			en.mark = m.mark
		}
	}
	return out
}

func (m *model) mergeRow(r *row, out []Event) []Event {
	s := r.socket
	if !s.Listening && !m.bound || s.Port == 0 {
		return out
	}
	en := m.sockets[s.Cookie]
	if en == nil {
		waiting, named := m.nameless[s.Inode]
		if named {
			named = waiting.Protocol == s.Protocol
		}
		if r.client && !named || !s.Listening && slices.Contains(m.closed[:], s.Cookie) {
			return out
		}
		if named {
			delete(m.nameless, s.Inode)
			s.PID, s.Comm, s.PIDSeen = waiting.PID, waiting.Comm, waiting.PIDSeen
			s.Observed = waiting.Observed
			if s.CgroupID == 0 {
				s.CgroupID = waiting.CgroupID
			}
		}
		m.sockets[s.Cookie] = &entry{socket: s}
		return append(out, Event{Socket: s})
	}
	// The event knew the process; the dump knows the rest.
	old := &en.socket
	changed := s.Protocol != old.Protocol || s.Address != old.Address || s.Port != old.Port ||
		s.V6Only != old.V6Only || s.Listening != old.Listening || s.Device != old.Device
	if old.Inode == 0 {
		old.Inode = s.Inode
	}
	if old.CgroupID == 0 {
		old.CgroupID = s.CgroupID
	}
	if !changed {
		return out
	}
	old.Protocol, old.Address, old.Port = s.Protocol, s.Address, s.Port
	old.V6Only, old.Listening, old.Device = s.V6Only, s.Listening, s.Device
	old.Observed = 0
	return append(out, Event{Socket: *old})
}

// absent counts the sockets that the dump covered and did not have.
func (m *model) absent(covered scope) int {
	n := 0
	for cookie, en := range m.sockets {
		if m.expired(cookie, en, covered) {
			n++
		}
	}
	return n
}

func (m *model) expired(cookie uint64, en *entry, covered scope) bool {
	if en.mark == m.mark || scopeOf(&en.socket)&covered == 0 {
		return false
	}
	_, touched := m.touched[cookie]
	return !touched
}

// expire drops the sockets that the dump covered and did not have.
func (m *model) expire(covered scope, out []Event) []Event {
	for cookie, en := range m.sockets {
		if m.expired(cookie, en, covered) {
			if e, ok, _ := m.drop(cookie, 0); ok {
				out = append(out, e)
			}
			delete(m.connecting, cookie)
		}
	}
	return out
}

// forgetWaiting gives up on what no dump has explained.
func (m *model) forgetWaiting() {
	clear(m.portless)
	clear(m.nameless)
	clear(m.connecting)
}

// all returns the complete set.
func (m *model) all() []Socket {
	set := make([]Socket, 0, len(m.sockets))
	for _, en := range m.sockets {
		set = append(set, en.socket)
	}
	return set
}
