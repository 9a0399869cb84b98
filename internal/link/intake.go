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

	"github.com/fairlead/fairlead/internal/link/wire"
)

// flowKeys authenticate the connections of one session.
type flowKeys struct {
	key []byte
	id  [wire.SessionIDSize]byte
}

// sum is the HMAC-SHA256 over the prover and the number of the flow.
func (k flowKeys) sum(prover string, number uint64) []byte {
	m := hmac.New(sha256.New, k.key)
	m.Write([]byte("fairlead flow 2 " + prover))
	m.Write(binary.BigEndian.AppendUint64(nil, number))
	return m.Sum(nil)
}

// The provers of flows.
const (
	byHost  = "host"
	byAgent = "agent"
)

// numbers are those of a session's flows that have been used, as protection from
// replay. Numbers far behind the newest count as used.
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

// openingBuffer takes an opening and most requests behind it at once.
const openingBuffer = 512

// opening reads what a connection begins with: the whole opening of a flow, or
// the first bytes of a handshake. There may be more behind it.
func opening(conn net.Conn) (head []byte, isFlow bool, err error) {
	head = make([]byte, openingBuffer)
	n := 0
	for n < len(wire.FlowMagic) {
		m, err := conn.Read(head[n:])
		n += m
		if n > 0 && head[0] != wire.FlowMagic[0] { // the handshake finds out what is wrong
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

// intake is a listener's end of one connection that may be a flow.
type intake struct {
	l *Listener
	a *attempt
}

// hello records that the connection begins a handshake.
func (in *intake) hello() {
	l := in.l
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.unproved)
	if l.unproved = leave(l.unproved, in.a); len(l.unproved) == n {
		return // it was closed for a newer one
	}
	l.attempts = enter(l.attempts, in.a, l.o.MaxHandshakes)
}

// flow authenticates a connection that begins with head and hands it to its
// session. keep stops the closing of conn at the end of ctx, and reports whether
// conn is still open.
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
		return refuse(RefusedLost, "a flow of a session that has ended")
	case !hmac.Equal(o.MAC[:], s.keys.sum(byHost, o.Number)):
		return refuse(RefusedProof, "a flow without its session's key")
	case !s.used.use(o.Number):
		return refuse(RefusedProof, "a flow that was opened before")
	}
	l.mu.Lock()
	l.unproved = leave(l.unproved, in.a)
	l.mu.Unlock()
	if !keep() {
		return ctx.Err()
	}
	c := &flowConn{conn: conn, s: s, opening: s.keys.sum(byAgent, o.Number), early: head[wire.OpeningSize:]}
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

// serves registers s for flows.
func (in *intake) serves(s *session) {
	in.l.mu.Lock()
	defer in.l.mu.Unlock()
	in.l.sessions[s.keys.id] = s
}

// forget removes s.
func (in *intake) forget(s *session) {
	in.l.mu.Lock()
	defer in.l.mu.Unlock()
	delete(in.l.sessions, s.keys.id)
}
