// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/guest/run/image"
	"github.com/fairlead/fairlead/internal/guest/run/policy"
)

// setup is what the helper reads from its stdin.
type setup struct {
	Policy      policy.Policy
	Slice       string   // the directory of its cgroups
	Controllers []string // that limits need
}

// order is a message of the server to the helper: a program to run, or to a job's socket, a
// signal for it or that its input is whole.
type order struct {
	Request
	Kill  unix.Signal `json:"kill,omitempty"`
	Whole bool        `json:"whole,omitempty"`
}

// report is a message of the helper.
type report struct {
	Error string `json:"error,omitempty"` // why there is no job, for the log
	Other bool   `json:"other,omitempty"` // the reason is that the file is another program than the policy's
	Pid   int    `json:"pid,omitempty"`
	Exit  *Exit  `json:"exit,omitempty"` // the last of a job
}

// helperFD is the helper's socket to the server.
const helperFD = 3

// helper starts programs for the server, as their users.
type helper struct {
	policy policy.Policy
	groups *groups
}

// help is the helper's process. It returns when the server has gone, and all jobs with it.
func help(stdin io.Reader) error {
	conn, err := connOf(helperFD)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	h, err := newHelper(stdin)
	if err != nil {
		return errors.Join(err, peer.Send(conn, report{Error: err.Error()}))
	}
	if err := peer.Send(conn, report{}); err != nil {
		return err
	}
	return h.serve(conn)
}

func newHelper(stdin io.Reader) (*helper, error) {
	var s setup
	if err := json.NewDecoder(stdin).Decode(&s); err != nil {
		return nil, fmt.Errorf("read the policy: %w", err)
	}
	// No program gets what whoever started the server left open.
	if err := unix.CloseRange(helperFD+1, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("close_range: %w: it needs Linux 5.11", err)
	}
	g, err := newGroups(s.Slice, s.Controllers)
	if err != nil {
		return nil, err
	}
	return &helper{policy: s.Policy, groups: g}, privilege.Limit(privilege.Runner())
}

// serve starts a job for each order until the server has gone, and ends all.
func (h *helper) serve(conn *net.UnixConn) error {
	defer func() { _ = remove(h.groups.dir) }()
	var jobs sync.WaitGroup
	defer jobs.Wait()
	for {
		var o order
		got, err := peer.ReceiveLong(conn, &o)
		if errors.Is(err, peer.ErrMalformed) || err == nil && len(got.FDs) != o.descriptors() {
			got.Close()
			continue // the job's socket is closed, by which the server knows
		}
		if err != nil {
			return nil // the server has gone, and its ends of the jobs' sockets
		}
		jobs.Go(func() { h.job(o.Request, &got) })
	}
}

// descriptors returns how many come with an order: stdin, stdout, stderr, the other end of
// stdin and the job's socket; for a job with a terminal its socket alone.
func (o *order) descriptors() int {
	if o.TTY != nil {
		return 1
	}
	return 5
}

// job runs a program and reports its end. It is killed if its socket is closed first.
func (h *helper) job(q Request, got *peer.Packet) {
	streams, conn, err := open(got)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	p, err := h.prepare(q, streams)
	if err != nil {
		_ = refuse(conn, err)
		return
	}
	defer func() { _, _ = p.streams.Close(), p.held.Close() }()
	g, err := h.groups.add()
	if err != nil {
		_ = refuse(conn, err)
		return
	}
	defer func() { _ = g.end() }()
	// Also before the program has begun, which another process of its user can delay for ever.
	a := attendant{conn: conn, group: g, input: p.held}
	var attending sync.WaitGroup
	attending.Go(a.attend)
	defer attending.Wait()
	defer func() { _ = conn.CloseRead() }()
	cmd, err := p.start(g)
	if q.TTY == nil {
		_ = p.streams.Close()
	}
	if err != nil {
		_ = refuse(conn, err)
		return
	}
	a.begun(cmd.Process)
	_ = p.report(conn, cmd.Process.Pid)
	exit := p.wait(cmd, g)
	_ = g.end() // what it started ends with it
	_ = peer.Send(conn, report{Exit: exit})
}

// refuse reports why there is no job.
func refuse(conn *net.UnixConn, err error) error {
	return peer.Send(conn, report{Error: err.Error(), Other: errors.Is(err, image.ErrSum)})
}

// wait waits for the end of a program, or of its time.
func (p *prepared) wait(cmd *exec.Cmd, g group) *Exit {
	var over atomic.Bool
	if p.entry.Time > 0 {
		defer time.AfterFunc(p.entry.Time, func() {
			over.Store(true)
			_ = g.kill()
		}).Stop()
	}
	_ = cmd.Wait()
	exit := exitOf(cmd.ProcessState)
	switch {
	case exit.Signal != unix.SIGKILL:
	case over.Load():
		exit.Limit = LimitTime
	case p.entry.Memory > 0 && g.outOfMemory():
		exit.Limit = LimitMemory
	}
	return exit
}

// attendant sends signals to a job and closes its input, and kills it when its socket is closed.
type attendant struct {
	conn  *net.UnixConn
	group group
	input io.Closer

	mu      sync.Mutex
	process *os.Process // nil before it has begun
}

// begun notes that the program has begun.
func (a *attendant) begun(p *os.Process) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.process = p
}

