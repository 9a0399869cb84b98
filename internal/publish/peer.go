// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/cgroup"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/publish/ask"
	"github.com/fairlead/fairlead/internal/schedule"
)

// namespace identifies a network namespace.
type namespace struct{ dev, inode uint64 }

// peer is the process at the other end of a connection.
type peer struct {
	pid       int32
	dir       int        // its directory in /proc, which never becomes another process's
	container port.Owner // empty for a guest
	guest     bool       // a process of the guest, in no container
	uid       uint32     // of a guest
	network   namespace
}

func (p *peer) client() ask.Client {
	return ask.Client{Container: p.container, Guest: p.guest, UID: p.uid, PID: p.pid}
}

// id is by whom usage is counted. No engine uses such an id for a container.
func (p *peer) id() string {
	if p.guest {
		return "user:" + strconv.FormatUint(uint64(p.uid), 10)
	}
	return p.container.ID
}

// close releases a peer, which may be nil.
func (p *peer) close() {
	if p != nil {
		_ = unix.Close(p.dir)
	}
}

// The reasons for which a process has no lease any more.
var (
	errProcessEnded = ask.Refuse(ask.ReasonContainer, "the process has ended")
	errMoved        = ask.Refuse(ask.ReasonContainer, "the process changed its container")
)

// maxStat bounds /proc/PID/stat.
const maxStat = 4096

// identify finds the container of the process that connected. It opens the directory of
// whoever has that process's number now; confirm proves that it is the same one.
func (s *Server) identify(conn *net.UnixConn) (*peer, error) {
	var cred *unix.Ucred
	err := ask.Control(conn, func(fd int) (err error) {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
			return err
		}
		cred, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read peer: %w", err)
	}
	if cred.Pid <= 0 {
		return nil, ask.Refuse(ask.ReasonContainer, "the process is in a pid namespace that the agent cannot see")
	}
	dir, err := unix.Open(filepath.Join(s.proc, strconv.Itoa(int(cred.Pid))), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errProcessEnded
	}
	p := &peer{pid: cred.Pid, dir: dir}
	p.container, err = s.containerOf(dir)
	if err != nil && s.opt.Runner != nil && s.inGuest(dir) {
		p.guest, p.uid, err = true, cred.Uid, nil
	}
	if err == nil {
		p.network, err = namespaceAt(dir, "ns/net")
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// guestNamespaces are those that no container has, whether an engine knows it or not.
type guestNamespaces struct{ mount, pid, user namespace }

// guestNamespaces reads those of the guest. The unit gives the agent mounts of its own, so
// the first process has the guest's, unless it cannot be read.
func (s *Server) guestNamespaces() (g guestNamespaces, err error) {
	self, err := unix.Open(s.proc+"/thread-self", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return g, err
	}
	defer func() { _ = unix.Close(self) }()
	if g, err = namespacesOf(self); err != nil {
		return g, err
	}
	if first, err := namespaceAt(unix.AT_FDCWD, s.proc+"/1/ns/mnt"); err == nil {
		g.mount = first
	}
	return g, nil
}

// namespacesOf returns the namespaces of a process by which inGuest judges.
func namespacesOf(dir int) (g guestNamespaces, err error) {
	for _, n := range []struct {
		name string
		to   *namespace
	}{{"ns/mnt", &g.mount}, {"ns/pid", &g.pid}, {"ns/user", &g.user}} {
		if *n.to, err = namespaceAt(dir, n.name); err != nil {
			return g, err
		}
	}
	return g, nil
}

// inGuest reports whether a process is in no container.
func (s *Server) inGuest(dir int) bool {
	theirs, err := namespacesOf(dir)
	return err == nil && theirs == s.guest
}

// ownerOf returns the container of a process that lives.
func (s *Server) ownerOf(dir int) (port.Owner, error) {
	paths, err := s.tree.Process(dir)
	if err != nil {
		return port.Owner{}, unreadable(err)
	}
	// One that has ended and is not yet reaped seems to be in the root, so its state is
	// read afterwards.
	stat, err := cgroup.ReadAt(dir, "stat", maxStat)
	if err != nil {
		return port.Owner{}, unreadable(err)
	}
	parsed, err := observer.ParseStat(stat)
	switch {
	case err != nil:
		return port.Owner{}, unreadable(err)
	case parsed.State == 'Z' || parsed.State == 'X':
		return port.Owner{}, errProcessEnded
	}
	owner, err := s.opt.Container(paths)
	if err != nil {
		return port.Owner{}, ask.Refuse(ask.ReasonContainer, "%v", err)
	}
	return owner, nil
}

// unreadable is why a process's facts cannot be read: it has ended, or there are too few
// descriptors, which ends no lease.
func unreadable(err error) error {
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) {
		return errProcessEnded
	}
	return ask.Refuse(ask.ReasonContainer, "cannot read the process: %v", err)
}

// confirm proves that the process which connected sent the message: the kernel names its
// sender, the nonce shows that it was sent after the process's directory was opened, and
// the process still lives in the same container. So no other process can have had its
// number meanwhile. It needs no SO_PEERPIDFD, which kernels before 6.5 do not have.
func (s *Server) confirm(p *peer, sender *unix.Ucred, nonce, want string) error {
	switch {
	case subtle.ConstantTimeCompare([]byte(nonce), []byte(want)) != 1:
		return ask.Refuse(ask.ReasonRequest, "wrong nonce")
	}
	if err := p.sent(sender); err != nil {
		return err
	}
	_, err := s.unchanged(p)
	return err
}

// sent requires that the process which connected sent a message.
func (p *peer) sent(sender *unix.Ucred) error {
	// A program with the setuid bit connects as another user than it sends: whoever started
	// it may have named the socket.
	if sender == nil || sender.Pid != p.pid || p.guest && sender.Uid != p.uid {
		return ask.Refuse(ask.ReasonContainer, "another process, or another user, sent the message than connected")
	}
	return nil
}

// unchanged requires that the process lives in the same container as before, and returns
// that as its engine describes it now, which may have renamed it.
func (s *Server) unchanged(p *peer) (port.Owner, error) {
	c := p.container
	now, err := s.containerOf(p.dir)
	switch {
	case p.guest && errors.Is(err, errProcessEnded):
		return c, err
	case p.guest && (err == nil || !s.inGuest(p.dir)):
		return c, errMoved
	case p.guest:
		return c, nil
	case err != nil:
		return c, err
	case now.Same(c):
		return now, nil
	// Another engine may answer than before, which knows a pod by another id.
	case now.Name != c.Name || now.Namespace != c.Namespace:
		return c, errMoved
	}
	return c, nil
}

// watch returns why a lease ends because of its process or the policy, or nil if ctx ends
// first. Another process may have the connection still. That no engine names the container
// for a while is no reason: an engine may restart.
func (s *Server) watch(ctx context.Context, p *peer, allowed func(*peer) error) error {
	for schedule.Sleep(ctx, s.check) == nil {
		container, err := s.unchanged(p)
		if errors.Is(err, errProcessEnded) || errors.Is(err, errMoved) {
			return err
		}
		now := *p
		now.container = container
		if err := allowed(&now); err != nil {
			return err
		}
	}
	return nil
}

// namespaceAt returns the network namespace that a file names.
func namespaceAt(dir int, name string) (namespace, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, 0); err != nil {
		return namespace{}, ask.Refuse(ask.ReasonNamespace, "cannot read the network namespace: %v", err)
	}
	return namespace{st.Dev, st.Ino}, nil
}

