// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/port"
)

// Found is a socket with a certain local port, whether or not it serves.
type Found struct {
	Socket
	// Client says of a UDP socket that it has a peer, or a wildcard address and
	// a port of the ephemeral range, as an unbound socket gets when it sends.
	Client bool
	// Space names the network namespace: "net:[4026531840]", after the name that
	// ip-netns(8) gave it, if any.
	Space string
}

// Look returns the sockets with the local port p in the network namespace of
// the calling thread, with their processes as far as they can be found. It asks
// the kernel once and keeps nothing.
func Look(ctx context.Context, p uint16) ([]Found, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	list, err := lookHere(ctx, p, "")
	if err != nil {
		return nil, err
	}
	nameOwners(ctx, list)
	return list, nil
}

// The bounds of LookElsewhere.
const (
	maxLookProcesses = 100_000
	maxLookSpaces    = 512
)

// ErrTooMany says that a search stopped at a limit.
var ErrTooMany = errors.New("the search stopped at a limit")

// LookElsewhere returns the sockets with the local port p in all network
// namespaces but that of the calling process: those of processes, and those
// with a name in /run/netns. It enters each of them on a thread of its own. Without
// CAP_SYS_ADMIN it reads /proc instead, which shows fewer sockets: no MPTCP, none that is
// only bound to a TCP port, and no namespace without a process. With ErrTooMany, or the
// error of ctx, the result is correct but may be incomplete.
func LookElsewhere(ctx context.Context, p uint16) ([]Found, error) {
	spaces, truncated := otherSpaces(ctx)
	if len(spaces) == 0 {
		return nil, truncated
	}
	var list []Found
	err := kernel.OnThread(func() (err error) {
		list, err = lookAll(ctx, spaces, func(s space) ([]Found, error) { return lookInto(ctx, p, s) })
		return err
	})
	nameOwners(ctx, list)
	return list, errors.Join(err, truncated)
}

// lookAll looks in each of spaces. Of those that it may not look into, the error names one.
func lookAll(ctx context.Context, spaces []space, look func(space) ([]Found, error)) (list []Found, err error) {
	for _, s := range spaces {
		if ctx.Err() != nil {
			return list, errors.Join(err, ctx.Err())
		}
		found, problem := look(s)
		switch {
		case problem == nil:
			list = append(list, found...)
		case !errors.Is(problem, os.ErrPermission) || !errors.Is(err, os.ErrPermission):
			err = errors.Join(err, fmt.Errorf("network namespace %s: %w", s.path, problem))
		}
	}
	return list, err
}

// lookInto looks in another namespace. The calling thread is one of OnThread, and stays in it.
func lookInto(ctx context.Context, p uint16, s space) ([]Found, error) {
	err := kernel.EnterNamespace(s.path)
	switch {
	case err == nil:
		return lookHere(ctx, p, s.name)
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.EINVAL): // no namespace any more
		return nil, nil
	case errors.Is(err, os.ErrPermission) && s.process != "":
		return readTables(p, s)
	}
	return nil, err
}

// space is a path to a network namespace, its name if it has one, and the folder in /proc of
// a process in it.
type space struct {
	path, name, process string
	inode               uint64
}

// title describes a namespace.
func (s space) title() string {
	title := fmt.Sprintf("net:[%d]", s.inode)
	if s.name != "" {
		title = s.name + ", " + title
	}
	return title
}

// namedSpaces is where ip-netns(8) keeps names.
const namedSpaces = "/run/netns"

