// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// kind is what an operation does.
type kind int

const (
	putSocket kind = iota
	putNAT
	putClaim
	drop
	replace // a dump, in which some of the set has gone
	stale
	nameOwner
	forgetOwner
	setRules
	setPolicy
	sleep
	loseSession
	linkDown
	linkUp
	stall
	sinkFails
	takeHostPort
	freeHostPort
	stepClock
	peerFails
	answers // how an engine answers when it is asked for a list
	rest    // only at the end
	kinds
)

var kindNames = [kinds]string{
	"putSocket", "putNAT", "putClaim", "drop", "replace", "stale", "nameOwner", "forgetOwner", "setRules", "setPolicy", "sleep",
	"loseSession", "linkDown", "linkUp", "stall", "sinkFails", "takeHostPort", "freeHostPort", "stepClock", "peerFails", "answers", "rest",
}

// operation is one step. Its numbers choose from lists, so that a sequence means the same
// whatever is removed from it.
type operation struct {
	kind kind
	n    [6]int
}

func (o operation) String() string {
	return fmt.Sprintf("{%s, [6]int{%s}}", kindNames[o.kind], strings.ReplaceAll(strings.Trim(fmt.Sprint(o.n), "[]"), " ", ", "))
}

// weights says how often each kind is chosen.
var weights = [kinds]int{
	putSocket: 16, putNAT: 12, putClaim: 12, drop: 22, replace: 4, stale: 2, nameOwner: 10, forgetOwner: 6, setRules: 4, setPolicy: 3,
	sleep: 14, loseSession: 1, linkDown: 1, linkUp: 3, stall: 1, sinkFails: 3, takeHostPort: 2, freeHostPort: 3, stepClock: 2, peerFails: 3, answers: 4,
}

// operations returns n random operations.
func operations(rng *rand.Rand, n int) []operation {
	var wheel []kind
	for k, w := range weights {
		for range w {
			wheel = append(wheel, kind(k))
		}
	}
	// All sources report soon, as they do.
	out := []operation{{kind: replace, n: [6]int{0}}, {kind: replace, n: [6]int{1}}, {kind: replace, n: [6]int{2}}, {kind: replace, n: [6]int{3}}, {kind: replace, n: [6]int{4}}}
	for len(out) < n {
		o := operation{kind: wheel[rng.IntN(len(wheel))]}
		for i := range o.n {
			o.n[i] = rng.IntN(1 << 16)
		}
		out = append(out, o)
	}
	return out
}

func pick[T any](list []T, n int) T { return list[n%len(list)] }

var (
	addresses = []netip.Addr{
		netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.53"),
		netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("::"), netip.MustParseAddr("::"), netip.MustParseAddr("::1"),
	}
	numbers = []uint16{80, 80, 81, 82}
	pauses  = []time.Duration{
		0, time.Millisecond, 149 * time.Millisecond, 151 * time.Millisecond, time.Second, 3 * time.Second, 9 * time.Second,
		10 * time.Second, 11 * time.Second, 31 * time.Second, time.Minute,
	}
	steps      = []time.Duration{0, -3 * time.Hour, -time.Minute, time.Minute, 3 * time.Hour} // of the wall clock, from the true time
	containers = []port.Owner{
		{Kind: port.OwnerContainer, ID: "c0", Name: "web0"},
		{Kind: port.OwnerContainer, ID: "c1", Name: "web1", Labels: map[string]string{"zone": "internal"}},
		{Kind: port.OwnerContainer, ID: "c2", Name: "secret0"},
		{Kind: port.OwnerContainer, ID: "c3", Name: "secret1"},
	}
	services = []port.Owner{
		{Kind: port.OwnerService, ID: "ns/web", Name: "web", Namespace: "ns"},
		{Kind: port.OwnerService, ID: "ns/secret", Name: "secret", Namespace: "ns"},
	}
	processes = []port.Owner{
		{Kind: port.OwnerProcess, ID: "7", Name: "nginx"},
		{Kind: port.OwnerProcess, ID: "8", Name: "secretd"},
		{Kind: port.OwnerProcess, ID: "9", Name: "docker-proxy"},
		{Kind: port.OwnerProcess, ID: "10", Name: "kube-proxy"},
	}
	targets = []netip.AddrPort{
		netip.MustParseAddrPort("172.17.0.2:80"), netip.MustParseAddrPort("172.17.0.3:80"), netip.MustParseAddrPort("172.17.0.4:80"),
		netip.MustParseAddrPort("10.9.9.9:80"), netip.MustParseAddrPort("127.0.0.1:82"), netip.MustParseAddrPort("127.0.0.1:81"),
	}
	targets6 = []netip.AddrPort{
		netip.MustParseAddrPort("[fd00::2]:80"), netip.MustParseAddrPort("[fd00::3]:80"), netip.MustParseAddrPort("[::1]:82"),
		netip.MustParseAddrPort("[::1]:81"),
	}
)

