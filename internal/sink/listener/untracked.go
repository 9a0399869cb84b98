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

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Untracked keeps connections from the guest's loopback to TCP ports of it away
// from NAT: a rule of the output hook that takes them would otherwise send them
// off before they reach the listener, and what comes from ::1 never arrives
// anywhere then.
//
// It is a table of nftables whose chain says notrack to such packets; there is no
// other way past rules that are not ours, and theirs are not touched. The kernel
// removes the table with the socket that made it (NFT_TABLE_F_OWNER, Linux 5.12),
// so that nothing outlives the process. It exists only while there are ports.
//
// The zero value is ready and empty. It is for the network namespace of the
// thread that first calls Put.
type Untracked struct {
	mu    sync.Mutex
	conn  *netlink.Conn // nil while there are no ports
	ports map[portOf]struct{}
}

type portOf struct {
	is4  bool
	port uint16
}

// answerTime bounds the wait for the kernel, which answers as it works.
const answerTime = 2 * time.Second

const (
	tableOwned = 2 // NFT_TABLE_F_OWNER of linux/netfilter/nf_tables.h

	untrackedTable = "fairlead-listener"
	untrackedChain = "output"
)

func (p portOf) set() string {
	if p.is4 {
		return "ports4"
	}
	return "ports6"
}

// Put keeps NAT away from the port of a listener, on the loopback of its family.
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
	} else {
		err = u.batch(elementMessage(unix.NFT_MSG_NEWSETELEM, p))
	}
	if err != nil {
		delete(u.ports, p)
		return fmt.Errorf("keep %v from NAT: %w", at, errors.Join(err, u.drop()))
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
	if err := u.batch(elementMessage(unix.NFT_MSG_DELSETELEM, p)); err != nil {
		return fmt.Errorf("give %v back to NAT: %w", at, errors.Join(err, u.drop()))
	}
	return nil
}

// drop lets the kernel remove the table. The next Put makes it anew.
func (u *Untracked) drop() error {
	if u.conn == nil {
		return nil
	}
	err := u.conn.Close()
	u.conn = nil
	return err
}

// open makes the table with all ports.
func (u *Untracked) open() error {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	u.conn = conn
	// raw, before connection tracking (NF_IP_PRI_RAW), on the way out of a local process.
	const hookOutput, priority = 3, -300
	const inetService = 13 // nft's number of the type, for those who list the set
	messages := []netlink.Message{
		nftMessage(unix.NFT_MSG_NEWTABLE, func(e *netlink.AttributeEncoder) {
			e.String(unix.NFTA_TABLE_NAME, untrackedTable)
			e.Uint32(unix.NFTA_TABLE_FLAGS, tableOwned)
		}),
		nftMessage(unix.NFT_MSG_NEWCHAIN, func(e *netlink.AttributeEncoder) {
			e.String(unix.NFTA_CHAIN_TABLE, untrackedTable)
			e.String(unix.NFTA_CHAIN_NAME, untrackedChain)
			e.String(unix.NFTA_CHAIN_TYPE, "filter")
			e.Nested(unix.NFTA_CHAIN_HOOK, func(e *netlink.AttributeEncoder) error {
				e.Uint32(unix.NFTA_HOOK_HOOKNUM, hookOutput)
				e.Int32(unix.NFTA_HOOK_PRIORITY, priority)
				return nil
			})
		}),
	}
	for id, is4 := range []bool{true, false} {
		set := portOf{is4: is4}.set()
		messages = append(messages, nftMessage(unix.NFT_MSG_NEWSET, func(e *netlink.AttributeEncoder) {
			e.String(unix.NFTA_SET_TABLE, untrackedTable)
			e.String(unix.NFTA_SET_NAME, set)
			e.Uint32(unix.NFTA_SET_KEY_TYPE, inetService)
			e.Uint32(unix.NFTA_SET_KEY_LEN, 2)
			e.Uint32(unix.NFTA_SET_ID, uint32(id)+1)
		}), ruleMessage(is4, set, false), ruleMessage(is4, set, true))
	}
	for p := range u.ports {
		messages = append(messages, elementMessage(unix.NFT_MSG_NEWSETELEM, p))
	}
	return u.batch(messages...)
}

