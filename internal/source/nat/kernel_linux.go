// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	bpfkernel "github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/netwatch"
)

// Messages around a batch (linux/netfilter/nfnetlink.h).
const (
	batchBegin = 0x10
	batchEnd   = 0x11
	batchGenID = 1
)

const (
	recvBuffer  = 8 << 20   // of the notification socket
	messageSize = 256 << 10 // the kernel's messages are smaller (NLMSG_GOODSIZE, 32 KiB dumps)
	maxRules    = 400_000
	maxBlob     = 256 << 20
)

// kernel reads rulesets from one network namespace. It is not safe for concurrent use.
type kernel struct {
	path  string // of the network namespace, empty: the process's own
	types *bpfkernel.Types
	netns *os.File // nil: the process's own
	nft   *netlink.Conn
	net   *netwatch.Watcher
}

// inNetns runs f on a thread that is in the watched network namespace.
func (k *kernel) inNetns(f func() error) error {
	if k.netns == nil {
		return f()
	}
	errc := make(chan error, 1)
	go func() {
		// The thread is thrown away with the goroutine, so nothing is to be restored.
		runtime.LockOSThread()
		if err := unix.Setns(int(k.netns.Fd()), unix.CLONE_NEWNET); err != nil {
			errc <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		errc <- f()
	}()
	return <-errc
}

func (k *kernel) dial() (*netlink.Conn, error) {
	cfg := &netlink.Config{MessageBufferSize: messageSize}
	if k.netns != nil {
		cfg.NetNS = int(k.netns.Fd())
	}
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, cfg)
	if err != nil {
		return nil, fmt.Errorf("nfnetlink: %w", err)
	}
	return c, nil
}

func (k *kernel) close() {
	if k.nft != nil {
		_ = k.nft.Close()
		k.nft = nil
	}
}

// request sends one nftables request and hands each answer to f.
func (k *kernel) request(typ uint8, family uint8, dump bool, attrs []byte, f func(*message) error) error {
	if k.nft == nil {
		c, err := k.dial()
		if err != nil {
			return err
		}
		k.nft = c
	}
	flags := netlink.Request
	if dump {
		flags |= netlink.Dump
	}
	m := netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(nftSubsys<<8 | uint16(typ)), Flags: flags},
		Data:   append([]byte{family, 0, 0, 0}, attrs...),
	}
	err := k.exchange(m, f)
	if err != nil && !errors.Is(err, errMoved) {
		k.close() // answers may still be on their way
	}
	return err
}

func (k *kernel) exchange(req netlink.Message, f func(*message) error) error {
	if _, err := k.nft.Send(req); err != nil {
		return err
	}
	var first error
	for m, err := range k.nft.ReceiveIter() {
		if err != nil {
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) { // a table or set went while it was read
				k.close()
				return errMoved
			}
			return err
		}
		if first != nil {
			continue
		}
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			first = errMoved
			continue
		}
		if uint16(m.Header.Type)>>8 != nftSubsys {
			continue
		}
		msg, err := parseMessage(uint8(m.Header.Type), uint16(m.Header.Flags), m.Data)
		if err == nil {
			err = f(msg)
		}
		first = err
	}
	return first
}

// generation returns the number of the last commit.
func (k *kernel) generation() (uint32, error) {
	var gen uint32
	err := k.request(msgGetGen, unix.AF_UNSPEC, false, nil, func(m *message) error {
		gen = m.gen
		return nil
	})
	if err != nil {
		for _, e := range []error{unix.EINVAL, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} {
			if errors.Is(err, e) {
				return 0, fmt.Errorf("%w: %w", errAbsent, err)
			}
		}
		return 0, fmt.Errorf("nftables generation: %w", err)
	}
	return gen, nil
}

// settled returns nil if the ruleset is that of generation gen and no commit is
// under way, else errMoved.
//
// The number alone does not say that: a commit raises it before its changes can
// be read, and reading takes no lock. A batch waits for the commit under way and
// is refused unless the number is the one it names; an empty one changes nothing.
func (k *kernel) settled(gen uint32) error {
	batch := func(typ uint16, attrs []byte) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: netlink.HeaderType(typ), Flags: netlink.Request},
			Data:   append([]byte{unix.AF_UNSPEC, 0, 0, nftSubsys}, attrs...),
		}
	}
	_, err := k.nft.SendMessages([]netlink.Message{
		batch(batchBegin, appendAttr(nil, batchGenID, binary.BigEndian.AppendUint32(nil, gen))),
		batch(batchEnd, nil),
	})
	if err != nil {
		k.close()
		return fmt.Errorf("empty batch: %w", err)
	}
	// Only a refusal is answered, before what is asked next.
	now, err := k.generation()
	switch {
	case errors.Is(err, unix.ERESTART), err == nil && now != gen:
		return errMoved
	case err != nil:
		return fmt.Errorf("after an empty batch: %w", err)
	}
	return nil
}

