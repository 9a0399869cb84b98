// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package sockets

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/program"
)

// TestRandomOperations does random operations on sockets and, after every few, waits
// until the kernel, the list of the agent and connections agree, and often an agent that starts
// now. An audit of the agent must
// not have had to repair a socket, but where only audits see what the operation did.
// FAIRLEAD_SOCKET_OPERATIONS says how many for each method, FAIRLEAD_SEED which.
func TestRandomOperations(t *testing.T) {
	operations := rounds.Of(t, "FAIRLEAD_SOCKET_OPERATIONS", 125)
	seed := uint64(rounds.Of(t, "FAIRLEAD_SEED", 1))
	binary, err := program.Path(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range methodSets() {
		t.Run(set, func(t *testing.T) {
			r := newRun(newWorld(t, binary, set), seed)
			r.work(operations)
			t.Logf("%d operations, %d of them refused; %d comparisons, %d with an agent that starts now; methods %v", r.count, r.refused, r.comparisons, r.restarts, r.methods)
		})
	}
}

// methodSets returns the methods to test: those in the environment, else the whole
// chain and those that the kernels have on which root tests run. Polling is always
// one of them, once for each kernel.
func methodSets() []string {
	given := os.Getenv("FAIRLEAD_METHODS")
	if given == "" {
		return []string{"auto", kernel.MethodTPBTF, kernel.MethodCgroup, observer.MethodPoll}
	}
	sets := strings.Split(given, ",")
	if slices.Contains(sets, kernel.MethodFentry) {
		sets = append(sets, observer.MethodPoll)
	}
	return sets
}

// run is a sequence of random operations.
type run struct {
	*world
	rng     *rand.Rand
	seed    uint64
	history []string

	next   int
	open   map[int]*opened
	second bool // the interface has its second addresses

	client    map[int]bool         // UDP sockets that the kernel bound
	released  map[int]bool         // listeners that gave back the port that the kernel chose
	unseen    map[int]bool         // sockets that the method need not see
	hadBy     map[int]map[int]bool // actors that have or had a socket
	cookies   map[int]uint64       // of sockets
	blind     map[slot]bool        // ports of sockets that changed in a way that only an audit sees
	vague     map[slot]bool        // what compare must not look at: blind, or nothing
	excused   []string             // what repairs of such sockets contain
	boundSeen bool                 // TCP sockets that are only bound are seen
	calm      bool                 // no operation now asks the agent for a dump, which would hide a lost event

	count, refused, comparisons, restarts int
}

// opened is a socket as the driver knows it.
type opened struct {
	actor   int
	order   order
	anyPort bool // bound to port 0
	device  bool // was bound to an interface
	listens bool
	slot    slot
}

func (o *opened) udp() bool { return o.order.Type == unix.SOCK_DGRAM }

func newRun(w *world, seed uint64) *run {
	return &run{
		world: w, rng: rand.New(rand.NewPCG(seed, 0)), seed: seed, open: make(map[int]*opened),
		client: make(map[int]bool), released: make(map[int]bool), unseen: make(map[int]bool), hadBy: make(map[int]map[int]bool),
		cookies: make(map[int]uint64),
		blind:   make(map[slot]bool), vague: make(map[slot]bool),
		boundSeen: w.methods[observer.TCPBind] != observer.MethodPoll || dumpsBound(),
	}
}

// dumpsBound reports whether the kernel dumps sockets that are only bound (6.8).
func dumpsBound() bool {
	var u unix.Utsname
	_ = unix.Uname(&u)
	var major, minor int
	_, _ = fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	return major > 6 || major == 6 && minor >= 8
}

const (
	mostBatch = 32   // operations between comparisons
	ownersAt  = 20   // comparisons between looks at owners, which are searched once a second
	restartAt = 5    // comparisons between those with an agent that starts now
	settleAt  = 2000 // operations between waits for an audit
	mostOpen  = 25
	firstPort = 20_000
	auditPort = 19_999 // of the socket that shows an audit
	ports     = 24
)

func (r *run) work(operations int) {
	settled := 0
	for r.count < operations {
		touched := make(map[slot]bool)
		r.calm = r.chance(50)
		for n := 1 + r.rng.IntN(mostBatch); n > 0 && r.count < operations; n-- {
			r.operation(touched)
		}
		r.vague = r.blind
		r.agree(touched, r.comparisons%ownersAt == ownersAt-1, 0)
		if r.count >= settled+settleAt {
			r.settle()
			settled = r.count
		}
	}
	r.settle()
}

// settle waits until an audit has seen what nothing else sees.
func (r *run) settle() {
	r.audit()
	touched := r.blind
	r.blind, r.vague = make(map[slot]bool), nil
	r.agree(touched, true, auditInterval)
}

// audit waits for an audit of the agent, where a socket can be made that only an audit sees.
func (r *run) audit() {
	r.t.Helper()
	if r.methods[observer.TCPBind] == observer.MethodPoll || !dumpsBound() {
		return
	}
	r.next++
	o := &opened{order: order{
		Do: "open", ID: r.next, Family: unix.AF_INET, Type: unix.SOCK_STREAM, Bind: true,
		Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), auditPort),
	}}
	mark := fmt.Sprintf(":%d ", auditPort)
	r.excused = append(r.excused, mark)
	before := r.repaired(mark)
	r.order(0, o.order, -1)
	r.order(0, order{Do: "connect", ID: r.next, Family: unix.AF_INET, Address: peer(o)}, -1)
	end := time.Now().Add(max(wait.Limit(), 30*time.Second) + auditInterval)
	for ; r.repaired(mark) == before; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("no audit until %v\n%s", end, tail(r.agent.Output(), 3000))
		}
	}
	r.order(0, order{Do: "close", ID: r.next}, -1)
}

