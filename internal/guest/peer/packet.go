// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package peer serves sockets that are mounted into containers. A client proves nothing about
// itself: the kernel names its process, and an engine the container that has the process.
// Messages are packets of JSON, with descriptors beside them.
package peer

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Version is that of the messages.
const Version = 1

const (
	// maxMessage bounds one message, in bytes. Each is one packet of JSON.
	maxMessage = 4096
	// maxLong bounds one of ReceiveLong.
	maxLong = 64 << 10
	// maxFDs is the most that the kernel passes with a message (SCM_MAX_FD). Few are expected,
	// but the kernel itself would close those for which there is no room, and that can block.
	maxFDs = 253
)

// Reason is why a request was refused, for programs.
type Reason string

// The reasons.
const (
	ReasonContainer  Reason = "container"  // the client is in no container that an engine knows
	ReasonPolicy     Reason = "policy"     // no entry of the policy allows it
	ReasonLimit      Reason = "limit"      // a limit of the container was reached
	ReasonDescriptor Reason = "descriptor" // not what is wanted: a listening, or a connected, TCP socket
	ReasonNamespace  Reason = "namespace"  // the socket is in another network namespace than the client
	ReasonRequest    Reason = "request"    // malformed
	ReasonStopping   Reason = "stopping"   // the server stops
	ReasonAgent      Reason = "agent"      // the agent cannot be asked whose the process is
	ReasonProgram    Reason = "program"    // it could not be started, or how it ended is not known
)

// Refusal is a server's reason to refuse a request or to end what it granted.
type Refusal struct {
	Reason  Reason `json:"reason"`
	Message string `json:"message"`
}

// Error implements error.
func (r *Refusal) Error() string { return string(r.Reason) + ": " + r.Message }

// Refuse returns a *Refusal.
func Refuse(r Reason, format string, args ...any) error {
	return &Refusal{r, fmt.Sprintf(format, args...)}
}

// Hello is the server's first message, and a refusal at any time.
type Hello struct {
	Version int      `json:"version,omitempty"` // in the first message
	Nonce   string   `json:"nonce,omitempty"`   // in the first message; the request repeats it
	Error   *Refusal `json:"error,omitempty"`   // and the connection ends
}

// Connect connects a client to a server.
func Connect(ctx context.Context, socket string) (*net.UnixConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unixpacket", socket)
	switch {
	case errors.Is(err, syscall.ENOENT):
		return nil, fmt.Errorf("%w: mount the guest's socket there, or name another path with --socket", err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%w: nobody serves it, or its server has made a new socket since this one was mounted", err)
	case err != nil:
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// newNonce returns a random text.
func newNonce() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Send sends one message with descriptors, of which it keeps none.
func Send(conn *net.UnixConn, message any, fds ...int) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err = conn.WriteMsgUnix(b, rights, nil)
	return err
}

// Packet is a message with what came beside it. The descriptors are the receiver's.
type Packet struct {
	Sender *unix.Ucred // as the kernel names it; nil if it was not asked to
	FDs    []int
	Lost   bool // descriptors were sent for which this process had no more
}

// Close closes the descriptors that were not taken.
func (p *Packet) Close() {
	for _, fd := range p.FDs {
		CloseFD(fd)
	}
	p.FDs = nil
}

// Take returns the one descriptor, which is the caller's then.
func (p *Packet) Take() (fd int, ok bool) {
	if len(p.FDs) != 1 {
		return -1, false
	}
	fd, p.FDs = p.FDs[0], nil
	return fd, true
}

// maxControl bounds the control messages beside a message, in bytes.
var maxControl = unix.CmsgSpace(unix.SizeofUcred) + unix.CmsgSpace(maxFDs*4)

// ErrMalformed is in the error about a message that cannot be understood.
var ErrMalformed = errors.New("malformed message")

// Receive reads one message of at most 4 KiB. On an error no descriptor is left open.
func Receive(conn *net.UnixConn, message any) (Packet, error) {
	return receive(conn, make([]byte, maxMessage), message)
}

// ReceiveLong is Receive for a message of at most 64 KiB.
func ReceiveLong(conn *net.UnixConn, message any) (Packet, error) {
	return receive(conn, make([]byte, maxLong), message)
}

func receive(conn *net.UnixConn, buf []byte, message any) (Packet, error) {
	n, p, err := Read(conn, buf, NewControl())
	if err == nil {
		if err = json.Unmarshal(buf[:n], message); err != nil {
			err = fmt.Errorf("%w: %w", ErrMalformed, err)
		}
	}
	if err != nil {
		p.Close()
	}
	return p, err
}

// NewControl returns a buffer for the control messages of Read.
func NewControl() []byte { return make([]byte, maxControl) }

// Read reads one message, whatever it has. On an error no descriptor is left open; an empty
// message is io.EOF, as the end is.
func Read(conn *net.UnixConn, buf, oob []byte) (n int, p Packet, err error) {
	n, oobn, flags, _, err := conn.ReadMsgUnix(buf, oob)
	perr := p.parse(oob[:oobn])
	err = cmp.Or(err, perr)
	if err == nil && flags&unix.MSG_TRUNC != 0 {
		err = fmt.Errorf("%w: too long", ErrMalformed)
	}
	if err != nil {
		p.Close()
	}
	p.Lost = flags&unix.MSG_CTRUNC != 0
	return n, p, err
}

// parse reads control messages. The descriptors in all of them are kept also on an error.
func (p *Packet) parse(oob []byte) error {
	controls, err := unix.ParseSocketControlMessage(oob)
	for i := range controls {
		c := &controls[i]
		// The library panics at these; the kernel sends none.
		short := c.Header.Type == unix.SCM_CREDENTIALS && len(c.Data) < unix.SizeofUcred
		if short || len(c.Data)%4 != 0 {
			err = errors.Join(err, fmt.Errorf("a control message of type %d has %d bytes", c.Header.Type, len(c.Data)))
			continue
		}
		if fds, rerr := unix.ParseUnixRights(c); rerr == nil {
			p.FDs = append(p.FDs, fds...)
		} else if cred, cerr := unix.ParseUnixCredentials(c); cerr == nil {
			p.Sender = cred
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return nil
}

// Control runs f with a socket's descriptor.
func Control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}
