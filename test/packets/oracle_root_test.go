// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package packets

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/explain"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/test/kit/program"
)

func TestMain(m *testing.M) {
	// Tests that wait need no processor each. -parallel on the command line, which is read
	// later, still counts.
	if err := flag.Set("test.parallel", strconv.Itoa(usualWorlds+inIPv6(usualWorlds))); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	leak.Main(m)
}

// TestRandomRulesets loads random rulesets, changes each twice, and compares what
// connections meet with what fairlead publishes. FAIRLEAD_RULESETS says how many rulesets
// of IPv4 each grammar makes, FAIRLEAD_SEED which, and FAIRLEAD_WORLDS how many worlds
// share them.
func TestRandomRulesets(t *testing.T) {
	rulesets := rounds.Of(t, "FAIRLEAD_RULESETS", 12)
	seed := uint64(rounds.Of(t, "FAIRLEAD_SEED", 1))
	worlds := rounds.Of(t, "FAIRLEAD_WORLDS", worldsFor(rulesets))
	binary, err := program.Path(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	all := &totals{found: map[string]map[string]int{}}
	t.Cleanup(func() { t.Logf("\n%s", all) })
	for i, name := range columns {
		n, worlds, family := rulesets, worlds, name[:4]
		if family == "IPv6" {
			n, worlds = inIPv6(n), inIPv6(worlds)
		}
		for world := range min(worlds, n) {
			t.Run(fmt.Sprintf("%s/%d", name, world), func(t *testing.T) {
				t.Parallel() // most of the time is spent waiting for what does not answer
				o := &oracle{world: newWorld(t, families[family], binary), found: map[string]int{}}
				for r := world; r < n; r += worlds {
					o.ruleset(seed, r, i >= 2)
				}
				all.add(name, o.found)
			})
		}
	}
}

// columns are what is tried: the families in the first grammar, then in the second.
var columns = []string{"IPv4", "IPv6", "IPv4-second", "IPv6-second"}

// usualWorlds is how many worlds share many rulesets of IPv4, if FAIRLEAD_WORLDS does not
// say. Each takes 20 MiB.
const usualWorlds = 20

// worldsFor returns how many worlds share n rulesets of IPv4. Each tries several, as an
// agent has to follow one ruleset after another.
func worldsFor(n int) int { return max(1, min(usualWorlds, n/3)) }

// inIPv6 returns how many rulesets or worlds of IPv6 go with n of IPv4.
func inIPv6(n int) int { return max(1, n*3/20) }

// firstLooks has a place for each world that may look at a new state at once. That takes a
// processor and has little patience, unlike all later looks.
var firstLooks = make(chan struct{}, runtime.GOMAXPROCS(0))

// oracle judges rulesets.
type oracle struct {
	*world
	step  int            // numbers the markers
	found map[string]int // counts, by what is counted
}

// What is counted: the work, then ports that agree, then those that differ by class.
const (
	rulesetsTried = "rulesets"
	refused       = "of these refused by the tool"
	statesTried   = "states of a ruleset"
	connections   = "connections"
	compared      = "ports compared"
	agreed        = "agreed"
	settledLate   = "of these after more than 3 s"

	missed = "reachable though unlisted"
	ghost  = "unreachable though published"
	silent = "published, but no answer through the host"
	wrong  = "wrong server"
	wider  = "published wider than reachable"

	byListing = ", but listed with the reason"
	byDoubt   = ", but named uncertain"
	// Two own addresses lead to different servers, and only one of them gets the port
	// on the host's loopback.
	byConflict = ", but another own address is listed as a conflict"
)

// totals are the counts of all worlds, by column.
type totals struct {
	mu    sync.Mutex
	found map[string]map[string]int
}

func (a *totals) add(column string, found map[string]int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.found[column] == nil {
		a.found[column] = map[string]int{}
	}
	for what, n := range found {
		a.found[column][what] += n
	}
}

// String is a table of all classes, for the log.
func (a *totals) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := "| | " + strings.Join(columns, " | ") + " |\n|---|---|---|---|---|\n"
	for _, what := range []string{rulesetsTried, refused, statesTried, connections, compared, agreed, settledLate,
		missed, missed + byListing, ghost, ghost + byDoubt, wider, wrong, wrong + byDoubt, wrong + byConflict,
		silent, silent + byDoubt, silent + byConflict} {
		out += "| " + what
		for _, column := range columns {
			out += fmt.Sprintf(" | %d", a.found[column][what])
		}
		out += " |\n"
	}
	return out
}