// otherSpaces finds one path to each network namespace except the process's own.
func otherSpaces(ctx context.Context) ([]space, error) {
	var own unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &own); err != nil {
		return nil, fmt.Errorf("stat network namespace: %w", err)
	}
	seen := map[uint64]int{own.Ino: -1} // index in list
	var list []space
	var truncated error
	add := func(path, name, process string) bool {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return true
		}
		if i, ok := seen[st.Ino]; ok {
			if i >= 0 && list[i].process == "" {
				list[i].process = process
			}
			return true
		}
		if len(list) == maxLookSpaces {
			truncated = fmt.Errorf("%w: more than %d network namespaces", ErrTooMany, maxLookSpaces)
			return false
		}
		seen[st.Ino] = len(list)
		list = append(list, space{path, name, process, st.Ino})
		return true
	}
	_ = eachName(namedSpaces, func(_ int, name string) bool {
		path := filepath.Join(namedSpaces, name)
		var fs unix.Statfs_t
		if err := unix.Statfs(path, &fs); err != nil || fs.Type != unix.NSFS_MAGIC {
			return true // a name that lost its namespace
		}
		return add(path, name, "")
	})
	processes := 0
	err := eachName("/proc", func(_ int, name string) bool {
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			return true
		}
		if processes++; processes > maxLookProcesses {
			truncated = fmt.Errorf("%w: more than %d processes", ErrTooMany, maxLookProcesses)
			return false
		}
		process := filepath.Join("/proc", name)
		return ctx.Err() == nil && add(filepath.Join(process, "ns/net"), "", process)
	})
	return list, errors.Join(err, truncated, ctx.Err())
}

// lookHere looks in the calling thread's namespace.
func lookHere(ctx context.Context, p uint16, name string) ([]Found, error) {
	ns, err := kernel.OpenNamespace()
	if err != nil {
		return nil, err
	}
	defer func() { _ = ns.Close() }()
	d, err := newDumper(ns)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.close() }()
	low, high, err := d.ephemeralRange()
	if err != nil {
		return nil, err
	}
	title := space{name: name, inode: uint64(ns.Inode())}.title()
	const established = 1
	var list []Found
	for _, protocol := range []port.Protocol{port.TCP, port.UDP} {
		for _, family := range families(uint16(protocol)) {
			// A kernel that does not dump bound sockets has none in this state.
			states := uint32(1<<tcpListen | 1<<tcpBoundInactive)
			if protocol == port.UDP {
				states = 1<<tcpClose | 1<<established
			}
			first := len(list)
			err := d.retry(ctx, family, protocol, states, func() { list = list[:first] }, func(r *diagRow) {
				if r.port != p {
					return
				}
				f := Found{Socket: r.socket(protocol, ns.Inode()), Space: title}
				if protocol == port.UDP {
					f.Client = r.state == established || r.address.IsUnspecified() && p >= low && p <= high
				}
				list = append(list, f)
			})
			if err != nil {
				return nil, fmt.Errorf("look at %s sockets: %w", protocol, err)
			}
		}
	}
	if len(list) > 0 {
		aliasMPTCP(d.conn, list)
	}
	return list, nil
}

// aliasMPTCP gives listeners of MPTCP the inode that their process holds.
func aliasMPTCP(conn *diagConn, list []Found) {
	inodes, err := conn.mptcpListeners()
	if err != nil {
		return // a kernel without MPTCP has none
	}
	for i := range list {
		s := &list[i].Socket
		if inode, ok := inodes[netip.AddrPortFrom(s.Address, s.Port)]; ok && s.Protocol == port.TCP && s.Listening {
			s.Inode = inode
		}
	}
}

// nameOwners fills in the processes of sockets, or that no process has them.
func nameOwners(ctx context.Context, list []Found) {
	if len(list) == 0 {
		return
	}
	sockets := make([]Socket, len(list))
	for i := range list {
		sockets[i] = list[i].Socket
		sockets[i].Cookie = uint64(i) // only a key for find
	}
	finder := ownerFinder{proc: "/proc", budget: ownerBudget}
	found := finder.find(ctx, sockets, 0)
	for i := range list {
		o, ok := found.owners[uint64(i)]
		list[i].PID, list[i].Comm, list[i].Sought = o.pid, o.comm, !ok && found.next == 0 && !found.denied
	}
}
