// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
)

// Client makes a session of a connection that this side dialled. The peer must
// prove itself: by the token if there is one, and on a unix socket by its user;
// a connection that shows no user needs a token. ctx bounds the handshake, as
// Options.HandshakeTimeout does. On error conn is closed, and the error is a
// *RefusedError unless the options are at fault or ctx ended.
func Client(ctx context.Context, conn net.Conn, o Options) (Session, error) {
	return overConn(ctx, conn, o, dialler)
}

// Server makes a session of a connection that this side accepted; see Client.
func Server(ctx context.Context, conn net.Conn, o Options) (Session, error) {
	return overConn(ctx, conn, o, acceptor)
}

func overConn(ctx context.Context, conn net.Conn, o Options, d direction) (Session, error) {
	o, err := o.complete()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	s, err := establish(ctx, conn, o, d, nil)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// direction is which side of the connection we are, whatever our role.
type direction byte

const (
	dialler  direction = 'd'
	acceptor direction = 'a'
)

func (d direction) other() direction {
	if d == dialler {
		return acceptor
	}
	return dialler
}

// flowSource is how the connections of single flows are made: at most one of its
// fields is set. Nil means that flows are streams only.
type flowSource struct {
	dial dialFunc // of a session that we dialled
	in   *intake  // of sessions that we accept
}

// establish runs the handshake and starts the session. It closes conn on error.
// With an intake conn may be one flow: that is handed on, and there is neither a
// session nor an error.
func establish(ctx context.Context, conn net.Conn, o Options, d direction, w *flowSource) (_ *session, err error) {
	if w == nil {
		w = new(flowSource)
	}
	tctx, cancel := context.WithTimeout(ctx, o.HandshakeTimeout)
	defer cancel()
	defer func() {
		if err != nil {
			_ = conn.Close() // err is the more useful one
			err = explain(ctx, tctx, o, err)
		}
	}()
	proof, err := admit(conn, o, d)
	if err != nil {
		turnAway(conn, d, err)
		return nil, err
	}
	stop := context.AfterFunc(tctx, func() { _ = conn.Close() })
	hs := handshake{conn: conn, in: conn, o: o, d: d}
	if w.in != nil {
		head, isFlow, err := opening(conn)
		if err != nil {
			stop()
			return nil, err
		}
		if isFlow {
			return nil, w.in.flow(tctx, conn, head, stop)
		}
		w.in.hello()
		hs.in = io.MultiReader(bytes.NewReader(head), conn)
	}
	if o, err = o.withToken(); err == nil && o.Token.IsZero() && proof == "" {
		err = errNoToken
	}
	if err != nil {
		turnAway(conn, d, err)
		stop()
		return nil, err
	}
	hs.o = o
	hello, err := hs.run()
	if err != nil {
		stop()
		return nil, err
	}
	if !o.Token.IsZero() {
		proof = strings.TrimPrefix(proof+", token", ", ")
	}
	s, err := newSession(conn, o, d, Peer{
		Identity: hello.Identity, Name: hello.Name, Version: hello.Build,
		Address: address(conn), Proof: proof,
	}, w, hs.keys(hello))
	if err != nil {
		stop()
		return nil, err
	}
	if !stop() { // conn was closed under the session
		_ = s.Close()
		return nil, tctx.Err()
	}
	return s, nil
}

// explain turns an error of the handshake into a *RefusedError, unless the
// caller gave up.
func explain(ctx, tctx context.Context, o Options, err error) error {
	var r *RefusedError
	switch {
	case errors.As(err, &r):
		return err
	case ctx.Err() != nil:
		if cause := context.Cause(ctx); errors.As(cause, &r) {
			return cause
		}
		return ctx.Err()
	case tctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded):
		return refuse(RefusedTimeout, "no handshake within %s", o.HandshakeTimeout)
	case errors.Is(err, wire.ErrMalformed) || errors.Is(err, wire.ErrTooLarge):
		return &RefusedError{Code: RefusedMalformed, Detail: "handshake", Err: err}
	case errors.Is(err, errInternal):
		return &RefusedError{Code: RefusedOther, Detail: "handshake", Err: err}
	}
	return &RefusedError{Code: RefusedLost, Detail: "the connection ended during the handshake", Err: err}
}

// turnAway sends the reason to a peer that is refused before anything was read, if
// it fits in the socket's buffer.
func turnAway(conn net.Conn, d direction, err error) {
	var r *RefusedError
	if d != acceptor || !errors.As(err, &r) || conn.SetWriteDeadline(time.Now().Add(turnAwayTime)) != nil {
		return
	}
	frame, _, err := wire.EncodeHandshake(wire.Handshake{Refusal: &wire.Refusal{Code: string(r.Code), Reason: r.Detail}})
	if err == nil {
		_, _ = conn.Write(append([]byte(wire.Magic), frame...))
	}
}

const turnAwayTime = 10 * time.Millisecond

// errInternal marks what is not the peer's fault.
var errInternal = errors.New("internal error")

