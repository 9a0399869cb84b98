// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
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
	// client marks a UDP socket that may be a client that never was bound: the
	// dump does not tell. It counts only if an event reported its bind.
	client bool
}

type entry struct {
	socket Socket
	mark   uint32 // the dump that last had this socket
	// tracked says that the hooks will report the end of this socket. They track
	// it by themselves if they saw its beginning.
	tracked bool
	// searches is how often /proc was searched for the owner while it was unknown;
	// partial, how often in vain where it could not be read in full.
	searches, partial uint8
	// passed: more than one process used it, and the owner is to be searched for.
	passed bool
}

// model is the state of the observer: which sockets there are, by cookie. It
// does no input or output and is not safe for concurrent use.
type model struct {
	sockets map[uint64]*entry
	peak    compact.Peak // of sockets

	// touched has the cookies that had an event since the current dump began, or
	// shortly before; nil if there is no dump.
	touched map[uint64]struct{}
	mark    uint32

	// noPort has listeners whose port was not yet chosen at their event.
	noPort map[uint64]Socket

	// noCookie has sockets for which the kernel had no cookie at their event, by
	// inode. It gives a row of a dump its process.
	noCookie map[uint32]Socket

	// connecting has UDP sockets that may get a peer.
	connecting map[uint64]struct{}

	// closed has the cookies of the TCP sockets that were closed last, a ring with
	// the oldest at nextClosed. For a moment the kernel keeps such a socket and its
	// port: a dump would show it as one that is bound only.
	closed     [maxClosed]uint64
	nextClosed int

	// bound says that TCP sockets that do not listen are of interest.
	bound bool

	fresh map[uint64]time.Time // sockets whose process is new and to be looked at, since when
}

// maxClosed is far more than calls of close(2) that run at one time.
const maxClosed = 64

// maxNoCookie bounds the sockets that wait for a dump, which finds them anyway.
const maxNoCookie = 4096

func newModel() *model {
	return &model{
		sockets:    make(map[uint64]*entry),
		noPort:     make(map[uint64]Socket),
		noCookie:   make(map[uint32]Socket),
		connecting: make(map[uint64]struct{}),
		fresh:      make(map[uint64]time.Time),
	}
}

