// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// Messages around a batch (linux/netfilter/nfnetlink.h).
const (
	batchBegin = 0x10
	batchEnd   = 0x11
	batchGenID = 1
)

const (
	messageSize = 256 << 10 // the kernel's messages are smaller (NLMSG_GOODSIZE, 32 KiB dumps)
	maxRules    = 400_000
	maxBlob     = 256 << 20
)

// Kernel reads rulesets from one network namespace. It is not safe for concurrent use.
type Kernel struct {
	log      *slog.Logger
	filter   Filter     // nil: all notifications are read
	filtered *nftStream // the stream that has the filter, nil if none has
	queue    int        // bytes of notifications that the kernel queues
	netns    *os.File   // nil: the process's own
	nft      *netlink.Conn

	net      *netwatch.Watcher
	stop     context.CancelFunc // ends net
	watching sync.WaitGroup
}

// Open opens the network namespace at path; empty is the process's own. The
// caller closes it. filter may be nil. queue is how many bytes of notifications the
// kernel queues.
func Open(log *slog.Logger, path string, filter Filter, queue int) (*Kernel, error) {
	k := &Kernel{log: log, filter: filter, queue: queue}
	if path != "" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("network namespace: %w", err)
		}
		k.netns = f
	}
	k.net = netwatch.New(netwatch.Options{Log: log, NetNS: path, Parts: netwatch.Links | netwatch.Addresses | netwatch.Routes})
	ctx, cancel := context.WithCancel(context.Background())
	k.stop = cancel
	k.watching.Go(func() { k.net.Run(ctx) })
	return k, nil
}

// Close ends all that the kernel started. Streams are closed by their users.
func (k *Kernel) Close() {
	k.stop()
	k.watching.Wait()
	k.closeRequests()
	if k.netns != nil {
		_ = k.netns.Close()
	}
}

// inNetns runs f on a thread that is in the watched network namespace.
func (k *Kernel) inNetns(f func() error) error {
	if k.netns == nil {
		return f()
	}
	return kernel.OnThread(func() error {
		if err := unix.Setns(int(k.netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

func (k *Kernel) dial() (*netlink.Conn, error) {
	var c *netlink.Conn
	err := k.inNetns(func() (err error) {
		c, err = netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: messageSize})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("nfnetlink: %w", err)
	}
	return c, nil
}

// openRequests opens the socket for requests unless it is open.
func (k *Kernel) openRequests() (err error) {
	if k.nft == nil {
		k.nft, err = k.dial()
	}
	return err
}

func requestMessage(typ, family uint8, flags netlink.HeaderFlags, attrs []byte) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(ruleset.Subsystem<<8 | uint16(typ)), Flags: netlink.Request | flags},
		Data:   append([]byte{family, 0, 0, 0}, attrs...),
	}
}

// closeRequests closes the socket for requests; the next one opens another.
func (k *Kernel) closeRequests() {
	if k.nft != nil {
		_ = k.nft.Close()
		k.nft = nil
	}
}

// request sends one nftables request and hands each answer to f. After ErrMoved f may
// have got a part of the answers, and some of them twice.
func (k *Kernel) request(typ uint8, family uint8, dump bool, attrs []byte, f func(*ruleset.Message) error) error {
	if err := k.openRequests(); err != nil {
		return err
	}
	var flags netlink.HeaderFlags
	if dump {
		flags = netlink.Dump
	}
	err := k.exchange(requestMessage(typ, family, flags, attrs), f)
	if err != nil && !errors.Is(err, ErrMoved) {
		k.closeRequests() // answers may still be on their way
	}
	return err
}

func (k *Kernel) exchange(req netlink.Message, f func(*ruleset.Message) error) error {
	if _, err := k.nft.Send(req); err != nil {
		return err
	}
	var first error
	interrupted := false
	for m, err := range k.nft.ReceiveIter() {
		if err != nil {
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) { // a table or set went while it was read
				k.closeRequests()
				return ErrMoved
			}
			return err
		}
		if first != nil {
			continue
		}
		interrupted = interrupted || m.Header.Flags&netlink.DumpInterrupted != 0
		if uint16(m.Header.Type)>>8 != ruleset.Subsystem {
			continue
		}
		msg, err := ruleset.ParseMessage(uint8(m.Header.Type), uint16(m.Header.Flags), m.Data)
		if err == nil {
			err = f(msg)
		}
		first = err
	}
	if first == nil && interrupted {
		return ErrMoved
	}
	return first
}