// admit checks the peer's credentials from the system before a byte is read. It
// returns them as proof, empty if only a token can prove the peer.
func admit(conn net.Conn, o Options, d direction) (proof string, err error) {
	if cid, ok := addrCID(conn.RemoteAddr()); ok && d == acceptor {
		if err := admitCID(cid, o); err != nil {
			return "", err
		}
	}
	if uc, ok := conn.(*net.UnixConn); ok {
		uid, known, err := peerUID(uc)
		if err != nil {
			return "", &RefusedError{Code: RefusedUID, Detail: "the peer's user is not known", Err: err}
		}
		if known {
			if err := admitUID(uid, o); err != nil {
				return "", err
			}
			return fmt.Sprintf("uid %d", uid), nil
		}
	}
	if s, ok := conn.(Secured); ok && s.Proof() != "" {
		return s.Proof(), nil
	}
	if o.Token.IsZero() && o.LoadToken == nil {
		return "", errNoToken
	}
	return "", nil
}

var errNoToken = refuse(RefusedToken, "only a token can prove the peer here, and this side has none")

func admitCID(cid uint32, o Options) error {
	if !slices.Contains(o.AllowCIDs, cid) {
		return refuse(RefusedCID, "vsock context %d, allowed are %d", cid, o.AllowCIDs)
	}
	return nil
}

func admitUID(uid uint32, o Options) error {
	if uid != 0 && int(uid) != os.Geteuid() && !slices.Contains(o.AllowUIDs, uid) {
		return refuse(RefusedUID, "uid %d, allowed are %s", uid, allowedUsers(o.AllowUIDs))
	}
	return nil
}

// allowedUsers lists root, this process's user and others.
func allowedUsers(others []uint32) string {
	users := "root"
	if euid := os.Geteuid(); euid > 0 {
		users += fmt.Sprintf(", uid %d", euid)
	}
	for _, uid := range others {
		users += fmt.Sprintf(", uid %d", uid)
	}
	return users
}

// address is a human-readable address of the peer. The remote address of an
// accepted unix socket is empty; the socket's own is used then.
func address(conn net.Conn) string {
	a := conn.RemoteAddr()
	if a.String() == "" || a.String() == "@" {
		a = conn.LocalAddr()
	}
	return a.Network() + " " + a.String()
}

// handshake is one exchange. The dialler sends and proves first, so that a peer
// without the token receives nothing but the hello.
type handshake struct {
	conn net.Conn
	in   io.Reader // conn, after what was read of it
	o    Options
	d    direction

	nonce        []byte
	ours, theirs []byte // the hellos as sent
}

func (h *handshake) run() (*wire.Hello, error) {
	h.nonce = make([]byte, wire.NonceSize)
	if _, err := rand.Read(h.nonce); err != nil {
		return nil, fmt.Errorf("%w: %w", errInternal, err)
	}
	var peer *wire.Hello
	var err error
	if h.d == dialler {
		if err = h.sendHello(); err == nil {
			peer, err = h.readHello()
		} else if !errors.Is(err, errInternal) {
			// The peer refused us before it read anything. Its reason can still be read.
			var r *RefusedError
			if _, rerr := h.readHello(); errors.As(rerr, &r) {
				err = r
			}
		}
	} else {
		// The hello is answered even if it will be refused, so that both log why.
		if peer, err = h.readHello(); err == nil {
			err = h.sendHello()
		}
	}
	if err != nil {
		return nil, err
	}
	if r := h.check(peer); r != nil {
		h.sendRefusal(r)
		return nil, r
	}
	if h.o.Token.IsZero() {
		return peer, nil
	}
	if h.d == dialler {
		if err = h.sendProof(peer); err == nil {
			err = h.readProof(peer)
		}
	} else if err = h.readProof(peer); err == nil {
		err = h.sendProof(peer)
	}
	if err != nil {
		return nil, err
	}
	return peer, nil
}

func (h *handshake) sendHello() error {
	frame, raw, err := wire.EncodeHandshake(wire.Handshake{Hello: &wire.Hello{
		Version: h.o.version, Role: h.o.Role,
		Identity: h.o.Identity, Name: h.o.Name, Build: h.o.Version, Network: h.o.Network,
		Nonce: h.nonce, Token: !h.o.Token.IsZero(),
	}})
	if err != nil {
		return fmt.Errorf("%w: %w", errInternal, err)
	}
	h.ours = raw
	_, err = h.conn.Write(append([]byte(wire.Magic), frame...))
	return err
}

func (h *handshake) readHello() (*wire.Hello, error) {
	var magic [len(wire.Magic)]byte
	if n, err := io.ReadFull(h.in, magic[:]); err != nil {
		if n > 0 && !bytes.HasPrefix([]byte(wire.Magic), magic[:n]) {
			return nil, refuse(RefusedMagic, "not a fairlead peer, it sent %q", magic[:n])
		}
		return nil, err
	}
	if string(magic[:]) != wire.Magic {
		return nil, refuse(RefusedMagic, "not a fairlead peer, it sent %q", magic[:])
	}
	m, raw, err := h.read()
	if err != nil {
		return nil, err
	}
	if m.Hello == nil {
		return nil, refuse(RefusedMalformed, "no hello")
	}
	h.theirs = raw
	return m.Hello, nil
}