// repaired returns how many repairs of audits contain a text.
func (r *run) repaired(part string) (n int) {
	for _, repair := range r.repairs() {
		if strings.Contains(repair, part) {
			n++
		}
	}
	return n
}

// agree waits until there is no difference.
func (r *run) agree(touched map[slot]bool, owners bool, more time.Duration) {
	r.t.Helper()
	r.comparisons++
	limit := max(wait.Limit(), 30*time.Second) + more
	var err error
	for end := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		if err = errors.Join(r.compare(touched, owners), r.drift()); err == nil {
			if r.comparisons%restartAt == 0 || more > 0 {
				r.restart()
			}
			return
		}
		if time.Now().After(end) {
			break
		}
	}
	r.t.Fatalf("FAIRLEAD_SEED=%d, operation %d: no agreement within %v:\n%v\nThe last operations:\n%s\nThe agent's log:\n%s",
		r.seed, r.count, limit, err, strings.Join(r.history[max(0, len(r.history)-100):], "\n"), tail(r.agent.Output(), 3000))
}

// restart compares with an agent that starts now, which knows nothing of what was before.
func (r *run) restart() {
	r.t.Helper()
	r.restarts++
	for _, line := range r.differences() {
		blind := func(s slot) bool {
			return strings.HasPrefix(line, port.Slot{Protocol: s.protocol, Port: s.port}.String()+" ")
		}
		if slices.ContainsFunc(slices.Collect(maps.Keys(r.vague)), blind) {
			continue // an audit sees it later
		}
		r.t.Errorf("FAIRLEAD_SEED=%d, operation %d: %s", r.seed, r.count, line)
	}
	if r.t.Failed() {
		r.t.Fatalf("The last operations:\n%s", strings.Join(r.history[max(0, len(r.history)-100):], "\n"))
	}
}

// drift returns what audits repaired though events should have told.
func (r *run) drift() error {
	var errs []error
	for _, repair := range r.repairs() {
		if !slices.ContainsFunc(r.excused, func(part string) bool { return strings.Contains(repair, part) }) {
			errs = append(errs, fmt.Errorf("an audit repaired %s", repair))
		}
	}
	return errors.Join(errs...)
}

// onlyAudited notes that only an audit sees what a socket does now.
func (r *run) onlyAudited(id int, o *opened) {
	r.blind[o.slot] = true
	excuse := fmt.Sprintf("cookie %d;", r.cookies[id])
	if o.order.Proto != 0 { // of MPTCP the agent has a subflow, which has another cookie
		excuse = fmt.Sprintf(":%d ", o.slot.port)
	}
	r.excused = append(r.excused, excuse)
}