// dump returns the nat-relevant nftables ruleset at one generation, or errMoved.
func (k *kernel) dump(ctx context.Context) (*snapshot, error) {
	gen, err := k.generation()
	if err != nil {
		return nil, err
	}
	if err := k.settled(gen); err != nil {
		return nil, err
	}
	s := &snapshot{gen: gen}
	tables := make(map[tableID]*tableSnap)
	err = k.request(msgGetTable, unix.AF_UNSPEC, true, nil, func(m *message) error {
		if m.table.family != 0 {
			tables[m.table] = &tableSnap{id: m.table, handle: m.handle, dormant: m.flags&tableDormant != 0, owned: m.owned()}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("dump tables: %w", err)
	}
	err = k.request(msgGetChain, unix.AF_UNSPEC, true, nil, func(m *message) error {
		if t := tables[m.table]; t != nil {
			t.chains = append(t.chains, &chainSnap{name: m.chain, hook: m.hook})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("dump chains: %w", err)
	}
	for _, t := range tables {
		if t.nat() {
			s.tables = append(s.tables, t)
		} else {
			s.others = append(s.others, t.id)
		}
	}
	slices.SortFunc(s.tables, func(a, b *tableSnap) int { return strings.Compare(a.id.String(), b.id.String()) })
	for _, t := range s.tables {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := k.dumpTable(t); err != nil {
			return nil, fmt.Errorf("dump table %s: %w", t.id, err)
		}
	}
	return s, k.settled(gen)
}

// exists implements system.
func (k *kernel) exists(t tableID) (bool, error) {
	err := k.request(msgGetTable, t.family, false, appendAttr(nil, 1, append([]byte(t.name), 0)), func(*message) error { return nil })
	if errors.Is(err, errMoved) {
		return false, nil
	}
	return err == nil, err
}

func (k *kernel) dumpTable(t *tableSnap) error {
	chains := make(map[string]*chainSnap)
	for _, c := range t.chains {
		chains[c.name] = c
	}
	name := append([]byte(t.id.name), 0)
	rules := 0
	err := k.request(msgGetRule, t.id.family, true, appendAttr(nil, 1, name), func(m *message) error {
		if m.table != t.id {
			return nil
		}
		c := chains[m.chain]
		if c == nil {
			return errMoved
		}
		if rules++; rules > maxRules {
			return fmt.Errorf("more than %d rules", maxRules)
		}
		c.rules = append(c.rules, ruleSnap{handle: m.handle, raw: m.raw})
		return nil
	})
	if err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	sets := make(map[string]*nset)
	err = k.request(msgGetSet, t.id.family, true, appendAttr(nil, 1, name), func(m *message) error {
		if m.table == t.id {
			m.set.blank = true
			t.sets = append(t.sets, m.set)
			sets[m.set.name] = m.set
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("sets: %w", err)
	}
	return k.dumpReached(t, chains, sets)
}

// dumpReached reads the elements of the sets that packets can meet, and only
// those: a table may hold large sets for other ends.
func (k *kernel) dumpReached(t *tableSnap, chains map[string]*chainSnap, sets map[string]*nset) error {
	seen := make(map[string]bool)
	var queue []*chainSnap
	reach := func(name string) {
		if c := chains[name]; c != nil && !seen[name] {
			seen[name] = true
			queue = append(queue, c)
		}
	}
	for _, c := range t.chains {
		if c.hook.nat() {
			reach(c.name)
		}
	}
	for len(queue) > 0 {
		c := queue[0]
		queue = queue[1:]
		for _, r := range c.rules {
			exprs, err := parseExprs(r.raw)
			if err != nil {
				continue // the compiler will say so
			}
			for _, x := range exprs {
				switch e := x.(type) {
				case exprImmediate:
					if e.verdict != nil {
						reach(e.verdict.chain)
					}
				case exprLookup:
					n := sets[e.set]
					if n == nil || !n.blank {
						continue
					}
					if err := k.dumpSet(t.id, n); err != nil {
						return err
					}
					for _, el := range n.elems {
						if el.verdict != nil {
							reach(el.verdict.chain)
						}
					}
				}
			}
		}
	}
	return nil
}

func (k *kernel) dumpSet(t tableID, n *nset) error {
	n.blank = false
	if n.changing() {
		return nil
	}
	attrs := appendAttr(nil, 1, append([]byte(t.name), 0))
	attrs = appendAttr(attrs, 2, append([]byte(n.name), 0))
	err := k.request(msgGetElem, t.family, true, attrs, func(m *message) error {
		for _, e := range m.elems {
			n.elems[e.id()] = e
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("elements of %s: %w", n.name, err)
	}
	return nil
}

// watch implements system.
func (k *kernel) watch(method string) (stream, error) {
	if method != MethodNetlink {
		return k.watchHooks(method)
	}
	c, err := k.dial()
	if err != nil {
		return nil, err
	}
	// SO_RCVBUFFORCE, which mdlayher/socket tries first, needs CAP_NET_ADMIN; a
	// smaller buffer only means that overflow comes sooner.
	_ = c.SetReadBuffer(recvBuffer)
	if err := c.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		return nil, errors.Join(fmt.Errorf("join the group of nftables: %w", err), c.Close())
	}
	return &nftStream{c}, nil
}

type nftStream struct{ *netlink.Conn }

func (s *nftStream) next() ([]*message, error) {
	var out []*message
	for m, err := range s.ReceiveIter() {
		if err != nil {
			if errors.Is(err, unix.ENOBUFS) {
				err = errLost
			}
			return nil, err
		}
		if uint16(m.Header.Type)>>8 != nftSubsys {
			continue
		}
		msg, err := parseMessage(uint8(m.Header.Type), uint16(m.Header.Flags), m.Data)
		if err != nil {
			return nil, errors.Join(errLost, err)
		}
		out = append(out, msg)
	}
	return out, nil
}

// legacyTables tells which families have a legacy nat table. It only looks,
// because asking for a table would make the kernel create it.
func (k *kernel) legacyTables() (v4, v6 bool, err error) {
	err = k.inNetns(func() error {
		for _, f := range []struct {
			path string
			has  *bool
		}{{"/proc/thread-self/net/ip_tables_names", &v4}, {"/proc/thread-self/net/ip6_tables_names", &v6}} {
			b, err := os.ReadFile(f.path)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			*f.has = slices.Contains(strings.Fields(string(b)), "nat")
		}
		return nil
	})
	if err != nil {
		return false, false, fmt.Errorf("legacy tables: %w", err)
	}
	return v4, v6, nil
}

const (
	soGetInfo    = 64 // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
	soGetEntries = 65 // IPT_SO_GET_ENTRIES
)

// legacy implements system.
func (k *kernel) legacy(v6 bool) (*tableSnap, error) {
	info, raw, err := k.readLegacy(v6)
	if err != nil {
		return nil, fmt.Errorf("read legacy nat table: %w", err)
	}
	return parseLegacy(v6, info, raw)
}

// readLegacy returns the legacy nat table of one family as the kernel has it.
func (k *kernel) readLegacy(v6 bool) (info legacyInfo, raw []byte, err error) {
	err = k.inNetns(func() error {
		domain, level := unix.AF_INET, unix.IPPROTO_IP
		if v6 {
			domain, level = unix.AF_INET6, unix.IPPROTO_IPV6
		}
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		for range 16 {
			b := make([]byte, 84)
			copy(b, "nat")
			if err := getsockopt(fd, level, soGetInfo, b); err != nil {
				return err
			}
			if info, err = parseLegacyInfo(b); err != nil {
				return err
			}
			if info.size > maxBlob {
				return fmt.Errorf("%w: %d bytes", errBlob, info.size)
			}
			b = make([]byte, 40+int(info.size)) // struct ipt_get_entries
			copy(b, "nat")
			binary.NativeEndian.PutUint32(b[32:], info.size)
			err = getsockopt(fd, level, soGetEntries, b)
			if errors.Is(err, unix.EAGAIN) { // replaced in between
				continue
			}
			raw = b[40:]
			return err
		}
		return errMoved
	})
	return info, raw, err
}

func getsockopt(fd, level, opt int, b []byte) error {
	n := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(opt),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// networkChanged implements system.
func (k *kernel) networkChanged() <-chan struct{} { return k.net.Changed() }

// network implements system.
func (k *kernel) network() (netwatch.Snapshot, error) { return k.net.Snapshot() }
