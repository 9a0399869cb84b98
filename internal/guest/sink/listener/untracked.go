// SPDX-License-Identifier: Apache-2.0

//go:build linux

package listener

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
)

// Untracked exempts connections to TCP ports of the guest's loopback from NAT. A rule
// that matches them would otherwise send them elsewhere before they reach the listener,
// and packets from ::1 then never arrive anywhere.
//
// It is an nftables table whose chains say notrack to such packets: other
// programs' rules cannot be bypassed in another way, and they are not changed.
// In WSL's mirrored mode connections of Windows and of the guest itself come in by
// an interface, so that rules of the prerouting hook match them as well.
// The kernel removes the table with the socket that made it (NFT_TABLE_F_OWNER,
// Linux 5.12), so that nothing outlives the process. The table exists only while
// there are ports.
//
// The zero value is ready and empty. It is for the network namespace of the
// thread that first calls Put.
type Untracked struct {
	mu     sync.Mutex
	ports  map[portOf]struct{}
	conn   *nftables.Conn // nil while there are no ports
	socket *netlink.Conn  // of conn
}

type portOf struct {
	is4  bool
	port uint16
}

func (p portOf) element() []nftables.SetElement {
	return []nftables.SetElement{{Key: binary.BigEndian.AppendUint16(nil, p.port)}}
}

// answerTime bounds the wait for the kernel, which answers as it works.
const answerTime = 2 * time.Second

func untrackedTable() *nftables.Table {
	return &nftables.Table{Name: "fairlead-listener", Family: nftables.TableFamilyINet}
}

// portSet is the set of the ports of a family.
func portSet(is4 bool) *nftables.Set {
	s := &nftables.Set{Table: untrackedTable(), ID: 1, Name: "ports6", KeyType: nftables.TypeInetService}
	if is4 {
		s.ID, s.Name = 2, "ports4"
	}
	return s
}

// Put exempts the port of a listener, on the loopback of its family.
func (u *Untracked) Put(at netip.AddrPort) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	p := portOf{at.Addr().Is4(), at.Port()}
	if _, ok := u.ports[p]; ok {
		return nil
	}
	if u.ports == nil {
		u.ports = make(map[portOf]struct{})
	}
	u.ports[p] = struct{}{}
	var err error
	if u.conn == nil {
		err = u.open()
	} else if err = u.conn.SetAddElements(portSet(p.is4), p.element()); err == nil {
		err = u.flush()
	}
	if err != nil {
		delete(u.ports, p)
		return fmt.Errorf("exempt %v from NAT: %w", at, errors.Join(err, u.drop()))
	}
	return nil
}

// Remove undoes Put.
func (u *Untracked) Remove(at netip.AddrPort) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	p := portOf{at.Addr().Is4(), at.Port()}
	if _, ok := u.ports[p]; !ok {
		return nil
	}
	delete(u.ports, p)
	if len(u.ports) == 0 || u.conn == nil {
		return u.drop()
	}
	err := u.conn.SetDeleteElements(portSet(p.is4), p.element())
	if err == nil {
		err = u.flush()
	}
	if err != nil {
		return fmt.Errorf("no longer exempt %v from NAT: %w", at, errors.Join(err, u.drop()))
	}
	return nil
}

// Close removes all ports.
func (u *Untracked) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	clear(u.ports)
	return u.drop()
}

// drop has the kernel remove the table. The next Put makes it anew.
func (u *Untracked) drop() error {
	if u.conn == nil {
		return nil
	}
	err := u.conn.CloseLasting()
	u.conn, u.socket = nil, nil
	return err
}

// flush sends what is buffered, as one transaction.
func (u *Untracked) flush() error {
	if err := u.socket.SetReadDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	return u.conn.Flush()
}

// open makes the table with all ports.
func (u *Untracked) open() error {
	keep := func(s *netlink.Conn) error { u.socket = s; return nil }
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(keep))
	if err != nil {
		return err
	}
	u.conn = conn
	table := untrackedTable()
	if err := createOwned(u.socket, table); err != nil {
		return err
	}
	chain := func(name string, hook *nftables.ChainHook) *nftables.Chain {
		return conn.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeFilter,
			Hooknum: hook, Priority: nftables.ChainPriorityRaw, // before connection tracking
		})
	}
	output, prerouting := chain("output", nftables.ChainHookOutput), chain("prerouting", nftables.ChainHookPrerouting)
	for _, is4 := range []bool{true, false} {
		var elements []nftables.SetElement
		for p := range u.ports {
			if p.is4 == is4 {
				elements = append(elements, p.element()...)
			}
		}
		set := portSet(is4)
		if err := conn.AddSet(set, elements); err != nil {
			return err
		}
		for _, answers := range []bool{false, true} {
			for _, c := range []*nftables.Chain{output, prerouting} {
				conn.AddRule(&nftables.Rule{Table: table, Chain: c, Exprs: notrack(is4, set, answers)})
			}
		}
	}
	return u.flush()
}

// notrack matches TCP packets to ports of a set on the loopback of a family, or
// the answers, which come from there.
func notrack(is4 bool, set *nftables.Set, answers bool) []expr.Any {
	const reg = 1
	family, addr, addrAt, portAt := byte(unix.NFPROTO_IPV6), port.Loopback(netip.IPv6Unspecified()), uint32(24), uint32(2)
	if is4 {
		family, addr, addrAt = unix.NFPROTO_IPV4, port.Loopback(netip.IPv4Unspecified()), 16
	}
	size := uint32(addr.BitLen() / 8)
	if answers { // the source is before the destination
		addrAt, portAt = addrAt-size, 0
	}
	equal := func(value []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: value} }
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, equal([]byte{family}),
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: addrAt, Len: size}, equal(addr.AsSlice()),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}, equal([]byte{unix.IPPROTO_TCP}),
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: portAt, Len: 2},
		&expr.Lookup{SourceRegister: reg, SetName: set.Name, SetID: set.ID},
		&expr.Notrack{},
	}
}

// createOwned creates a table that belongs to a socket. nftables.Conn does the
// rest, but v0.3.0 leaves out the flags of a table.
func createOwned(s *netlink.Conn, t *nftables.Table) error {
	const tableOwned = 2 // NFT_TABLE_F_OWNER of linux/netfilter/nf_tables.h
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	e.String(unix.NFTA_TABLE_NAME, t.Name)
	e.Uint32(unix.NFTA_TABLE_FLAGS, tableOwned)
	attrs, err := e.Encode()
	if err != nil {
		return err
	}
	message := func(typ int, flags netlink.HeaderFlags, family, resource byte, attrs []byte) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: netlink.HeaderType(typ), Flags: netlink.Request | flags},
			Data:   append([]byte{family, unix.NFNETLINK_V0, 0, resource}, attrs...), // struct nfgenmsg
		}
	}
	if _, err := s.SendMessages([]netlink.Message{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil),
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, netlink.Create|netlink.Acknowledge, byte(t.Family), 0, attrs),
		message(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil),
	}); err != nil {
		return err
	}
	if err := s.SetReadDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	_, err = s.Receive()
	return err
}