// ruleset loads one ruleset and two changes of it, and judges each state.
func (o *oracle) ruleset(seed uint64, i int, second bool) {
	o.found[rulesetsTried]++
	tl := tools[i%len(tools)]
	g := &grammar{r: rand.New(rand.NewPCG(seed, uint64(i))), f: o.family, second: second}
	if second {
		tl = secondTools[i%len(secondTools)]
		o.lead(defaults[g.r.IntN(len(defaults))])
	}
	var history []string
	for step := range 3 {
		texts, ok := o.apply(g, tl, step > 0)
		if !ok {
			continue // refused as a whole, as one commit is
		}
		history = append(history, texts...)
		o.judge(fmt.Sprintf("seed %d, second %t, ruleset %d (%s), step %d", seed, second, i, tl.name, step), history)
	}
	o.reset(tl)
}

const markerFirst = 20000

// nextMarker returns the port of a new marker: a rule that is written after others,
// so that they have been followed when its port is open.
func (o *oracle) nextMarker() uint16 {
	o.step++
	return o.marker().Port
}

// marker is what the last marker publishes.
func (o *oracle) marker() port.Key {
	k := port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: uint16(markerFirst + o.step%20000)}
	if o.v6 {
		k.Address = netip.IPv6Unspecified()
	}
	return k
}

// markNFT writes a marker with nft.
func (o *oracle) markNFT(p uint16) {
	o.t.Helper()
	if out, err := o.try(o.guest, fmt.Sprintf(`table %[1]s marker
delete table %[1]s marker
table %[1]s marker { chain pre { type nat hook prerouting priority -199; tcp dport %[2]d dnat to %[3]s; }; }
`, o.name, p, (&grammar{f: o.family}).at(o.servers[0], "80")), "nft", "-f", "-"); err != nil {
		o.t.Fatalf("%v: %s", err, out)
	}
}

// apply writes a ruleset, or a change of it, and waits until fairlead has followed.
func (o *oracle) apply(g *grammar, tl tool, change bool) (texts []string, ok bool) {
	p := o.nextMarker()
	ok = true
	do := func(text string, command ...string) {
		if out, err := o.try(o.guest, text, command...); err != nil {
			// A change may not fit what is there; nothing of it is applied.
			if !change && !g.second {
				o.t.Fatalf("%q: %v\n%s\n%s", command, err, out, text)
			}
			if !change {
				o.found[refused]++
				o.t.Logf("refused: %s\n%s", out, text)
			}
			ok = false
			return
		}
		texts = append(texts, strings.Join(command, " ")+" <<END\n"+text+"END")
	}
	mixed := len(tl.nft) > 1 && !g.second || tl.ipt != ""
	if tl.ipt != "" {
		command := "iptables-" + tl.ipt + "-restore"
		if o.v6 {
			command = "ip6tables-" + tl.ipt + "-restore"
		}
		marker := fmt.Sprintf("-A MARKER -p tcp --dport %d -j DNAT --to-destination %s", p, g.at(o.servers[0], "80"))
		if change {
			do(g.iptMutation(marker), command, "-w", "--noflush")
		} else {
			do(g.iptTable(marker), command, "-w")
		}
		if ok {
			o.seen()
		}
	}
	for _, table := range tl.nft {
		table = strings.Replace(table, "FAMILY", o.name, 1)
		if change && g.one(2) {
			continue
		}
		if change {
			for _, text := range strings.Split(g.nftMutation(table), nextCommit) {
				do(text, "nft", "-f", "-")
			}
		} else {
			do(g.nftTable(table, mixed), "nft", "-f", "-")
		}
	}
	if len(tl.nft) > 0 {
		o.markNFT(o.nextMarker())
		o.seen()
	}
	return texts, ok
}

// seen waits until the agent has the marker open on the host. Connections tracked
// until then are forgotten: a client that happens to get the port of an earlier
// one would be sent where the rules of that time sent it.
func (o *oracle) seen() {
	o.t.Helper()
	if err := o.await(o.marker(), true); err != nil {
		o.t.Fatal(err)
	}
	if err := o.guest.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }); err != nil {
		o.t.Fatalf("flush tracked connections: %v", err)
	}
}

