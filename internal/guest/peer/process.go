// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peer

import (
	"bytes"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Client is who asks, as the kernel and the engines name it.
type Client struct {
	// Container is empty for a process of the guest that is in none.
	Container port.Owner
	Guest     bool   // it is in no container
	UID       uint32 // of a process of the guest
	PID       int32
}

// String names the client to people.
func (c Client) String() string {
	if c.Guest {
		return fmt.Sprintf("user %d", c.UID)
	}
	return fmt.Sprintf("container %q", c.Container.Name)
}

// id is by whom usage is counted. No engine uses such an id for a container.
func (c Client) id() string {
	if c.Guest {
		return "user:" + strconv.FormatUint(uint64(c.UID), 10)
	}
	return c.Container.ID
}

// Namespace identifies a namespace of some kind.
type Namespace struct{ dev, inode uint64 }

// Conn is a client's connection.
type Conn struct {
	*net.UnixConn
	Client         // as it was when it connected
	Tenant *Tenant // nil before the client is admitted

	server *Server
	dir    int // the process's directory in /proc, which never becomes another process's; -1 if there is none
}

// close releases all but the socket.
func (c *Conn) close() {
	if c.dir >= 0 {
		_ = unix.Close(c.dir)
	}
}

// Namespace returns a namespace of the process, "ns/net" for its network.
func (c *Conn) Namespace(name string) (Namespace, error) { return NamespaceAt(c.dir, name) }

// The reasons for which a process is no client any more.
var (
	ErrProcessEnded = Refuse(ReasonContainer, "the process has ended")
	errMoved        = Refuse(ReasonContainer, "the process changed its container")
)

// maxStat bounds /proc/PID/stat.
const maxStat = 4096

// identify finds the container of the process that connected. It opens the directory of
// whoever has that process's number now; confirm proves that it is the same one.
func (c *Conn) identify(ctx context.Context) error {
	var cred *unix.Ucred
	err := Control(c.UnixConn, func(fd int) (err error) {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
			return err
		}
		cred, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	})
	if err != nil {
		return fmt.Errorf("read peer: %w", err)
	}
	if cred.Pid <= 0 {
		return Refuse(ReasonContainer, "the process is in a pid namespace that cannot be seen here")
	}
	dir, err := unix.Open(filepath.Join(proc, strconv.Itoa(int(cred.Pid))), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ErrProcessEnded
	}
	c.dir, c.PID = dir, cred.Pid
	c.Container, err = c.server.containerAt(ctx, dir)
	if err != nil && !reasonIs(err, ReasonAgent) && c.server.inGuest(dir) {
		c.Guest, c.UID, err = true, cred.Uid, nil
	}
	return err
}

// guestNamespaces are those that no container has, whether an engine knows it or not.
type guestNamespaces struct{ mount, pid, user Namespace }

// namespacesHere reads those of the guest. A unit gives this process mounts of its own, so
// the first process has the guest's, unless it cannot be read.
func namespacesHere() (g guestNamespaces, err error) {
	self, err := unix.Open(proc+"/thread-self", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return g, err
	}
	defer func() { _ = unix.Close(self) }()
	if g, err = namespacesOf(self); err != nil {
		return g, err
	}
	if first, err := NamespaceAt(unix.AT_FDCWD, proc+"/1/ns/mnt"); err == nil {
		g.mount = first
	}
	return g, nil
}

// namespacesOf returns the namespaces of a process by which inGuest judges.
func namespacesOf(dir int) (g guestNamespaces, err error) {
	for _, n := range []struct {
		name string
		to   *Namespace
	}{{"ns/mnt", &g.mount}, {"ns/pid", &g.pid}, {"ns/user", &g.user}} {
		if *n.to, err = NamespaceAt(dir, n.name); err != nil {
			return g, err
		}
	}
	return g, nil
}

// inGuest reports whether a process is in no container, and may be a client all the same.
func (s *Server) inGuest(dir int) bool {
	if !s.Guests {
		return false
	}
	theirs, err := namespacesOf(dir)
	return err == nil && theirs == s.guest
}

// containerAt returns the container of a process that lives.
func (s *Server) containerAt(ctx context.Context, dir int) (port.Owner, error) {
	if s.ContainerAt != nil {
		return s.ContainerAt(dir)
	}
	paths, err := cgroup.Process(dir)
	if err != nil {
		return port.Owner{}, unreadable(err)
	}
	// One that has ended and is not yet reaped seems to be in the root, so its state is
	// read afterwards.
	stat, err := cgroup.ReadAt(dir, "stat", maxStat)
	switch {
	case err != nil:
		return port.Owner{}, unreadable(err)
	case ended(stat):
		return port.Owner{}, ErrProcessEnded
	}
	owner, err := s.Container(ctx, paths)
	if err == nil || reasonIs(err, ReasonAgent) {
		return owner, err
	}
	return port.Owner{}, Refuse(ReasonContainer, "%v", err)
}