func tail(s string, n int) string { return s[max(0, len(s)-n):] }

// chance is true in n of 100 cases.
func (r *run) chance(n int) bool { return r.rng.IntN(100) < n }

func choose[T any](r *run, of ...T) T { return of[r.rng.IntN(len(of))] }

// pick returns an open socket that fits, and its number; nil if there is none.
func (r *run) pick(fits func(*opened) bool) (int, *opened) {
	var ids []int
	for id, o := range r.open {
		if fits(o) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return 0, nil
	}
	slices.Sort(ids)
	id := ids[r.rng.IntN(len(ids))]
	return id, r.open[id]
}

// operation does one operation and notes the port that it was about.
func (r *run) operation(touched map[slot]bool) {
	r.count++
	total := 0
	for _, k := range kinds {
		if !r.calm || !k.asks {
			total += k.weight
		}
	}
	n := r.rng.IntN(total)
	for _, k := range kinds {
		if r.calm && k.asks {
			continue
		}
		if n -= k.weight; n < 0 {
			for _, s := range k.do(r) {
				touched[s] = true
			}
			return
		}
	}
}

var kinds = []struct {
	weight int
	do     func(*run) []slot
	asks   bool // by some methods, for a dump of all UDP sockets
}{
	{36, (*run).create, false}, {18, (*run).close, false}, {7, (*run).listen, false}, {6, (*run).shutdown, false},
	{7, (*run).connect, true}, {3, (*run).connectTCP, false}, {5, (*run).disconnect, true}, {3, (*run).setDevice, false},
	{4, (*run).pass, false}, {1, (*run).fork, false}, {1, (*run).kill, false}, {2, (*run).readdress, false},
	{3, (*run).sendUnbound, false},
}

// order gives an order about a socket, notes it and reports whether it was done.
func (r *run) order(actor int, o order, fd int) (ok bool, got int) {
	rep, got := r.actors[actor].send(o, fd)
	if r.hadBy[o.ID] == nil {
		r.hadBy[o.ID] = make(map[int]bool)
	}
	r.hadBy[o.ID][actor] = true
	r.cookies[o.ID] = rep.Cookie
	line := fmt.Sprintf("%d: actor %d: %s", r.count, actor, describe(o))
	if rep.Err != "" {
		r.refused++
		line += ": " + rep.Err
	}
	r.history = append(r.history, line)
	return rep.Err == "", got
}

func describe(o order) string {
	text := fmt.Sprintf("%s %d", o.Do, o.ID)
	if o.Do == "open" {
		text += fmt.Sprintf(" family %d type %d protocol %d", o.Family, o.Type, o.Proto)
		for name, set := range map[string]bool{"v6only": o.V6Only, "reuseport": o.Reuse, "bind": o.Bind, "listen": o.Listen} {
			if set {
				text += " " + name
			}
		}
	}
	if o.Device != "" {
		text += " device " + o.Device
	}
	if o.Address.IsValid() {
		text += " " + o.Address.String()
	}
	return text
}

// create makes a socket.
func (r *run) create() []slot {
	if len(r.open) >= mostOpen {
		return r.close()
	}
	r.next++
	o := order{Do: "open", ID: r.next, Family: choose(r, unix.AF_INET, unix.AF_INET6), Type: unix.SOCK_STREAM, Bind: true}
	protocol := port.TCP
	switch r.rng.IntN(5) {
	case 0, 1:
		o.Type, protocol = unix.SOCK_DGRAM, port.UDP
	case 2:
		o.Proto = kernels.MPTCP()
	}
	o.V6Only = o.Family == unix.AF_INET6 && r.chance(40)
	o.Reuse = r.chance(30)
	if r.chance(12) {
		o.Device = choose(r, device, device, "lo")
	}
	o.Listen = protocol == port.TCP && r.chance(75)
	n := uint16(firstPort + r.rng.IntN(ports))
	if r.chance(10) && (o.Proto == 0 || o.Listen) {
		n = 0
	}
	o.Address = netip.AddrPortFrom(r.address(&o), n)
	if o.Listen && n == 0 && !r.calm && r.chance(30) { // tp_btf asks for a dump
		o.Bind = false
	}
	actor := r.rng.IntN(len(r.actors))
	if ok, _ := r.order(actor, o, -1); !ok {
		return nil
	}
	op := &opened{actor: actor, order: o, anyPort: n == 0, device: o.Device != "", listens: o.Listen, slot: slot{protocol, n}}
	r.open[o.ID] = op
	if m := r.methods[observer.TCPBind]; o.Proto != 0 && !o.Listen && (m == kernel.MethodFentry || m == kernel.MethodKprobe) {
		r.excused = append(r.excused, fmt.Sprintf(":%d bound", n)) // documented: only audits see it
	}
	if n == 0 && protocol == port.UDP && o.Address.Addr().IsUnspecified() && r.methods[observer.UDPBind] == observer.MethodPoll {
		r.unseen[o.ID] = true // documented: a dump cannot tell it from a client
	}
	return []slot{op.slot}
}