const (
	ids    = 8                // claims of one engine
	paths  = 3                // containers with a cgroup
	steady = 50 * time.Second // two lists, each answered late, with the longest pause before the first one
)

func key(n [6]int, p port.Protocol) port.Key {
	return port.Key{Protocol: p, Address: pick(addresses, n[1]), Port: pick(numbers, n[2])}
}

// cgroupOf is the path of a container's cgroup.
func cgroupOf(n int) string { return fmt.Sprintf("/docker/%064x", n%paths+1) }

// anyKey is key of TCP, or once in 8 values of chosen of UDP, where half of the ports are
// that of the guest's own network.
func anyKey(n [6]int, chosen int) port.Key {
	if chosen%8 > 0 {
		return key(n, port.TCP)
	}
	k := key(n, port.UDP)
	if n[2]>>2%2 == 0 {
		k.Port = 53
	}
	return k
}

// socket returns what an operation puts into the set of sockets: both halves of one that takes
// both families, of which either may be dropped later.
func socket(n [6]int) []port.Binding {
	b := port.Binding{Key: anyKey(n, n[5])}
	b.Dial = []netip.AddrPort{b.AddrPort()}
	if b.Address.IsUnspecified() {
		b.Dial = []netip.AddrPort{netip.AddrPortFrom(port.Loopback(b.Address), b.Port)}
	}
	b.Hints.Cgroup = 1 // of no container
	switch n[4] % 8 {
	case 0, 1:
		b.Hints = port.Hints{Paths: []string{cgroupOf(n[5])}}
		b.Owner = processes[0]
	case 2:
		b.Searching = true
	default:
		b.Owner = pick(processes, n[5])
	}
	if n[3]%8 == 1 {
		b.Withheld = port.Because(port.Unlistened)
	}
	b.Origin.ID = fmt.Sprint("s", n[0]%2, " ", b.Key, b.Hints.Paths) // a socket stays where it is
	if relay(&entry{Binding: b}) {
		b.Origin.ID += " of " + b.Owner.Name
	}
	if b.Address != netip.IPv6Unspecified() || n[3]%2 != 0 {
		return []port.Binding{b}
	}
	half := b
	half.Address, half.Mapped = netip.IPv4Unspecified(), true
	half.Dial = []netip.AddrPort{netip.AddrPortFrom(port.Loopback(half.Address), half.Port)}
	half.Origin.ID += "/4"
	return []port.Binding{b, half}
}

// natRule returns what an operation puts into the set of NAT rules.
func natRule(n [6]int) port.Binding {
	b := port.Binding{Key: anyKey(n, n[5]/5)}
	to := targets
	if b.Address.Is6() {
		to = targets6
	}
	b.Hints.Targets = []netip.AddrPort{pick(to, n[3])}
	if t := pick(to, n[3]>>4); n[4]%4 == 0 && t != b.Hints.Targets[0] {
		b.Hints.Targets = append(b.Hints.Targets, t)
	}
	b.Target = uint64(1 + n[3]%len(to))
	b.Maker = pick([]port.Maker{port.MakerUnknown, port.MakerUnknown, port.MakerDocker, port.MakerSwarm, port.MakerCNI, port.MakerKubeProxy}, n[5])
	b.Dial = b.Hints.Targets[:1]
	b.Origin.ID = fmt.Sprint("r", n[0]%2, " ", b.Key, b.Hints.Targets, b.Maker) // a rule is not changed in place
	if n[4]%8 == 1 {
		b.Withheld = port.Because(port.FromSources, "10.0.0.0/8")
	}
	return b
}

// claim returns what an operation puts into the set of an engine. The clock of the engine
// may be wrong by hours.
func claim(engine string, n [6]int, now time.Time) port.Binding {
	b := port.Binding{Key: anyKey(n, n[4]/5), Origin: port.Origin{ID: fmt.Sprint("c", n[0]%ids)}}
	b.Owner = pick(containers, n[3])
	if engine == "kube" {
		b.Owner = pick(services, n[3])
	}
	b.Since = now.Add(time.Duration(n[4]%5-2) * time.Hour).Round(0)
	if n[5]%8 == 1 {
		b.Withheld = port.Because(port.FromSources, "10.0.0.0/8")
	}
	return b
}

// answerTimes are how long an engine takes for a list.
var answerTimes = []time.Duration{0, time.Millisecond, time.Second, 3 * time.Second}

// factKey is what an operation names the owner of.
func factKey(n [6]int) string {
	if n[1]%3 == 0 {
		return cgroupOf(n[2])
	}
	if n[1]%3 == 1 {
		return targets6[n[2]%2].Addr().String()
	}
	return targets[n[2]%4].Addr().String()
}