// apply takes in one event. It returns the change to report, if ok, and the kinds
// of sockets of which a dump is needed to understand the event.
func (m *model) apply(r *record) (e Event, ok bool, need scope) {
	s := r.socket
	cookie := s.Cookie
	if cookie == 0 {
		// This hook cannot make a cookie. If nothing else has made one, then no
		// dump has seen the socket and its end does not matter.
		if r.kind != bpf.SockEventKindEVENT_BIND && r.kind != bpf.SockEventKindEVENT_LISTEN {
			return Event{}, false, 0
		}
		if s.Inode != 0 && len(m.noCookie) < maxNoCookie {
			if old, ok := m.noCookie[s.Inode]; ok && old.PID != s.PID {
				s.takeProcess(&Socket{}) // either may be older: it is searched for
			}
			m.noCookie[s.Inode] = s
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
	if r.kind == bpf.SockEventKindEVENT_DEVICE {
		return m.setDevice(&s)
	}
	m.touch(cookie)
	delete(m.noPort, cookie)
	delete(m.connecting, cookie)

	switch r.kind {
	case bpf.SockEventKindEVENT_BIND:
		s.Listening = s.Protocol == port.UDP || r.state == tcpListen
	case bpf.SockEventKindEVENT_LISTEN:
		s.Listening = true
		if s.Port == 0 {
			m.noPort[cookie] = s
			return Event{}, false, scopeTCPListen
		}
	case bpf.SockEventKindEVENT_UNLISTEN:
		// The process that shuts a socket down need not be the one that serves it.
		if old := m.sockets[cookie]; old != nil {
			s.takeProcess(&old.socket)
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

// decides reports whether the event tells what its socket does now.
func (r *record) decides() bool {
	return r.socket.Cookie != 0 &&
		r.kind != bpf.SockEventKindEVENT_CHECK && r.kind != bpf.SockEventKindEVENT_DEVICE
}

// touch has events decide what a socket does, not the current dump.
func (m *model) touch(cookie uint64) {
	if m.touched != nil {
		m.touched[cookie] = struct{}{}
	}
}

// takeProcess takes over what is known of the process of another socket.
func (s *Socket) takeProcess(from *Socket) {
	s.PID, s.Comm, s.PIDSeen, s.ProcessCgroup = from.PID, from.Comm, from.PIDSeen, from.ProcessCgroup
}

// setDevice takes in that a socket was bound to another interface.
func (m *model) setDevice(s *Socket) (Event, bool, scope) {
	if waiting, ok := m.noPort[s.Cookie]; ok {
		waiting.Device = s.Device
		m.noPort[s.Cookie] = waiting
		return Event{}, false, 0
	}
	en := m.sockets[s.Cookie]
	if en == nil {
		if m.touched == nil {
			return Event{}, false, 0
		}
		// The running dump may have it with its old interface.
		if s.Protocol == port.UDP {
			return Event{}, false, scopeUDP
		}
		return Event{}, false, scopeTCPListen | scopeTCPBound
	}
	m.touch(s.Cookie)
	if en.socket.Device == s.Device {
		return Event{}, false, 0
	}
	en.socket.Device, en.socket.Observed = s.Device, s.Observed
	return Event{Socket: en.socket}, true, 0
}

func (m *model) put(s Socket) (Event, bool, scope) {
	en := m.sockets[s.Cookie]
	if en == nil {
		en = new(entry)
		m.sockets[s.Cookie] = en
	} else {
		s.Sought = en.socket.Sought && s.PID == en.socket.PID && s.Comm == en.socket.Comm
		same := s
		same.Observed = en.socket.Observed
		if same.PID == en.socket.PID {
			same.PIDSeen = en.socket.PIDSeen
		}
		if same == en.socket {
			return Event{}, false, 0
		}
	}
	if s.PID != 0 && (s.PID != en.socket.PID || s.Comm != en.socket.Comm) {
		m.fresh[s.Cookie] = time.Now()
		en.passed = en.passed || en.socket.PID != 0 && en.socket.PID != s.PID
	}
	en.socket = s
	en.tracked = true
	return Event{Socket: s}, true, 0
}

// drop removes a socket. Callers may range over m.sockets: that goes on over the former map.
func (m *model) drop(cookie uint64, observed int64) (Event, bool, scope) {
	en := m.sockets[cookie]
	if en == nil {
		return Event{}, false, 0
	}
	delete(m.sockets, cookie)
	delete(m.fresh, cookie)
	if m.peak.Passed(len(m.sockets)) {
		m.sockets = compact.Map(m.sockets)
	}
	s := en.socket
	s.Observed = observed
	return Event{Gone: true, Socket: s}, true, 0
}

// begin starts a dump: from here on, an event decides its cookie.
func (m *model) begin() {
	m.mark++
	m.touched = make(map[uint64]struct{})
}

// end ends the dump.
func (m *model) end() { m.touched = nil }

// merge takes in the rows of a dump and appends the changes to out. All events
// that happened during the dump must have been applied. It may be called more than
// once between begin and end; expire drops the sockets that are gone.
func (m *model) merge(rows []row, out []Event) []Event {
	for i := range rows {
		r := &rows[i]
		cookie := r.socket.Cookie
		if waiting, ok := m.noPort[cookie]; ok && r.socket.Listening {
			delete(m.noPort, cookie)
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
		waiting, named := m.noCookie[s.Inode]
		if named {
			named = waiting.Protocol == s.Protocol
		}
		if r.client && !named || !s.Listening && slices.Contains(m.closed[:], s.Cookie) {
			return out
		}
		if named {
			delete(m.noCookie, s.Inode)
			s.takeProcess(&waiting)
			s.Observed = waiting.Observed
			if s.CgroupID == 0 {
				s.CgroupID = waiting.CgroupID
			}
		}
		m.sockets[s.Cookie] = &entry{socket: s}
		if s.PID != 0 {
			m.fresh[s.Cookie] = time.Now()
		}
		return append(out, Event{Socket: s})
	}
	// The process is known from the event, the rest from the dump.
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

// waiting returns the kinds of sockets that wait for a dump.
func (m *model) waiting() scope {
	var s scope
	if len(m.noPort) > 0 {
		s |= scopeTCPListen
	}
	if len(m.connecting) > 0 {
		s |= scopeUDP
	}
	return s
}

// forgetWaiting gives up on what no dump has explained.
func (m *model) forgetWaiting() {
	clear(m.noPort)
	clear(m.noCookie)
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