// read returns the next message, or the peer's refusal as an error.
func (h *handshake) read() (wire.Handshake, []byte, error) {
	m, raw, err := wire.ReadHandshake(h.in)
	if err != nil {
		return m, nil, err
	}
	if m.Refusal != nil {
		code := Refusal(m.Refusal.Code)
		if !code.known() {
			code = RefusedOther
		}
		return m, nil, &RefusedError{Code: code, Detail: fmt.Sprintf("%q", m.Refusal.Reason), Remote: true}
	}
	return m, raw, nil
}

// check compares the hellos. All but the nonce is symmetric: the peer finds the same.
func (h *handshake) check(peer *wire.Hello) *RefusedError {
	switch {
	case peer.Version != h.o.version:
		return refuse(RefusedVersion, "the %s speaks link protocol %d, the %s %d: update the older one", h.o.Role, h.o.version, peer.Role, peer.Version)
	case peer.Role == h.o.Role:
		return refuse(RefusedRole, "both ends have the role %s", peer.Role)
	case peer.Network != "" && peer.Network == h.o.Network:
		return refuse(RefusedNetwork, "agent and host share one network namespace: every port of the guest is already there")
	case bytes.Equal(peer.Nonce, h.nonce):
		return refuse(RefusedProof, "the peer echoes our own nonce")
	case peer.Token && h.o.Token.IsZero():
		return refuse(RefusedToken, "the %s has a token, the %s has none: give both the same token file", peer.Role, h.o.Role)
	case !peer.Token && !h.o.Token.IsZero():
		return refuse(RefusedToken, "the %s has a token, the %s has none: give both the same token file", h.o.Role, peer.Role)
	}
	return nil
}

// sendRefusal sends the reason to the peer; an error is of no interest. Only the
// acceptor does: what the dialler refuses, the acceptor has found itself, or it
// expects the session to start.
func (h *handshake) sendRefusal(r *RefusedError) {
	if h.d != acceptor {
		return
	}
	frame, _, err := wire.EncodeHandshake(wire.Handshake{Refusal: &wire.Refusal{Code: string(r.Code), Reason: r.Detail}})
	if err == nil {
		_, _ = h.conn.Write(frame)
	}
}

func (h *handshake) sendProof(peer *wire.Hello) error {
	frame, _, err := wire.EncodeHandshake(wire.Handshake{Proof: &wire.Proof{MAC: h.mac(h.d, h.o.Role, peer)}})
	if err != nil {
		return fmt.Errorf("%w: %w", errInternal, err)
	}
	_, err = h.conn.Write(frame)
	return err
}

func (h *handshake) readProof(peer *wire.Hello) error {
	m, _, err := h.read()
	if err != nil {
		return err
	}
	var r *RefusedError
	switch {
	case m.Proof == nil:
		r = refuse(RefusedProof, "no proof of the token")
	case !hmac.Equal(m.Proof.MAC, h.mac(h.d.other(), peer.Role, peer)):
		r = refuse(RefusedProof, "the tokens of agent and host differ: give both the same token file")
	default:
		return nil
	}
	h.sendRefusal(r)
	return r
}

// mac is HMAC-SHA256 over the prover (direction and role, so that a proof cannot
// be sent back to it), both nonces (so that it is of this connection) and both
// hellos as sent.
func (h *handshake) mac(prover direction, role Role, peer *wire.Hello) []byte {
	return h.digest(peer, []byte("fairlead link proof 1"), []byte{byte(prover)}, []byte(role))
}

// keys authenticate the flows of this session. Without a token the nonces are the
// secret: only the two ends of the connection have them, whose users the system
// has checked.
func (h *handshake) keys(peer *wire.Hello) flowKeys {
	k := flowKeys{key: h.digest(peer, []byte("fairlead flow key 2"))}
	copy(k.id[:], k.sum("session", 0))
	return k
}

// digest is HMAC-SHA256 by the token over context, the connection's binding if it has
// one, both nonces and both hellos as sent, those of the dialler first.
func (h *handshake) digest(peer *wire.Hello, context ...[]byte) []byte {
	m := hmac.New(sha256.New, []byte(h.o.Token.key))
	put := func(b []byte) {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(b)))
		m.Write(n[:])
		m.Write(b)
	}
	first, second := [2][]byte{h.nonce, h.ours}, [2][]byte{peer.Nonce, h.theirs}
	if h.d == acceptor {
		first, second = second, first
	}
	for _, b := range context {
		put(b)
	}
	if s, ok := h.conn.(Secured); ok {
		put(s.Binding())
	}
	for _, side := range [...][2][]byte{first, second} {
		put(side[0])
		put(side[1])
	}
	return m.Sum(nil)
}