// Generation returns the number of the last commit.
func (k *Kernel) Generation() (uint32, error) {
	var gen uint32
	err := k.request(ruleset.MsgGetGen, unix.AF_UNSPEC, false, nil, func(m *ruleset.Message) error {
		gen = m.Generation
		return nil
	})
	if err != nil {
		for _, e := range []error{unix.EINVAL, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} {
			if errors.Is(err, e) {
				return 0, fmt.Errorf("%w: %w", ErrAbsent, err)
			}
		}
		return 0, fmt.Errorf("nftables generation: %w", err)
	}
	return gen, nil
}

// settled returns nil if the ruleset is that of generation gen and no commit is
// under way, and ErrMoved otherwise.
//
// The number alone does not prove that: a commit raises it before its changes can
// be read, and reading takes no lock. A batch waits for the commit under way and
// is refused unless the number is the one it names; an empty one changes nothing.
func (k *Kernel) settled(gen uint32) error {
	batch := func(typ uint16, attrs []byte) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: netlink.HeaderType(typ), Flags: netlink.Request},
			Data:   append([]byte{unix.AF_UNSPEC, 0, 0, ruleset.Subsystem}, attrs...),
		}
	}
	_, err := k.nft.SendMessages([]netlink.Message{
		batch(batchBegin, ruleset.AppendAttr(nil, batchGenID, binary.BigEndian.AppendUint32(nil, gen))),
		batch(batchEnd, nil),
	})
	if err != nil {
		k.closeRequests()
		return fmt.Errorf("empty batch: %w", err)
	}
	// Only a refusal is answered, before what is asked next.
	now, err := k.Generation()
	switch {
	case errors.Is(err, unix.ERESTART), err == nil && now != gen:
		return ErrMoved
	case err != nil:
		return fmt.Errorf("after an empty batch: %w", err)
	}
	return nil
}

