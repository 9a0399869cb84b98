// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package run has programs of the guest run for its containers and users. Four processes share
// the work: the client; the server, which knows who asks and decides; a helper that the server
// starts before it drops its capabilities, which checks the program again; and a launcher that
// the helper starts for each program, which becomes its user and then the program.
package run

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/guest/run/policy"
)

// DefaultSocket is the path of the socket in the guest, and where a container mounts it.
const DefaultSocket = "/run/fairlead-run/run.sock"

// The only argument of a process that the service starts says what it is.
const (
	helperArgument   = "--helper"
	launcherArgument = "--launcher"
)

// itself is a command that starts this program as another process of the service.
func itself(argument string) *exec.Cmd {
	return &exec.Cmd{Path: "/proc/self/exe", Args: []string{"fairlead-run", argument}}
}

// Inner is the process of a helper or a launcher, if these arguments say so.
func Inner(args []string) (ok bool, err error) {
	switch {
	case slices.Equal(args, []string{helperArgument}):
		return true, help(os.Stdin)
	case slices.Equal(args, []string{launcherArgument}):
		return true, becomeProgram()
	}
	return false, nil
}

// Request is what a client wants.
type Request struct {
	Name string   `json:"name"` // of an entry of the policy
	Args []string `json:"args,omitempty"`
	Env  []string `json:"env,omitempty"` // "KEY=VALUE"

	// TTY, unless it is nil, has the program get a terminal instead of three streams.
	TTY *Terminal `json:"tty,omitempty"`
}

// allowedBy returns nil if an entry of the policy allows the request.
func (q *Request) allowedBy(e *policy.Entry) error {
	switch {
	case q.TTY == nil:
	case !e.TTY:
		return errors.New("a terminal (its entry needs tty: true)")
	case q.TTY.Type != "" && !typeSyntax.MatchString(q.TTY.Type):
		return fmt.Errorf("a terminal of the type %q", q.TTY.Type)
	}
	return e.Allows(q.Args, q.Env)
}

// Exit is how a program ended.
type Exit struct {
	Code   int         `json:"code"`
	Signal unix.Signal `json:"signal,omitempty"` // that killed it, else 0
	Limit  Limit       `json:"limit,omitempty"`  // for which it was killed
}

// Limit is one of an entry's.
type Limit string

// The limits beyond which a program is killed. More processes are only refused to it.
const (
	LimitMemory Limit = "memory"
	LimitTime   Limit = "time"
)

// String describes the end to people.
func (e Exit) String() string {
	switch {
	case e.Limit != "":
		return fmt.Sprintf("%s for its limit of %s", unix.SignalName(e.Signal), e.Limit)
	case e.Signal != 0:
		return unix.SignalName(e.Signal)
	}
	return fmt.Sprintf("exit %d", e.Code)
}

// first is the client's first message.
type first struct {
	Nonce string  `json:"nonce"`
	Run   Request `json:"run"`
}

// reply is a message of the server before the program runs, and a refusal at any time.
type reply struct {
	peer.Hello
	Granted bool `json:"granted,omitempty"`
}

// kind is what a frame has, its first byte.
type kind byte

// The client sends the first four, the server the others.
const (
	frameStdin    kind = 'i' // at most window bytes that are not taken
	frameStdinEnd kind = 'e' // not with a terminal, of which the input has no end
	frameSignal   kind = 's' // its name, without SIG
	frameSize     kind = 'w' // a Size, with a terminal
	frameStdout   kind = 'o' // with a terminal both outputs
	frameStderr   kind = 'r'
	frameTaken    kind = 't' // that many bytes of stdin, as a number of JSON
	frameExit     kind = 'x' // the last: an Exit
	frameReply    kind = '{' // a whole reply
)

const (
	// window is how much of stdin may be under way. Output needs no window: it stops
	// while the client does not read, and nothing else waits behind it.
	window = 64 << 10
	// maxFrame bounds the content of a frame.
	maxFrame = 32 << 10
)

// frames sends and receives frames, each a packet.
type frames struct {
	conn   *net.UnixConn
	sender int32      // the process whose frames are received, 0 for any
	mu     sync.Mutex // held while one is sent
	out    []byte
}

func (f *frames) send(k kind, content []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.out = append(append(f.out[:0], byte(k)), content...)
	_, err := f.conn.Write(f.out)
	return err
}

func (f *frames) sendJSON(k kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.send(k, b)
}

// receive returns the next frame. Its content is valid until the next call with the
// buffer, which has room for a frame.
func (f *frames) receive(buf, oob []byte) (kind, []byte, error) {
	n, p, err := peer.Read(f.conn, buf, oob)
	if err != nil {
		return 0, nil, err
	}
	defer p.Close() // the kernel would close them, which can block
	switch {
	case len(p.FDs) > 0 || p.Lost:
		return 0, nil, fmt.Errorf("%w: descriptors", peer.ErrMalformed)
	case f.sender != 0 && (p.Sender == nil || p.Sender.Pid != f.sender):
		return 0, nil, errSender
	case n == len(buf):
		return 0, nil, fmt.Errorf("%w: too long", peer.ErrMalformed)
	}
	return kind(buf[0]), buf[1:n], nil
}

// errSender is the error about a frame of another process that has the client's connection.
var errSender = errors.New("another process sent the message than connected")

// newBuffer returns one for receive. A frame that fills it is too long.
func newBuffer() []byte { return make([]byte, maxFrame+2) }
