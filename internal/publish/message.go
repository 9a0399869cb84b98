// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package publish lets a container that has only a mounted socket reach a port of the
// guest's loopback, or have one of its own ports published. The container's client makes
// all sockets in its own network namespace and passes them to the agent, which needs
// no privilege to enter that namespace. A lease lasts as long as the client's connection.
package publish

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// DefaultSocket is the path of the socket in the guest, and where a container mounts it.
const DefaultSocket = "/run/fairlead/publish.sock"

const (
	version = 1
	// maxMessage bounds one message, in bytes. Each is one packet of JSON.
	maxMessage = 4096
	// maxFDs is the most that the kernel passes with a message (SCM_MAX_FD). One is expected,
	// but the kernel itself would close those for which there is no room, and that can block.
	maxFDs = 253
)

// Reason is why a request was refused, for programs.
type Reason string

// The reasons.
const (
	ReasonContainer  Reason = "container"  // the peer is in no container that an engine knows
	ReasonPolicy     Reason = "policy"     // no entry of the policy allows it
	ReasonLimit      Reason = "limit"      // a limit of the container was reached
	ReasonDescriptor Reason = "descriptor" // not what is wanted: a listening, or a connected, TCP socket
	ReasonNamespace  Reason = "namespace"  // the socket is in another network namespace than the peer
	ReasonRequest    Reason = "request"    // malformed
	ReasonStopping   Reason = "stopping"   // the agent stops
)

// Refusal is the agent's reason to refuse a request or to end a lease.
type Refusal struct {
	Reason  Reason `json:"reason"`
	Message string `json:"message"`
}

// Error implements error.
func (r *Refusal) Error() string { return string(r.Reason) + ": " + r.Message }

func refuse(r Reason, format string, args ...any) error {
	return &Refusal{r, fmt.Sprintf(format, args...)}
}

// reply is what the agent sends. One field is set, but for the first message.
type reply struct {
	Version int    `json:"version,omitempty"` // in the first message
	Nonce   string `json:"nonce,omitempty"`   // in the first message; the request repeats it

	Granted bool     `json:"granted,omitempty"`
	Connect uint64   `json:"connect,omitempty"` // asks for a connection to the container's port
	Error   *Refusal `json:"error,omitempty"`   // and the connection ends
}

// request is what the client sends: first what it wants, then answers to Connect.
type request struct {
	Nonce  string `json:"nonce,omitempty"`
	ToHost bool   `json:"toHost,omitempty"`
	Port   uint16 `json:"port,omitempty"`
	As     uint16 `json:"as,omitempty"` // with ToHost: the host port that is asked for

	Connect uint64 `json:"connect,omitempty"`
	Failed  string `json:"failed,omitempty"`  // why there is no connection
	Refused bool   `json:"refused,omitempty"` // the port refused it
}

func newNonce() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// send sends one message, with at most one descriptor (-1 for none).
func send(conn *net.UnixConn, message any, fd int) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	_, _, err = conn.WriteMsgUnix(b, rights, nil)
	return err
}

// packet is a message with what came beside it. The descriptors are the receiver's.
type packet struct {
	sender *unix.Ucred // as the kernel names it; nil if it was not asked to
	fds    []int
	lost   bool // descriptors were sent for which this process had no more
}

// close closes the descriptors that were not taken.
func (p *packet) close() {
	for _, fd := range p.fds {
		closePassed(fd)
	}
	p.fds = nil
}

// take returns the one descriptor, which is the caller's then.
func (p *packet) take() (fd int, ok bool) {
	if len(p.fds) != 1 {
		return -1, false
	}
	fd, p.fds = p.fds[0], nil
	return fd, true
}

// maxControl bounds the control messages beside a message, in bytes.
var maxControl = unix.CmsgSpace(unix.SizeofUcred) + unix.CmsgSpace(maxFDs*4)

var errMalformed = errors.New("malformed message")

// receive reads one message. On an error no descriptor is left open.
func receive(conn *net.UnixConn, message any) (p packet, err error) {
	var buf [maxMessage]byte
	oob := make([]byte, maxControl)
	n, oobn, flags, _, err := conn.ReadMsgUnix(buf[:], oob)
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	perr := p.parse(oob[:oobn])
	if err = cmp.Or(err, perr); err != nil { // an empty message is io.EOF, also with descriptors
		return p, err
	}
	if flags&unix.MSG_TRUNC != 0 {
		return p, fmt.Errorf("%w: too long", errMalformed)
	}
	p.lost = flags&unix.MSG_CTRUNC != 0
	if err := json.Unmarshal(buf[:n], message); err != nil {
		return p, fmt.Errorf("%w: %w", errMalformed, err)
	}
	return p, nil
}

// parse reads control messages. The descriptors in all of them are kept also on an error.
func (p *packet) parse(oob []byte) error {
	controls, err := unix.ParseSocketControlMessage(oob)
	for i := range controls {
		c := &controls[i]
		if fds, rerr := unix.ParseUnixRights(c); rerr == nil {
			p.fds = append(p.fds, fds...)
		} else if cred, cerr := unix.ParseUnixCredentials(c); cerr == nil {
			p.sender = cred
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errMalformed, err)
	}
	return nil
}

// control runs f with a socket's descriptor.
func control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// fileOf is a descriptor that the net package makes a socket of.
func fileOf(fd int) *os.File { return os.NewFile(uintptr(fd), "socket") }