// Dump returns the nat-relevant nftables ruleset at one generation, or ErrMoved.
func (k *Kernel) Dump(ctx context.Context) (*ruleset.Snapshot, error) {
	gen, err := k.Generation()
	if err != nil {
		return nil, err
	}
	if err := k.settled(gen); err != nil {
		return nil, err
	}
	s := &ruleset.Snapshot{Generation: gen}
	tables := make(map[ruleset.TableID]*ruleset.Table)
	err = k.request(ruleset.MsgGetTable, unix.AF_UNSPEC, true, nil, func(m *ruleset.Message) error {
		if m.Table.Family != 0 {
			tables[m.Table] = &ruleset.Table{ID: m.Table, Handle: m.Handle, Dormant: m.Flags&ruleset.TableDormant != 0, Owned: m.Owned()}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("dump tables: %w", err)
	}
	err = k.request(ruleset.MsgGetChain, unix.AF_UNSPEC, true, nil, func(m *ruleset.Message) error {
		if t := tables[m.Table]; t != nil {
			t.Chains = append(t.Chains, &ruleset.Chain{Name: m.Chain, Handle: m.Handle, Hook: m.Hook})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("dump chains: %w", err)
	}
	for _, t := range tables {
		if t.IsNAT() {
			s.Tables = append(s.Tables, t)
		} else {
			s.Others = append(s.Others, t.ID)
		}
	}
	// From now on what changes them is notified. The generation is compared after that.
	k.follow(s.Tables)
	slices.SortFunc(s.Tables, func(a, b *ruleset.Table) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	for _, t := range s.Tables {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := k.dumpTable(t); err != nil {
			return nil, fmt.Errorf("dump table %s: %w", t.ID, err)
		}
	}
	return s, k.settled(gen)
}

// Exists implements system.
func (k *Kernel) Exists(t ruleset.TableID) (bool, error) {
	err := k.request(ruleset.MsgGetTable, t.Family, false, ruleset.AppendAttr(nil, 1, append([]byte(t.Name), 0)), func(*ruleset.Message) error { return nil })
	if errors.Is(err, ErrMoved) {
		return false, nil
	}
	return err == nil, err
}

func (k *Kernel) dumpTable(t *ruleset.Table) error {
	chains := make(map[string]*ruleset.Chain)
	for _, c := range t.Chains {
		chains[c.Name] = c
	}
	name := append([]byte(t.ID.Name), 0)
	rules := 0
	err := k.request(ruleset.MsgGetRule, t.ID.Family, true, ruleset.AppendAttr(nil, 1, name), func(m *ruleset.Message) error {
		if m.Table != t.ID {
			return nil
		}
		c := chains[m.Chain]
		if c == nil {
			return ErrMoved
		}
		if rules++; rules > maxRules {
			return fmt.Errorf("more than %d rules", maxRules)
		}
		c.Rules = append(c.Rules, ruleset.Rule{Handle: m.Handle, Raw: m.Raw})
		return nil
	})
	if err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	sets := make(map[string]*ruleset.Set)
	err = k.request(ruleset.MsgGetSet, t.ID.Family, true, ruleset.AppendAttr(nil, 1, name), func(m *ruleset.Message) error {
		if m.Table == t.ID {
			m.Set.Blank = true
			t.Sets = append(t.Sets, m.Set)
			sets[m.Set.Name] = m.Set
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("sets: %w", err)
	}
	return k.dumpReached(t, chains, sets)
}

// Rules returns the rules of a chain in their order; a chain that does not exist has
// none. If a commit overtook the reading, it may lack some rules or have some twice,
// and the error is ErrMoved.
func (k *Kernel) Rules(id ruleset.ChainID) ([]ruleset.Rule, error) {
	attrs := ruleset.AppendAttr(nil, 1, append([]byte(id.Table.Name), 0))
	attrs = ruleset.AppendAttr(attrs, 2, append([]byte(id.Name), 0))
	var out []ruleset.Rule
	err := k.request(ruleset.MsgGetRule, id.Table.Family, true, attrs, func(m *ruleset.Message) error {
		if m.Table != id.Table || m.Chain != id.Name {
			return nil
		}
		if out = append(out, ruleset.Rule{Handle: m.Handle, Raw: m.Raw}); len(out) > maxRules {
			return fmt.Errorf("more than %d rules", maxRules)
		}
		return nil
	})
	if err != nil && !errors.Is(err, ErrMoved) {
		return nil, fmt.Errorf("rules of chain %s of table %s: %w", id.Name, id.Table, err)
	}
	return out, err
}

// dumpReached reads the elements of the sets that packets can meet, and only
// those: a table may hold large sets for other ends.
func (k *Kernel) dumpReached(t *ruleset.Table, chains map[string]*ruleset.Chain, sets map[string]*ruleset.Set) error {
	seen := make(map[string]bool)
	var queue []*ruleset.Chain
	reach := func(name string) {
		if c := chains[name]; c != nil && !seen[name] {
			seen[name] = true
			queue = append(queue, c)
		}
	}
	for _, c := range t.Chains {
		if c.Hook.IsNAT() {
			reach(c.Name)
		}
	}
	for len(queue) > 0 {
		c := queue[0]
		queue = queue[1:]
		for _, r := range c.Rules {
			exprs, err := ruleset.ParseExprs(r.Raw)
			if err != nil {
				continue // the compiler reports it
			}
			for _, x := range exprs {
				switch e := x.(type) {
				case ruleset.Immediate:
					if e.Verdict != nil {
						reach(e.Verdict.Chain)
					}
				case ruleset.Lookup:
					n := sets[e.Set]
					if n == nil || !n.Blank {
						continue
					}
					if err := k.dumpSet(t.ID, n); err != nil {
						return err
					}
					for _, el := range n.Elements {
						if el.Verdict != nil {
							reach(el.Verdict.Chain)
						}
					}
				}
			}
		}
	}
	return nil
}

func (k *Kernel) dumpSet(t ruleset.TableID, n *ruleset.Set) error {
	n.Blank = false
	if n.Changing() {
		return nil
	}
	attrs := ruleset.AppendAttr(nil, 1, append([]byte(t.Name), 0))
	attrs = ruleset.AppendAttr(attrs, 2, append([]byte(n.Name), 0))
	err := k.request(ruleset.MsgGetElem, t.Family, true, attrs, func(m *ruleset.Message) error {
		for _, e := range m.Elements {
			n.Elements[e.ID()] = e
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("elements of %s: %w", n.Name, err)
	}
	return nil
}

// follow has the filter pass what concerns these tables, or else all.
func (k *Kernel) follow(tables []*ruleset.Table) {
	if k.filtered == nil {
		return
	}
	if err := k.filter.follow(tables); err != nil {
		k.log.Info("reading all notifications of nftables", "reason", err)
		_ = k.filtered.RemoveBPF()
		k.filtered.filter, k.filtered = nil, nil
	}
}

// Watch implements system.
func (k *Kernel) Watch() (Stream, error) {
	c, err := k.dial()
	if err != nil {
		return nil, err
	}
	s := &nftStream{Conn: c}
	if s.raw, err = c.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("nfnetlink: %w", err), c.Close())
	}
	// SO_RCVBUFFORCE, which mdlayher/socket tries first, needs CAP_NET_ADMIN; a
	// smaller buffer only means that overflow comes sooner.
	_ = c.SetReadBuffer(k.queue)
	if k.filter != nil {
		if err := k.filter.attach(c); err != nil {
			k.log.Info("reading all notifications of nftables", "reason", err)
		} else {
			s.filter, k.filtered = k.filter, s
		}
	}
	if err := c.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		return nil, errors.Join(fmt.Errorf("join the group of nftables: %w", err), c.Close())
	}
	return s, nil
}

type nftStream struct {
	*netlink.Conn
	raw    syscall.RawConn
	filter Filter // nil: all notifications are read
	lost   uint32 // packets that found no room, as far as it was reported
}

// Filtered implements Stream.
func (s *nftStream) Filtered() bool { return s.filter != nil }

// Passed implements Stream.
func (s *nftStream) Passed() (generation uint32, err error) { return s.filter.passed() }

// Next implements Stream.
func (s *nftStream) Next() ([]*ruleset.Message, error) {
	msgs, err := s.read()
	// After an overflow the kernel reports no other until the queue is empty, and goes on
	// dropping. So its count is compared, also to know that a gap is none.
	lost, countErr := s.drops()
	switch {
	case errors.Is(err, unix.ENOBUFS), err == nil && lost != s.lost:
		err = ErrLost
	case err == nil:
		err = countErr
	}
	s.lost = lost
	if err != nil {
		return nil, err
	}
	return msgs, nil
}

func (s *nftStream) read() ([]*ruleset.Message, error) {
	var out []*ruleset.Message
	for m, err := range s.ReceiveIter() {
		if err != nil {
			return nil, err
		}
		if uint16(m.Header.Type)>>8 != ruleset.Subsystem {
			continue
		}
		msg, err := ruleset.ParseMessage(uint8(m.Header.Type), uint16(m.Header.Flags), m.Data)
		if err != nil {
			return nil, errors.Join(ErrLost, err)
		}
		out = append(out, msg)
	}
	return out, nil
}

// drops returns how many packets found no room in the socket's queue so far.
func (s *nftStream) drops() (uint32, error) {
	var info [9]uint32 // SK_MEMINFO_VARS
	const drops = 8    // SK_MEMINFO_DROPS
	var failed error
	err := s.raw.Control(func(fd uintptr) {
		b := unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info))
		failed = getsockopt(int(fd), unix.SOL_SOCKET, unix.SO_MEMINFO, b)
	})
	if err = cmp.Or(err, failed); err != nil {
		return s.lost, fmt.Errorf("count of lost notifications: %w", err)
	}
	return info[drops], nil
}

// LegacyTables reports which families have a legacy nat table. It does not ask for
// the table, because that would create it.
func (k *Kernel) LegacyTables() (v4, v6 bool, err error) {
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

// Legacy implements system.
func (k *Kernel) Legacy(v6 bool) (*ruleset.Table, error) {
	info, raw, err := k.readLegacy(v6)
	if err != nil {
		return nil, fmt.Errorf("read legacy nat table: %w", err)
	}
	return ruleset.ParseLegacy(v6, info, raw)
}

// readLegacy returns the legacy nat table of one family as the kernel has it.
func (k *Kernel) readLegacy(v6 bool) (info ruleset.LegacyInfo, raw []byte, err error) {
	err = k.inNetns(func() error {
		domain, level := unix.AF_INET, unix.IPPROTO_IP
		if v6 {
			domain, level = unix.AF_INET6, unix.IPPROTO_IPV6
		}
		// iptables uses a raw socket, which needs CAP_NET_RAW. Any socket of the family will do.
		fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
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
			if info, err = ruleset.ParseLegacyInfo(b); err != nil {
				return err
			}
			if info.Size > maxBlob {
				return fmt.Errorf("%w: %d bytes", ruleset.ErrMalformedTable, info.Size)
			}
			b = make([]byte, 40+int(info.Size)) // struct ipt_get_entries
			copy(b, "nat")
			binary.NativeEndian.PutUint32(b[32:], info.Size)
			err = getsockopt(fd, level, soGetEntries, b)
			if errors.Is(err, unix.EAGAIN) { // replaced in between
				continue
			}
			raw = b[40:]
			return err
		}
		return ErrMoved
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

// NetworkChanged implements system.
func (k *Kernel) NetworkChanged() <-chan struct{} { return k.net.Changed() }

// Network implements system.
func (k *Kernel) Network() (netwatch.Snapshot, error) { return k.net.Snapshot() }