// address returns a random address to bind to.
func (r *run) address(o *order) netip.Addr {
	texts := []string{"0.0.0.0", "0.0.0.0", "127.0.0.1", "127.0.0.1", "127.0.0.2", address4, second4}
	if o.Type == unix.SOCK_DGRAM {
		texts = append(texts, "10.9.9.255", "224.0.0.251")
	}
	if o.Family == unix.AF_INET6 {
		texts = []string{"::", "::", "::", "::1", address6, second6}
		if !o.V6Only {
			texts = append(texts, "127.0.0.1", address4) // mapped
		}
	}
	return netip.MustParseAddr(choose(r, texts...))
}

func (r *run) close() []slot {
	id, o := r.pick(func(*opened) bool { return true })
	if o == nil {
		return nil
	}
	r.order(o.actor, order{Do: "close", ID: id}, -1)
	r.forget(id)
	return []slot{o.slot}
}

func (r *run) forget(id int) {
	delete(r.open, id)
	delete(r.client, id)
	delete(r.released, id)
	delete(r.unseen, id)
}

func (r *run) listen() []slot {
	return r.simple(order{Do: "listen"}, func(o *opened) bool { return !o.udp() })
}

// shutdown is only for listeners: another socket would stay shut down when it listens,
// and not answer.
func (r *run) shutdown() []slot {
	return r.simple(order{Do: "shutdown"}, func(o *opened) bool { return o.listens })
}

// simple gives an order about some socket that fits.
func (r *run) simple(what order, fits func(*opened) bool) []slot {
	id, o := r.pick(fits)
	if o == nil {
		return nil
	}
	what.ID = id
	if ok, _ := r.order(o.actor, what, -1); ok {
		o.listens = what.Do == "listen"
		r.released[id] = o.anyPort && !o.listens
	}
	return []slot{o.slot}
}

// peer is where nobody listens. When the peer of an IPv6 socket is removed, Linux goes
// on to compare its address, so it is that from which the guest itself would ask.
func peer(o *opened) netip.AddrPort {
	a := netip.MustParseAddr("127.0.0.1")
	switch own := o.order.Address.Addr(); {
	case own.Is6() && own.IsUnspecified():
		a = netip.IPv6Loopback()
	case own.Is6():
		a = own
	}
	return netip.AddrPortFrom(a, 9)
}

// connect gives UDP a peer.
func (r *run) connect() []slot {
	id, o := r.pick((*opened).udp)
	if o == nil {
		return nil
	}
	r.order(o.actor, order{Do: "connect", ID: id, Family: o.order.Family, Address: peer(o)}, -1)
	return []slot{o.slot}
}

// connectTCP connects a socket that is only bound to where nobody listens, so that it
// is only bound again. On an interface, and to an address that is gone, the attempt would not end.
func (r *run) connectTCP() []slot {
	id, o := r.pick(func(o *opened) bool {
		gone := !r.second && o.order.Address.Addr() == netip.MustParseAddr(second6)
		return !o.udp() && !o.anyPort && !o.device && !o.listens && !gone
	})
	if o == nil {
		return nil
	}
	r.order(o.actor, order{Do: "connect", ID: id, Family: o.order.Family, Address: peer(o)}, -1)
	if r.methods[observer.TCPBind] != observer.MethodPoll || r.methods[observer.TCPListen] != observer.MethodPoll {
		r.onlyAudited(id, o)
	}
	return []slot{o.slot}
}