// reset removes all rules.
func (o *oracle) reset(tl tool) {
	script := "nft flush ruleset\n"
	if tl.ipt == "legacy" {
		command := "iptables-legacy"
		if o.v6 {
			command = "ip6tables-legacy"
		}
		script += command + " -w -t nat -F\n" + command + " -w -t nat -X\n"
	}
	o.sh(o.guest, script)
}

// slot is a port of one protocol, and what was found about it.
type slot struct {
	protocol port.Protocol
	port     uint16

	outside   map[string][]string // servers that the stranger reaches, by the guest's address that was asked
	neighbour map[string][]string // the same for the neighbour, for whom there may be rules of its own
	local     map[string][]string // the same for a client in the guest
	host      string
	pubs      []status.Publication
}

func newSlot(protocol port.Protocol, p uint16) *slot {
	return &slot{
		protocol: protocol, port: p,
		outside: map[string][]string{}, neighbour: map[string][]string{}, local: map[string][]string{},
	}
}

func (s *slot) String() string { return fmt.Sprintf("%s %d", s.protocol, s.port) }

// judge compares a state with what connections meet.
func (o *oracle) judge(where string, history []string) {
	o.t.Helper()
	o.found[statesTried]++
	slots := o.look()
	o.found[compared] += len(slots)
	differ := o.settle(slots)
	o.found[agreed] += len(slots) - len(differ)
	for _, s := range differ {
		class, report := o.class(s), o.explain(s)
		if named := o.named(class, s, report); named != "" {
			o.found[class+named]++
			continue
		}
		o.found[class]++
		b, _ := json.Marshal(report)
		o.t.Errorf("%s: %s: %s\noutside %v\nneighbour %v\nlocal %v\nhost %q\npublications %s\nexplain %.1500s\n%s", where, s, class,
			s.outside, s.neighbour, s.local, s.host, describe(s.pubs), b, strings.Join(history, "\n"))
		if os.Getenv("FAIRLEAD_KEEP_GOING") == "" && o.found[class] >= 3 {
			o.t.FailNow()
		}
	}
}

const (
	fewestLooks = 3               // at what explain names, which may be one of several servers that a balancer chooses
	settled     = limit           // when a busy machine has done what a ruleset asks for; only a failure takes so long
	soon        = 3 * time.Second // when it should have
)

// patience is how long an answer may take at a look, counted from 0. Most ports that are
// closed drop what is asked, so the first looks are short; a busy machine answers later.
func patience(look int) time.Duration {
	if look == 0 {
		return 300 * time.Millisecond
	}
	return min(2*time.Second<<min(look-1, 3), 16*time.Second)
}