// ruleMessage says notrack to TCP packets to ports of a set on the loopback of a
// family, or to those that come from there: the answers.
func ruleMessage(is4 bool, set string, from bool) netlink.Message {
	const reg, network, transport, tcp = 1, 1, 2, unix.IPPROTO_TCP
	family, addr, addrAt, portAt := byte(unix.NFPROTO_IPV6), netip.IPv6Loopback(), uint32(24), uint32(2)
	if is4 {
		family, addr, addrAt = unix.NFPROTO_IPV4, netip.AddrFrom4([4]byte{127, 0, 0, 1}), 16
	}
	if from { // the source stands before the destination
		addrAt -= uint32(addr.BitLen() / 8)
		portAt = 0
	}
	equal := func(value []byte) func(*netlink.AttributeEncoder) {
		return func(e *netlink.AttributeEncoder) {
			e.Uint32(unix.NFTA_CMP_SREG, reg)
			e.Uint32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
			e.Nested(unix.NFTA_CMP_DATA, func(e *netlink.AttributeEncoder) error {
				e.Bytes(unix.NFTA_DATA_VALUE, value)
				return nil
			})
		}
	}
	meta := func(key uint32) func(*netlink.AttributeEncoder) {
		return func(e *netlink.AttributeEncoder) {
			e.Uint32(unix.NFTA_META_KEY, key)
			e.Uint32(unix.NFTA_META_DREG, reg)
		}
	}
	payload := func(base, offset, length uint32) func(*netlink.AttributeEncoder) {
		return func(e *netlink.AttributeEncoder) {
			e.Uint32(unix.NFTA_PAYLOAD_DREG, reg)
			e.Uint32(unix.NFTA_PAYLOAD_BASE, base)
			e.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
			e.Uint32(unix.NFTA_PAYLOAD_LEN, length)
		}
	}
	expressions := []struct {
		name string
		data func(*netlink.AttributeEncoder)
	}{
		{"meta", meta(unix.NFT_META_NFPROTO)},
		{"cmp", equal([]byte{family})},
		{"payload", payload(network, addrAt, uint32(addr.BitLen()/8))},
		{"cmp", equal(addr.AsSlice())},
		{"meta", meta(unix.NFT_META_L4PROTO)},
		{"cmp", equal([]byte{tcp})},
		{"payload", payload(transport, portAt, 2)},
		{"lookup", func(e *netlink.AttributeEncoder) {
			e.String(unix.NFTA_LOOKUP_SET, set)
			e.Uint32(unix.NFTA_LOOKUP_SREG, reg)
		}},
		{"notrack", nil},
	}
	m := nftMessage(unix.NFT_MSG_NEWRULE, func(e *netlink.AttributeEncoder) {
		e.String(unix.NFTA_RULE_TABLE, untrackedTable)
		e.String(unix.NFTA_RULE_CHAIN, untrackedChain)
		e.Nested(unix.NFTA_RULE_EXPRESSIONS, func(e *netlink.AttributeEncoder) error {
			for _, x := range expressions {
				e.Nested(unix.NFTA_LIST_ELEM, func(e *netlink.AttributeEncoder) error {
					e.String(unix.NFTA_EXPR_NAME, x.name)
					if x.data != nil {
						e.Nested(unix.NFTA_EXPR_DATA, func(e *netlink.AttributeEncoder) error { x.data(e); return nil })
					}
					return nil
				})
			}
			return nil
		})
	})
	m.Header.Flags |= netlink.Append
	return m
}

func elementMessage(typ int, p portOf) netlink.Message {
	return nftMessage(typ, func(e *netlink.AttributeEncoder) {
		e.String(unix.NFTA_SET_ELEM_LIST_TABLE, untrackedTable)
		e.String(unix.NFTA_SET_ELEM_LIST_SET, p.set())
		e.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(e *netlink.AttributeEncoder) error {
			e.Nested(unix.NFTA_LIST_ELEM, func(e *netlink.AttributeEncoder) error {
				e.Nested(unix.NFTA_SET_ELEM_KEY, func(e *netlink.AttributeEncoder) error {
					e.Bytes(unix.NFTA_DATA_VALUE, binary.BigEndian.AppendUint16(nil, p.port))
					return nil
				})
				return nil
			})
			return nil
		})
	})
}

// nftMessage makes one message of a batch; an encoding that failed gives an empty
// one, which the kernel refuses.
func nftMessage(typ int, attrs func(*netlink.AttributeEncoder)) netlink.Message {
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	attrs(e)
	b, err := e.Encode()
	if err != nil {
		b = nil
	}
	flags := netlink.Request | netlink.Acknowledge
	if typ != unix.NFT_MSG_DELSETELEM {
		flags |= netlink.Create
	}
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ), Flags: flags},
		Data:   append([]byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}, b...),
	}
}

// batch sends messages as one transaction (nfnetlink_rcv_batch in
// net/netfilter/nfnetlink.c) and waits for all acknowledgements.
func (u *Untracked) batch(messages ...netlink.Message) error {
	edge := func(typ netlink.HeaderType) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: typ, Flags: netlink.Request},
			Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES},
		}
	}
	all := append([]netlink.Message{edge(unix.NFNL_MSG_BATCH_BEGIN)}, messages...)
	if _, err := u.conn.SendMessages(append(all, edge(unix.NFNL_MSG_BATCH_END))); err != nil {
		return err
	}
	if err := u.conn.SetReadDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	for range messages {
		if _, err := u.conn.Receive(); err != nil {
			return err // the caller drops the connection, with what it still has to say
		}
	}
	return nil
}

// Close gives all ports back.
func (u *Untracked) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	clear(u.ports)
	return u.drop()
}