func (a *attendant) attend() {
	for {
		var o order
		got, err := peer.Receive(a.conn, &o)
		got.Close()
		switch {
		case err != nil:
			_ = a.group.end() // or one that begins just now would go on
			return
		case o.Whole:
			_ = a.input.Close()
		default:
			a.signal(o.Kill)
		}
	}
}

func (a *attendant) signal(s unix.Signal) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.process != nil {
		_ = a.process.Signal(s) // by a pidfd, or not at all once it was waited for
	}
}

// prepared is a program that may be run.
type prepared struct {
	Request
	entry *policy.Entry
	user  *user.User
	identity

	streams files // stdin, stdout, stderr
	// held is open until the input is whole or the job is dead: the other end of stdin, or
	// both of a terminal, the master first. Where the server goes first, the job must not
	// take what it got for all, and a job that closes its terminal can open it again.
	held files
}

type files []*os.File

// Close can be called again.
func (f files) Close() error {
	closeAll(f)
	return nil
}

// prepare prepares a request, whatever the server allowed, only if the policy allows it. It owns
// the files that came with the order.
func (h *helper) prepare(q Request, got files) (*prepared, error) {
	p, err := h.allowed(q)
	if err != nil {
		_ = got.Close()
		return nil, err
	}
	if q.TTY == nil {
		p.streams, p.held = got[:3], got[3:]
		return p, nil
	}
	master, slave, err := openTerminal(p.identity, q.TTY.Size)
	p.streams, p.held = files{slave, slave, slave}, files{master, slave}
	return p, err
}

func (h *helper) allowed(q Request) (*prepared, error) {
	e := h.policy.Find(q.Name)
	if e == nil {
		return nil, fmt.Errorf("no program %q", q.Name)
	}
	if err := q.allowedBy(e); err != nil {
		return nil, err
	}
	u, id, err := identify(e.User)
	return &prepared{Request: q, entry: e, user: u, identity: id}, err
}

// report reports that the program runs, with the master of its terminal.
func (p *prepared) report(conn *net.UnixConn, pid int) error {
	if p.TTY == nil {
		return peer.Send(conn, report{Pid: pid})
	}
	return peer.Control(p.held[0], func(master int) error { return peer.Send(conn, report{Pid: pid}, master) })
}

// start starts the program.
func (p *prepared) start(g group) (*exec.Cmd, error) {
	if err := g.limit(p.entry); err != nil {
		return nil, err
	}
	sealed, err := image.Seal(p.entry.Path, p.entry.SHA256)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sealed.Close() }()
	cmd, err := p.launch(g, sealed)
	if err != nil {
		return nil, fmt.Errorf("start %s as %s in %s: %w", p.entry.Path, p.entry.User, p.entry.Directory, err)
	}
	return cmd, nil
}

// startWithoutKeys starts a program with a session keyring of its own (keyrings(7)). It would
// inherit the keyring of whoever started the server, such as root's with its Kerberos tickets,
// and a process may read all keys in the keyring of its session.
func startWithoutKeys(cmd *exec.Cmd) error {
	return onOwnThread(func() error { // keyrings are a thread's
		_, err := unix.KeyctlInt(unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)
		if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) { // of a filter that programs inherit, too
			err = nil
		}
		if err == nil {
			err = cmd.Start()
		}
		return err
	})
}

// environment is what each program has; nothing of the server's is in it.
func environment(u *user.User) []string {
	return []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + u.HomeDir, "USER=" + u.Username, "LOGNAME=" + u.Username}
}

// identify returns a user, by name or number, with all groups. It refuses root.
func identify(name string) (*user.User, identity, error) {
	lookup := user.Lookup
	if _, err := strconv.ParseUint(name, 10, 32); err == nil {
		lookup = user.LookupId
	}
	u, err := lookup(name)
	if err != nil {
		return nil, identity{}, fmt.Errorf("user %s: %w", name, err)
	}
	groups, err := u.GroupIds()
	if err != nil {
		return nil, identity{}, fmt.Errorf("user %s: %w", name, err)
	}
	ids := make([]int, 0, len(groups)+2)
	for _, s := range append([]string{u.Uid, u.Gid}, groups...) {
		id, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			return nil, identity{}, fmt.Errorf("user %s: %w", name, err)
		}
		ids = append(ids, int(id))
	}
	if ids[0] == 0 {
		return nil, identity{}, fmt.Errorf("user %s is root, as whom no program may run", name)
	}
	return u, identity{ids[0], ids[1], ids[2:]}, nil
}

func exitOf(s *os.ProcessState) *Exit {
	if w := s.Sys().(syscall.WaitStatus); w.Signaled() {
		return &Exit{Code: -1, Signal: w.Signal()}
	}
	return &Exit{Code: s.ExitCode()}
}

// open takes the descriptors of an order.
func open(got *peer.Packet) (streams files, conn *net.UnixConn, err error) {
	last := len(got.FDs) - 1
	conn, err = connOf(got.FDs[last])
	for _, fd := range got.FDs[:last] {
		streams = append(streams, os.NewFile(uintptr(fd), "stdio"))
	}
	got.FDs = nil
	if err != nil {
		_ = streams.Close()
	}
	return streams, conn, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// connOf makes a connection of a descriptor, which it owns.
func connOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	if f == nil {
		return nil, os.ErrInvalid
	}
	defer func() { _ = f.Close() }()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, errors.New("no unix socket")
	}
	return conn, nil
}
