// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"io"
	"net"
	"sync"

	"github.com/fairlead/fairlead/internal/wire"
)

// flowKeys are what the connections of one session are proved with.
type flowKeys struct {
	key []byte
	id  [wire.SessionIDSize]byte
}

// sum is the HMAC-SHA256 over who proves and for which flow.
func (k flowKeys) sum(prover string, number uint64) []byte {
	m := hmac.New(sha256.New, k.key)
	m.Write([]byte("fairlead flow 2 " + prover))
	m.Write(binary.BigEndian.AppendUint64(nil, number))
	return m.Sum(nil)
}

// The words of sum for flows.
const (
	byHost  = "host"
	byAgent = "agent"
)

// numbers are those of the flows of a session that have been used. What is far
// behind the newest counts as used.
type numbers struct {
	mu   sync.Mutex
	next uint64                   // after the newest
	used [numbersBack / 64]uint64 // bit n%numbersBack: n was used
}

const numbersBack = 1 << 16

// use reports whether n is used for the first time.
func (u *numbers) use(n uint64) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case n == 1<<64-1 || n < u.next && u.next-n > numbersBack:
		return false
	case n >= u.next && n-u.next >= numbersBack:
		clear(u.used[:])
		u.next = n + 1
	default:
		for ; u.next <= n; u.next++ {
			u.used[u.next%numbersBack/64] &^= 1 << (u.next % 64)
		}
	}
	word, bit := &u.used[n%numbersBack/64], uint64(1)<<(n%64)
	if *word&bit != 0 {
		return false
	}
	*word |= bit
	return true
}

// openingRoom takes an opening and most requests behind it at once.
const openingRoom = 512

// opening reads what a connection begins with: the whole opening of a flow, or
// the first bytes of a handshake. There may be more behind it.
func opening(conn net.Conn) (head []byte, isFlow bool, err error) {
	head = make([]byte, openingRoom)
	n := 0
	for n < len(wire.FlowMagic) {
		m, err := conn.Read(head[n:])
		n += m
		if n > 0 && head[0] != wire.FlowMagic[0] { // the handshake says what it is not
			return head[:n], false, nil
		}
		if err != nil {
			if n > 0 {
				err = nil
			}
			return head[:n], false, err
		}
	}
	if string(head[:len(wire.FlowMagic)]) != wire.FlowMagic {
		return head[:n], false, nil
	}
	if n < wire.OpeningSize {
		var m int
		m, err = io.ReadAtLeast(conn, head[n:], wire.OpeningSize-n)
		n += m
	}
	return head[:n], true, err
}

// intake is a listener's for one connection.
type intake struct {
	l *Listener
	a *attempt
}

// hello notes that the connection begins a handshake.
func (in *intake) hello() {
	l := in.l
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.unproved)
	if l.unproved = leave(l.unproved, in.a); len(l.unproved) == n {
		return // it gave way meanwhile
	}
	l.attempts = enter(l.attempts, in.a, l.o.MaxHandshakes)
}

// flow hands a connection that begins with head to its session, once it is
// proved to be of it. keep ends what closes conn when ctx ends, and reports
// whether it is still open.
func (in *intake) flow(ctx context.Context, conn net.Conn, head []byte, keep func() bool) error {
	l := in.l
	o, err := wire.ParseOpening(head[:wire.OpeningSize])
	if err != nil {
		return err
	}
	l.mu.Lock()
	s := l.sessions[o.Session]
	l.mu.Unlock()
	switch {
	case s == nil:
		return refuse(RefusedLost, "a flow of a session that is over")
	case !hmac.Equal(o.MAC[:], s.keys.sum(byHost, o.Number)):
		return refuse(RefusedProof, "a flow that does not know its session's key")
	case !s.used.use(o.Number):
		return refuse(RefusedProof, "a flow that was opened before")
	}
	l.mu.Lock()
	l.unproved = leave(l.unproved, in.a)
	l.mu.Unlock()
	if !keep() {
		return ctx.Err()
	}
	c := &flowConn{conn: conn, s: s, say: s.keys.sum(byAgent, o.Number), early: head[wire.OpeningSize:]}
	if !s.enter(c, l.o.MaxStreams) {
		return refuse(RefusedLost, "the session has ended or has too many flows")
	}
	select {
	case s.incoming <- c:
		return nil
	case <-s.Done():
		err = refuse(RefusedLost, "the session ended")
	case <-ctx.Done():
		err = ctx.Err()
	}
	_ = c.Reset()
	return err
}

// serves makes s take flows.
func (in *intake) serves(s *session) {
	in.l.mu.Lock()
	defer in.l.mu.Unlock()
	in.l.sessions[s.keys.id] = s
}

// forget ends that.
func (in *intake) forget(s *session) {
	in.l.mu.Lock()
	defer in.l.mu.Unlock()
	delete(in.l.sessions, s.keys.id)
}