// disconnect removes the peer of UDP, or only its device and what the kernel chose.
func (r *run) disconnect() []slot {
	id, o := r.pick((*opened).udp)
	if o == nil {
		return nil
	}
	if ok, _ := r.order(o.actor, order{Do: "disconnect", ID: id}, -1); !ok {
		return nil
	}
	if o.anyPort {
		r.client[id] = true // from now on the kernel chooses a port, if it sends
	}
	switch r.methods[observer.UDPConnect] {
	case kernel.MethodFentry, kernel.MethodKprobe, observer.MethodPoll:
	default:
		r.onlyAudited(id, o)
	}
	return []slot{o.slot}
}

// setDevice binds a socket to an interface, or to none, after it was bound.
func (r *run) setDevice() []slot {
	id, o := r.pick(func(o *opened) bool { return !o.anyPort })
	if o == nil {
		return nil
	}
	if ok, _ := r.order(o.actor, order{Do: "device", ID: id, Device: choose(r, device, "lo", "")}, -1); !ok {
		return nil
	}
	o.device = true
	capability := observer.TCPListen
	if o.udp() {
		capability = observer.UDPBind
	}
	if r.methods[observer.Device] == observer.MethodAudit && r.methods[capability] != observer.MethodPoll {
		r.onlyAudited(id, o)
	}
	return []slot{o.slot}
}

// pass hands a socket to another actor.
func (r *run) pass() []slot {
	id, o := r.pick(func(o *opened) bool { return o.actor != 2 })
	if o == nil {
		return nil
	}
	_, fd := r.order(o.actor, order{Do: "give", ID: id}, -1)
	if fd < 0 {
		r.t.Fatal("no socket came")
	}
	defer func() { _ = unix.Close(fd) }()
	o.actor = 1 - o.actor
	r.order(o.actor, order{Do: "take", ID: id}, fd)
	return []slot{o.slot}
}

// fork replaces an actor by a child that inherits its sockets.
func (r *run) fork() []slot {
	r.order(r.rng.IntN(2), order{Do: "fork"}, -1)
	return nil
}

// kill kills an actor.
func (r *run) kill() (touched []slot) {
	actor := r.rng.IntN(len(r.actors))
	r.history = append(r.history, fmt.Sprintf("%d: actor %d: killed", r.count, actor))
	r.actors[actor].kill()
	for id, o := range r.open {
		if o.actor == actor {
			touched = append(touched, o.slot)
			r.forget(id)
		}
	}
	r.actors[actor].run()
	return touched
}

// readdress adds or removes the second addresses.
func (r *run) readdress() (touched []slot) {
	do := "add"
	if r.second {
		do = "del"
	}
	r.history = append(r.history, fmt.Sprintf("%d: addr %s", r.count, do))
	r.guest.sh(r.t, fmt.Sprintf("/usr/sbin/ip addr %[1]s %[2]s/24 dev %[3]s; /usr/sbin/ip addr %[1]s %[4]s/64 nodad dev %[3]s", do, second4, device, second6))
	r.second = !r.second
	for _, o := range r.open {
		touched = append(touched, o.slot)
	}
	return touched
}

// sendUnbound makes a client: the kernel binds it.
func (r *run) sendUnbound() []slot {
	if len(r.open) >= mostOpen {
		return r.close()
	}
	r.next++
	o := order{Do: "open", ID: r.next, Family: choose(r, unix.AF_INET, unix.AF_INET6), Type: unix.SOCK_DGRAM}
	op := &opened{actor: r.rng.IntN(2), order: o, anyPort: true, slot: slot{port.UDP, 0}}
	op.order.Address = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	if o.Family == unix.AF_INET6 {
		op.order.Address = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
	}
	if ok, _ := r.order(op.actor, o, -1); !ok {
		return nil
	}
	r.open[o.ID], r.client[o.ID] = op, true
	r.order(op.actor, order{Do: "send", ID: o.ID, Family: o.Family, Address: peer(op)}, -1)
	return nil
}
