// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	nft "github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// ruleset is the filter rules of nftables, among them those of iptables-nft.
type ruleset struct {
	chains []*chain // in no order
	sets   map[setID]*nft.Set
	legacy bool // there is a filter table of iptables-legacy, which is not read
}

type chain struct {
	id    nft.ChainID
	hook  *nft.Hook // nil if it is not a base chain
	rules [][]any
}

type setID struct {
	table nft.TableID
	name  string
}

const (
	hookInput = 1 // NF_INET_LOCAL_IN
	maxRules  = 20000
	timeout   = 5 * time.Second
)

// read reads the rules of this network namespace.
func read() (_ *ruleset, err error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	rs := &ruleset{sets: make(map[setID]*nft.Set), legacy: hasLegacy()}
	if err := rs.readChains(c); err != nil || !rs.hooked() {
		return rs, err
	}
	if err := rs.readRules(c); err != nil {
		return nil, err
	}
	return rs, rs.readSets(c)
}

// hasLegacy reports whether iptables-legacy has filter rules, as far as root may know.
func hasLegacy() bool {
	for _, path := range []string{"/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"} {
		b, _ := os.ReadFile(path) // absent unless it is in use
		if slices.Contains(strings.Fields(string(b)), "filter") {
			return true
		}
	}
	return false
}

func (rs *ruleset) hooked() bool {
	return slices.ContainsFunc(rs.chains, func(c *chain) bool { return c.isInput() })
}

func (c *chain) name() string { return "chain " + c.id.Table.String() + " " + c.id.Name }

func (c *chain) isInput() bool {
	return c.hook != nil && c.hook.Num == hookInput && c.hook.Type == "filter"
}

// dump sends a request and hands each answer to f.
func dump(c *netlink.Conn, typ, family uint8, attrs []byte, f func(*nft.Message) error) error {
	answers, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(nft.Subsystem<<8 | uint16(typ)), Flags: netlink.Request | netlink.Dump},
		Data:   append([]byte{family, 0, 0, 0}, attrs...),
	})
	if err != nil {
		return err
	}
	for _, a := range answers {
		if uint16(a.Header.Type)>>8 != nft.Subsystem {
			continue
		}
		m, err := nft.ParseMessage(uint8(a.Header.Type), uint16(a.Header.Flags), a.Data)
		if err == nil && m.Table.Family != 0 {
			err = f(m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (rs *ruleset) readChains(c *netlink.Conn) error {
	return dump(c, nft.MsgGetChain, unix.AF_UNSPEC, nil, func(m *nft.Message) error {
		rs.chains = append(rs.chains, &chain{id: nft.ChainID{Table: m.Table, Name: m.Chain}, hook: m.Hook})
		return nil
	})
}

func (rs *ruleset) readRules(c *netlink.Conn) error {
	n := 0
	return dump(c, nft.MsgGetRule, unix.AF_UNSPEC, nil, func(m *nft.Message) error {
		if n++; n > maxRules {
			return fmt.Errorf("more than %d rules", maxRules)
		}
		exprs, err := nft.ParseExprs(m.Raw)
		if at := rs.chain(nft.ChainID{Table: m.Table, Name: m.Chain}); at != nil {
			at.rules = append(at.rules, exprs)
		}
		return err
	})
}

func (rs *ruleset) chain(id nft.ChainID) *chain {
	if i := slices.IndexFunc(rs.chains, func(c *chain) bool { return c.id == id }); i >= 0 {
		return rs.chains[i]
	}
	return nil
}

// readSets reads the sets that chains at the input hook may use: those of their tables.
func (rs *ruleset) readSets(c *netlink.Conn) error {
	tables := make(map[nft.TableID]bool)
	for _, ch := range rs.chains {
		if ch.isInput() {
			tables[ch.id.Table] = true
		}
	}
	err := dump(c, nft.MsgGetSet, unix.AF_UNSPEC, nil, func(m *nft.Message) error {
		if tables[m.Table] {
			rs.sets[setID{m.Table, m.Set.Name}] = m.Set
		}
		return nil
	})
	for id, set := range rs.sets {
		if err != nil {
			return err
		}
		set.Elements = make(map[string]nft.Element)
		attrs := nft.AppendAttr(nft.AppendAttr(nil, 1, append([]byte(id.table.Name), 0)), 2, append([]byte(id.name), 0))
		err = dump(c, nft.MsgGetElem, id.table.Family, attrs, func(m *nft.Message) error {
			for _, e := range m.Elements {
				set.Elements[e.ID()] = e
			}
			return nil
		})
	}
	return err
}

// family is the protocol family of addresses.
func family(v6 bool) uint8 {
	if v6 {
		return nft.FamilyIP6
	}
	return nft.FamilyIP
}

// inputs returns the base chains for incoming packets of a family, in the order in which
// they decide.
func (rs *ruleset) inputs(v6 bool) []*chain {
	list := slices.DeleteFunc(slices.Clone(rs.chains), func(c *chain) bool {
		return !c.isInput() || c.id.Table.Family != nft.FamilyInet && c.id.Table.Family != family(v6)
	})
	slices.SortStableFunc(list, func(a, b *chain) int { return cmp.Compare(a.hook.Priority, b.hook.Priority) })
	return list
}