// namespaceOf returns the network namespace of a socket, by SIOCGSKNS, which needs
// CAP_NET_ADMIN.
func namespaceOf(fd int) (namespace, error) {
	ns, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		return namespace{}, ask.Refuse(ask.ReasonNamespace, "cannot read the socket's network namespace: %v", err)
	}
	defer func() { _ = unix.Close(ns) }()
	var st unix.Stat_t
	if err := unix.Fstat(ns, &st); err != nil {
		return namespace{}, ask.Refuse(ask.ReasonNamespace, "cannot read the socket's network namespace: %v", err)
	}
	return namespace{st.Dev, st.Ino}, nil
}

// checkSocket refuses what is not a TCP socket of the peer's own network namespace that
// listens, or does not.
func (s *Server) checkSocket(p *peer, fd int, listens bool) error {
	options := []struct {
		option int
		want   []int
	}{
		{unix.SO_DOMAIN, []int{unix.AF_INET, unix.AF_INET6}},
		{unix.SO_TYPE, []int{unix.SOCK_STREAM}},
		{unix.SO_PROTOCOL, []int{unix.IPPROTO_TCP, unix.IPPROTO_MPTCP}},
		{unix.SO_ACCEPTCONN, []int{btoi(listens)}},
	}
	for _, o := range options {
		v, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, o.option)
		if err != nil || v != o.want[0] && v != o.want[len(o.want)-1] {
			return ask.Refuse(ask.ReasonDescriptor, "the descriptor is no %s TCP socket", state(listens))
		}
	}
	if p.network == s.network {
		return ask.Refuse(ask.ReasonNamespace, "the container has the guest's own network: it needs no help")
	}
	ns, err := namespaceOf(fd)
	if err != nil {
		return err
	}
	if ns != p.network {
		return ask.Refuse(ask.ReasonNamespace, "the socket is in another network namespace than its sender")
	}
	return nil
}

func state(listens bool) string {
	if listens {
		return "listening"
	}
	return "connected"
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