// settle asks again for the slots that seem to differ, and returns those that still do.
func (o *oracle) settle(slots []*slot) []*slot {
	begin := time.Now()
	fine := func(s *slot) bool { return o.class(s) == "" }
	slots = slices.DeleteFunc(slices.Clone(slots), fine)
	for looks := 1; len(slots) > 0; looks++ {
		var wg sync.WaitGroup
		for _, s := range slots {
			wg.Go(func() { o.probe(s, patience(looks)) })
		}
		wg.Wait()
		o.list(slots)
		before := len(slots)
		slots = slices.DeleteFunc(slots, fine)
		if after := time.Since(begin); after > soon && len(slots) < before {
			o.found[settledLate] += before - len(slots)
		}
		if looks < fewestLooks && slices.ContainsFunc(slots, func(s *slot) bool { return o.class(s) != missed }) {
			continue
		}
		named := func(s *slot) bool { return o.named(o.class(s), s, o.explain(s)) != "" }
		if time.Since(begin) > settled || !slices.ContainsFunc(slots, func(s *slot) bool { return !named(s) }) {
			return slots
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil
}

func describe(pubs []status.Publication) string {
	var out []string
	for _, p := range pubs {
		text := fmt.Sprintf("%s %s dial %s %q", p.Key, p.State, p.DialTarget, p.Reason)
		for _, origin := range p.Origins {
			text += " [" + origin.Detail + "]"
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

// look asks for every slot, from everywhere.
func (o *oracle) look() []*slot {
	var slots []*slot
	for p := uint16(firstPort); p <= lastPort; p++ {
		for _, protocol := range []port.Protocol{port.TCP, port.UDP} {
			slots = append(slots, newSlot(protocol, p))
		}
	}
	firstLooks <- struct{}{}
	var wg sync.WaitGroup
	for _, s := range slots {
		wg.Go(func() { o.probe(s, patience(0)) })
	}
	wg.Wait()
	<-firstLooks
	o.found[connections] += asks * len(slots)
	o.list(slots)
	return slots
}

// probe asks for one slot from outside, from the guest and from the host, and
// adds to what was found before.
func (o *oracle) probe(s *slot, patience time.Duration) {
	at := func(address string) string { return net.JoinHostPort(address, strconv.Itoa(int(s.port))) }
	network := s.protocol.String()
	var mu sync.Mutex
	var wg sync.WaitGroup
	note := func(found map[string][]string, from *netns.Space, source, a string) {
		wg.Go(func() {
			server := ask(from, source, network, at(a), patience)
			mu.Lock()
			defer mu.Unlock()
			if server != "" && !slices.Contains(found[a], server) {
				found[a] = append(found[a], server)
			}
		})
	}
	type client struct {
		found      map[string][]string
		source, to string
	}
	var clients []client
	for _, a := range o.outsideAddrs() {
		clients = append(clients, client{s.outside, o.stranger, a}, client{s.neighbour, o.family.neighbour, a})
	}
	// In any order, as a balancer may count the connections.
	rand.Shuffle(len(clients), func(i, j int) { clients[i], clients[j] = clients[j], clients[i] })
	for _, c := range clients {
		note(c.found, o.outside, c.source, c.to)
		time.Sleep(rand.N(time.Millisecond))
	}
	for _, a := range append(o.outsideAddrs(), o.loopback) {
		note(s.local, o.guest, "", a)
	}
	wg.Go(func() { s.host = ask(o.host, "", network, at(o.loopback), patience) })
	wg.Wait()
}

// asks is how many connections one probe makes.
const asks = 11

// outsideAddrs are the guest's addresses that a client outside asks.
func (o *oracle) outsideAddrs() []string { return []string{o.nodes[0], o.nodes[1], o.asked} }

// list fills in what the agent says of slots.
func (o *oracle) list(slots []*slot) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	l, err := status.NewClient(o.agentCtl).List(ctx)
	if err != nil {
		o.t.Fatal(err)
	}
	for _, s := range slots {
		s.pubs = nil
		for _, p := range l.Publications {
			if p.Protocol == s.protocol && p.Port == s.port {
				s.pubs = append(s.pubs, p)
			}
		}
	}
}

// class says what is wrong with a slot, "" if nothing is.
func (o *oracle) class(s *slot) string {
	active := slices.ContainsFunc(s.pubs, func(p status.Publication) bool { return p.State == port.Active })
	reached := slices.Concat(slices.Collect(maps.Values(s.outside))...)
	if len(reached) == 0 {
		reached = slices.Concat(slices.Collect(maps.Values(s.local))...)
	}
	wild := slices.ContainsFunc(s.pubs, func(p status.Publication) bool { return p.State == port.Active && p.Address.IsUnspecified() })
	switch {
	case !active && len(s.outside)+len(s.neighbour) > 0:
		return missed
	case active && len(s.outside) == 0 && len(s.neighbour) > 0 && s.host != "" && !slices.Contains(reached, s.host):
		return wider // it is for the neighbour alone
	case active && len(reached) == 0 && s.host != "" && !slices.ContainsFunc(s.pubs, func(p status.Publication) bool {
		return p.State == port.Active && !p.Address.IsUnspecified() && (o.ask(o.outside, o.stranger, s, p.Address) != "" || o.ask(o.guest, "", s, p.Address) != "")
	}):
		return ghost
	case active && len(s.outside) > 0 && s.host == "":
		return silent
	case active && len(reached) > 0 && s.host != "" && !slices.Contains(reached, s.host):
		return wrong
	case wild && len(s.outside) > 0 && len(s.outside) < len(o.outsideAddrs()):
		return wider
	case s.unexplained():
		return missed
	}
	return ""
}

// limits are reasons to withhold what the stranger does not reach.
var limits = regexp.MustCompile(`limited to |excludes interface |for programs of the guest|leaves out every `)

// unexplained reports whether the stranger reaches a server at an own address where nothing
// is published, nor withheld from the stranger too.
func (s *slot) unexplained() bool {
	for a := range s.outside {
		if !slices.ContainsFunc(s.pubs, func(p status.Publication) bool {
			return (p.Address.IsUnspecified() || p.Address.String() == a) && p.State != port.Pending && !limits.MatchString(p.Reason)
		}) {
			return true
		}
	}
	return false
}

// named returns how explain names what is not as packets have it, "" if it does not.
func (o *oracle) named(class string, s *slot, r explain.Report) string {
	uncertain := slices.ContainsFunc(r.Chains, func(c explain.Chain) bool {
		return slices.ContainsFunc(c.Steps, func(st explain.Step) bool { return strings.Contains(st.Text, "another server") })
	})
	switch class {
	case missed:
		if len(r.Chains) > 0 && !s.unexplained() || r.Verdict == port.VerdictNAT ||
			slices.ContainsFunc(r.Related, func(n explain.Related) bool { return n.Kind == port.VerdictNAT }) {
			return byListing
		}
	case ghost, silent, wrong:
		switch {
		case uncertain:
			return byDoubt
		case o.conflictNamed(s):
			return byConflict
		}
	}
	return ""
}

// conflictNamed reports whether a conflict explains what the host got: the
// publication that has the host's address leads to just that, and one that other
// clients reach is listed as having lost to it.
func (o *oracle) conflictNamed(s *slot) bool {
	return slices.ContainsFunc(s.pubs, func(winner status.Publication) bool {
		if winner.State != port.Active {
			return false
		}
		lost := func(p status.Publication) bool {
			return p.State == port.Conflict && strings.Contains(p.Reason, "held by "+winner.Key.String()) && o.reached(s, p.Address)
		}
		if !slices.ContainsFunc(s.pubs, lost) {
			return false
		}
		servers := o.leadsTo(s, winner)
		return s.host == "" && len(servers) == 0 || slices.Contains(servers, s.host)
	})
}

// reached reports whether clients outside reach a slot at an own address, or at any for
// the wildcard; of a slot that they do not reach at all, whether clients in the guest do.
func (o *oracle) reached(s *slot, a netip.Addr) bool {
	found, from, source := s.outside, o.outside, o.stranger
	if len(found) == 0 {
		found, from, source = s.local, o.guest, ""
	}
	if a.IsUnspecified() {
		return len(found) > 0
	}
	return len(found[a.String()]) > 0 || o.ask(from, source, s, a) != ""
}

// leadsTo returns the servers that clients reach by a publication.
func (o *oracle) leadsTo(s *slot, p status.Publication) (servers []string) {
	a := p.Address
	switch {
	case a.IsUnspecified():
		return slices.Concat(slices.Collect(maps.Values(s.outside))...)
	case a.IsLoopback():
		// What leaves for another machine with this source is lost; see class.
		if to, err := netip.ParseAddrPort(p.DialTarget); err == nil {
			servers = append(servers, serverName(to.Addr().String(), to.Port()))
		}
	}
	servers = slices.Concat(servers, s.outside[a.String()], s.local[a.String()])
	for source, from := range map[string]*netns.Space{o.stranger: o.outside, "": o.guest} {
		if server := o.ask(from, source, s, a); server != "" {
			servers = append(servers, server)
		}
	}
	return servers
}

// ask returns which server answers at an own address of the guest.
func (o *oracle) ask(from *netns.Space, source string, s *slot, a netip.Addr) string {
	return ask(from, source, s.protocol.String(), netip.AddrPortFrom(a, s.port).String(), 2*time.Second)
}

// explain asks fairlead about a slot.
func (o *oracle) explain(s *slot) (r explain.Report) {
	cmd := exec.Command(o.binary, "explain", fmt.Sprintf("%d/%s", s.port, s.protocol), "-o", "json", "--control", o.agentCtl)
	out, err := cmd.Output()
	if jsonErr := json.Unmarshal(out, &r); jsonErr != nil {
		o.t.Fatalf("explain %s: %v, %v: %s", s, err, jsonErr, out)
	}
	return r
}