// reasonIs reports whether an error is a refusal for a reason.
func reasonIs(err error, reason Reason) bool {
	r, ok := errors.AsType[*Refusal](err)
	return ok && r.Reason == reason
}

// ended reports whether a process has ended, by its stat file (proc_pid_stat(5)): its state
// is the first word after the name, which may have any character.
func ended(stat []byte) bool {
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	return len(fields) == 0 || fields[0][0] == 'Z' || fields[0][0] == 'X'
}

// unreadable is why a process's facts cannot be read: it has ended, or there are too few
// descriptors, which ends nothing.
func unreadable(err error) error {
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) {
		return ErrProcessEnded
	}
	return Refuse(ReasonContainer, "cannot read the process: %v", err)
}

// Request asks the client for its request, and receives it. The request must repeat a nonce,
// in *nonce, and this proves that the process which connected sent it: the kernel names its
// sender, the nonce shows that it was sent after the process's directory was opened, and
// the process still lives in the same container. So no other process can have had its
// number meanwhile. It needs no SO_PEERPIDFD, which kernels before 6.5 do not have.
func (c *Conn) Request(ctx context.Context, request any, nonce *string) (Packet, error) {
	want := newNonce()
	if err := Send(c.UnixConn, Hello{Version: Version, Nonce: want}); err != nil {
		return Packet{}, err
	}
	got, err := Receive(c.UnixConn, request)
	if err != nil {
		return Packet{}, err
	}
	if err = c.Sent(got.Sender); err == nil {
		_, err = c.unchanged(ctx)
	}
	if subtle.ConstantTimeCompare([]byte(*nonce), []byte(want)) != 1 {
		err = Refuse(ReasonRequest, "wrong nonce")
	}
	if err != nil {
		got.Close()
	}
	return got, err
}

// Sent requires that the process which connected sent a message, by its sender.
func (c *Conn) Sent(sender *unix.Ucred) error {
	// A program with the setuid bit connects as another user than it sends: whoever started
	// it may have named the socket.
	if sender == nil || sender.Pid != c.PID || c.Guest && sender.Uid != c.UID {
		return Refuse(ReasonContainer, "another process, or another user, sent the message than connected")
	}
	return nil
}

// unchanged requires that the process lives in the same container as before, and returns
// that as its engine describes it now, which may have renamed it.
func (c *Conn) unchanged(ctx context.Context) (port.Owner, error) {
	was := c.Container
	now, err := c.server.containerAt(ctx, c.dir)
	switch {
	case c.Guest && errors.Is(err, ErrProcessEnded):
		return was, err
	case c.Guest && (err == nil || !c.server.inGuest(c.dir)):
		return was, errMoved
	case c.Guest:
		return was, nil
	case err != nil:
		return was, err
	case now.Same(was):
		return now, nil
	// Another engine may answer than before, which knows a pod by another id.
	case now.Name != was.Name || now.Namespace != was.Namespace:
		return was, errMoved
	}
	return was, nil
}

// While runs serve, and ends the client's connection when its process ends or changes its
// container, or is not allowed any more what it asked for.
func (c *Conn) While(ctx context.Context, allowed func(Client) error, serve func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		err := c.watch(ctx, allowed)
		if err != nil {
			_ = c.CloseRead()
		}
		ended <- err
	}()
	err := serve()
	cancel()
	if lost := <-ended; lost != nil {
		return lost
	}
	return err
}

// watch returns why a client has no right any more, or nil if ctx ends first. Another process
// may have the connection still. That no engine names the container for a while is no reason:
// an engine may restart.
func (c *Conn) watch(ctx context.Context, allowed func(Client) error) error {
	for schedule.Sleep(ctx, c.server.Check) == nil {
		container, err := c.unchanged(ctx)
		if errors.Is(err, ErrProcessEnded) || errors.Is(err, errMoved) {
			return err
		}
		now := c.Client
		now.Container = container
		if err := allowed(now); err != nil {
			return err
		}
	}
	return nil
}

// NamespaceAt returns the namespace that a file names.
func NamespaceAt(dir int, name string) (Namespace, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, 0); err != nil {
		return Namespace{}, Refuse(ReasonNamespace, "cannot read a namespace: %v", err)
	}
	return NamespaceOf(&st), nil
}

// NamespaceOf returns the namespace whose file it is.
func NamespaceOf(st *unix.Stat_t) Namespace { return Namespace{st.Dev, st.Ino} }
