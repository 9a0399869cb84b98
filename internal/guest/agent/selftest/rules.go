// SPDX-License-Identifier: Apache-2.0

//go:build linux

package selftest

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// rulePort is the port that the rule opens, in a namespace of its own.
const rulePort = 7

// ruleTarget is where it leads to (RFC 5737).
var ruleTarget = netip.AddrFrom4([4]byte{192, 0, 2, 1})

// table holds the rule.
func table() *nftables.Table {
	return &nftables.Table{Name: "fairlead-self-test", Family: nftables.TableFamilyIPv4}
}

// addRule adds the rule in the network namespace of the calling thread.
func addRule() error {
	const first, second = 1, 2 // registers
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	t := conn.AddTable(table())
	chain := conn.AddChain(&nftables.Chain{
		Name: "output", Table: t, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityNATDest,
	})
	number := binary.BigEndian.AppendUint16(nil, rulePort)
	conn.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: first},
		&expr.Cmp{Op: expr.CmpOpEq, Register: first, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: first, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: first, Data: number},
		&expr.Immediate{Register: first, Data: ruleTarget.AsSlice()},
		&expr.Immediate{Register: second, Data: number},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: first, RegProtoMin: second},
	}})
	return conn.Flush()
}

// removeRule undoes addRule.
func removeRule() error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	conn.DelTable(table())
	return conn.Flush()
}

// rules records what a NAT source reports of the rule. It implements registry.Feed.
type rules struct {
	ready   chan struct{} // closed after the first set
	changed schedule.Signal

	mu         sync.Mutex
	known      bool // a set was reported
	method     string
	stale      error
	origin     port.Origin
	came, gone time.Time
}

func newRules() *rules {
	return &rules{ready: make(chan struct{}), changed: schedule.NewSignal()}
}

// Replace implements registry.Feed.
func (r *rules) Replace(set []port.Binding) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.known {
		r.known = true
		close(r.ready)
	}
	r.note(set)
	if !slices.ContainsFunc(set, func(b port.Binding) bool { return b.Origin == r.origin }) {
		r.leave()
	}
}

// Apply implements registry.Feed.
func (r *rules) Apply(change port.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.note(change.Put)
	if slices.Contains(change.Drop, r.origin) {
		r.leave()
	}
}

// note records the rule if it is there. The caller holds mu.
func (r *rules) note(bindings []port.Binding) {
	i := slices.IndexFunc(bindings, func(b port.Binding) bool { return b.Port == rulePort })
	if i >= 0 && r.came.IsZero() {
		r.origin, r.came = bindings[i].Origin, time.Now()
		r.changed.Notify()
	}
}

// leave records that the rule is gone, if it was there. The caller holds mu.
func (r *rules) leave() {
	if !r.came.IsZero() && r.gone.IsZero() {
		r.gone = time.Now()
		r.changed.Notify()
	}
}

// Stale implements registry.Feed.
func (r *rules) Stale(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stale = err
}

// Warn implements registry.Feed.
func (*rules) Warn([]string) {}

// Lacks implements registry.Feed.
func (r *rules) Lacks(_ port.Lack, why string) { r.Method(why) }

// Method implements registry.Feed. How legacy tables are read is of no interest here.
func (r *rules) Method(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.method, _, _ = strings.Cut(name, ",")
}

// reason is why the rules could not be read, if they could not.
func (r *rules) reason() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stale
}

func (r *rules) added() (string, time.Time, error)   { return r.when(&r.came) }
func (r *rules) removed() (string, time.Time, error) { return r.when(&r.gone) }

func (r *rules) when(at *time.Time) (string, time.Time, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.method, *at, nil
}
