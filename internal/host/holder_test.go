// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// tableBytes builds a table of the IP helper API with one row for each socket.
func tableBytes(l ownerTable, rows map[netip.AddrPort]int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(rows)))
	for addr, pid := range rows {
		r := make([]byte, l.row)
		copy(r[l.addr:], addr.Addr().AsSlice())
		binary.BigEndian.PutUint16(r[l.port:], addr.Port())
		binary.LittleEndian.PutUint32(r[l.pid:], uint32(pid))
		b = append(b, r...)
	}
	return append(b, 0, 0, 0) // the buffer is larger than the table
}

func TestOwnerTables(t *testing.T) {
	v4 := map[netip.AddrPort]int{
		netip.MustParseAddrPort("127.0.0.1:8080"): 4711, netip.MustParseAddrPort("0.0.0.0:443"): 4,
	}
	v6 := map[netip.AddrPort]int{netip.MustParseAddrPort("[::1]:8080"): 1 << 20, netip.MustParseAddrPort("[::]:65535"): 12}
	for name, tt := range map[string]struct {
		layout ownerTable
		rows   map[netip.AddrPort]int
	}{"tcp4": {tcp4Owners, v4}, "tcp6": {tcp6Owners, v6}, "udp4": {udp4Owners, v4}, "udp6": {udp6Owners, v6}, "empty": {udp4Owners, nil}} {
		got := map[netip.AddrPort]int{}
		b := tableBytes(tt.layout, tt.rows)
		if err := tt.layout.parse(b, func(a netip.AddrPort, pid int) { got[a] = pid }); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if len(got) != len(tt.rows) {
			t.Errorf("%s: %v, want %v", name, got, tt.rows)
		}
		for a, pid := range tt.rows {
			if got[a] != pid {
				t.Errorf("%s: process of %v is %d, want %d", name, a, got[a], pid)
			}
		}
		if len(tt.rows) > 0 {
			if err := tt.layout.parse(b[:len(b)-8], func(netip.AddrPort, int) { t.Errorf("%s: a row of a table that is cut short", name) }); err == nil {
				t.Errorf("%s: a table that is cut short is no error", name)
			}
		}
	}
}

func FuzzOwnerTables(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 127, 0, 0, 1, 0x1f, 0x90, 0, 0, 1, 0, 0, 0}, uint8(2))
	f.Add([]byte{255, 255, 255, 255, 1}, uint8(0))
	f.Fuzz(func(t *testing.T, b []byte, which uint8) {
		l := []ownerTable{tcp4Owners, tcp6Owners, udp4Owners, udp6Owners}[which%4]
		rows := 0
		if err := l.parse(b, func(a netip.AddrPort, _ int) {
			rows++
			if !a.IsValid() || a.Addr().Is4In6() {
				t.Errorf("address %v", a)
			}
		}); err != nil && rows > 0 {
			t.Errorf("%d rows and then %v", rows, err)
		}
	})
}

const netshGerman = "\r\nPortausschlussbereiche für das Protokoll \"tcp\"\r\n\r\n" +
	"Startport     Endport\r\n----------    --------\r\n" +
	"      5357        5357\r\n     49152       49251\r\n     50000       50059     *\r\n\r\n" +
	"* - Verwaltete Portausschlüsse.\r\n"

func TestReservedRangesInAnyLanguage(t *testing.T) {
	got, err := parseReserved(strings.NewReader(netshGerman))
	want := []PortRange{{5357, 5357}, {49152, 49251}, {50000, 50059}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	for p, in := range map[uint16]bool{49151: false, 49152: true, 49251: true, 49252: false} {
		if want[1].Contains(p) != in {
			t.Errorf("%d in %v: %t", p, want[1], !in)
		}
	}
	if (PortRange{}).Contains(0) {
		t.Error("no range has port 0 in it")
	}
}

func FuzzReserved(f *testing.F) {
	f.Add(netshGerman)
	f.Add("1 0\n0 1\n65536 1\n1 2 3 4")
	f.Fuzz(func(t *testing.T, s string) {
		ranges, _ := parseReserved(strings.NewReader(s))
		for _, r := range ranges {
			if r.First == 0 || r.First > r.Last {
				t.Errorf("range %v", r)
			}
		}
	})
}

const lsofOutput = `p312
cmDNSResponder
f8
tIPv4
PUDP
n*:5353
f9
tIPv6
PUDP
n*:5353
p501
cnode
f22
tIPv6
PTCP
n*:3000
f23
tIPv4
PTCP
n127.0.0.1:3000->127.0.0.1:50123
p777
cpostgres
f5
tIPv6
PTCP
n[::1]:5432
f6
tIPv4
PTCP
n127.0.0.1:5432
`

func TestLsof(t *testing.T) {
	tcp := func(s string) Socket { return Socket{port.TCP, netip.MustParseAddrPort(s)} }
	want := map[Socket]Holder{
		tcp("127.0.0.1:3000"): {PID: 501, Name: "node"}, // a wildcard of IPv6 may take IPv4
		tcp("[::1]:5432"):     {PID: 777, Name: "postgres"},
		tcp("0.0.0.0:5432"):   {PID: 777, Name: "postgres"},
		{port.UDP, netip.MustParseAddrPort("127.0.0.1:5353")}: {PID: 312, Name: "mDNSResponder"},
	}
	ask := []Socket{tcp("127.0.0.1:5353"), tcp("127.0.0.2:5432"), tcp("127.0.0.1:50123")}
	for s := range want {
		ask = append(ask, s)
	}
	got, err := lsofFind(strings.NewReader(lsofOutput), ask)
	if err != nil || len(got) != len(want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	for s, h := range want {
		if got[s] != h {
			t.Errorf("holder of %v is %v, want %v", s, got[s], h)
		}
	}
}

func FuzzLsof(f *testing.F) {
	f.Add(lsofOutput)
	f.Add("n\np\nc\nPx\nn*:\nn[::1")
	f.Fuzz(func(_ *testing.T, s string) {
		_, _ = lsofFind(strings.NewReader(s), []Socket{{port.TCP, netip.MustParseAddrPort("127.0.0.1:80")}})
	})
}

// sharing is a Vetter of a system on which two processes can listen on one port.
type sharing struct {
	taken atomic.Bool
	by    Holder
}

func (s *sharing) Vet() func(Socket) bool {
	taken := s.taken.Load()
	return func(Socket) bool { return taken }
}

func (s *sharing) Holders(_ context.Context, sockets []Socket) (map[Socket]Holder, error) {
	out := make(map[Socket]Holder)
	for _, v := range sockets {
		out[v] = s.by
	}
	return out, nil
}

// On Windows listen succeeds on 127.0.0.1 beside another process's 0.0.0.0, whose
// connections it then takes: success does not mean that the port was free.
func TestSharedPortIsAConflict(t *testing.T) {
	system := &sharing{by: Holder{PID: 7, Name: "nginx.exe"}}
	system.taken.Store(true)
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.begins(snapshot(1, pub(k)))
	start(t, Options{Holders: system}, a)
	a.wants(k, port.Conflict)
	eventually(t, "the holder is named", func() bool {
		return strings.Contains(a.heard(k)[0].Reason.String(), `"nginx.exe" (pid 7)`)
	})
	if o := a.heard(k)[0]; o.Reason.Code() != port.InUseBy {
		t.Errorf("reason %s", o.Reason.Code())
	}
	system.taken.Store(false)
	if o := a.wants(k, port.Active); o.Reason.String() != "" {
		t.Errorf("reason = %q", o.Reason)
	}
}

// slowly is a Vetter that answers each question of Vet when the test says so.
type slowly struct{ questions chan chan<- struct{} }

func (s *slowly) Vet() func(Socket) bool {
	answer := make(chan struct{})
	s.questions <- answer
	<-answer
	return func(Socket) bool { return false }
}

func (s *slowly) Holders(context.Context, []Socket) (map[Socket]Holder, error) { return nil, nil }

// While the system is slow to say who has a port that a guest wants, only that guest waits.
func TestSlowVetterDelaysNoOther(t *testing.T) {
	system := &slowly{make(chan chan<- struct{})}
	a, b := newAgent(t, "a"), newAgent(t, "b")
	p, q, r := ports.Free(t), ports.Free(t), ports.Free(t)
	first, second, third := key(port.TCP, any4, p), key(port.TCP, any4, q), key(port.TCP, any4, r)
	b.greeter(first, "hello")
	a.begins(snapshot(1))
	b.begins(snapshot(1, pub(first)))
	h, _ := start(t, Options{Holders: system, Policy: exposeAll(t)}, a, b)
	for range 2 { // both snapshots
		close(<-system.questions)
	}
	b.wants(first, port.Active)

	a.say(put(1, pub(second)))
	late := <-system.questions
	if got := greeting(t, at(lo4, first.Port)); got != "hello" {
		t.Errorf("a client of the other guest read %q", got)
	}
	if n := h.Guests()[1].Publications; n != 1 || h.View().Len() != 1 {
		t.Errorf("the other guest has %d publications, all have %d", n, h.View().Len())
	}
	b.say(put(1, pub(third)))
	close(<-system.questions)
	b.wants(third, port.Active)
	close(late)
	a.wants(second, port.Active)
}

// A system may deny permission for an address that another process holds: that remains a conflict
// with that process when the address is tried again.
func TestHolderOfForbiddenPortIsKept(t *testing.T) {
	h := idle(t, Options{Network: failing{syscall.EACCES}}, "vm")
	k := key(port.TCP, lo4, 80)
	g := h.guests[0]
	if err := g.applyWanted(t.Context(), whole(1, pub(k))); err != nil {
		t.Fatal(err)
	}
	asked, holders := g.slots(k)
	h.found(asked, holders, nil)
	found := g.state.pubs[k].outcomes()[0]
	if found.State != port.Conflict || found.Reason.Code() != port.InUseBy {
		t.Errorf("%+v, want a conflict with its holder", found)
	}
	l := h.lock()
	for s := range asked {
		s.retry()
	}
	l.unlock()
	if again := g.state.pubs[k].outcomes()[0]; !again.Equal(found) {
		t.Errorf("tried again: %+v, want %+v", again, found)
	}
}

// A port may move once its holder is known. The system is asked then who has the other port: an
// answer of an earlier step says nothing.
func TestPortIsMovedByANewAnswer(t *testing.T) {
	system, network := &sharing{}, &tried{failing: failing{syscall.EACCES}}
	h := idle(t, Options{Network: network, Holders: system, Policy: onConflict(t, port.OnConflictNext)}, "vm")
	k := key(port.TCP, lo4, 80)
	g := h.guests[0]
	if err := g.applyWanted(t.Context(), whole(1, pub(k))); err != nil {
		t.Fatal(err)
	}
	system.taken.Store(true)
	asked, holders := g.slots(k)
	h.found(asked, holders, nil)
	if !slices.Equal(network.at, []string{"127.0.0.1:80"}) {
		t.Errorf("tried to listen at %s, where others listen now", network.at)
	}
}

// slots returns the slots of a publication, and that one process holds them.
func (g *guest) slots(k port.Key) (map[*slot]Socket, map[Socket]Holder) {
	asked, holders := make(map[*slot]Socket), make(map[Socket]Holder)
	l := g.lock()
	defer l.unlock()
	for _, c := range l.pubs[k].claims {
		for _, s := range l.h.groups[c.group()].slots {
			v := Socket{s.protocol, s.at()}
			asked[s], holders[v] = v, Holder{PID: 7, Name: "nginx.exe"}
		}
	}
	return asked, holders
}

// tried is a Network that opens nothing, and keeps where it was tried.
type tried struct {
	failing

	at []string
}

func (n *tried) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	n.at = append(n.at, address)
	return n.failing.Listen(ctx, network, address)
}

// WSL's own relay is told from other holders by the name of its program.
func TestRelayIsToldApart(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:80")
	if state, r := (Holder{PID: 4, Name: "wslrelay.exe"}).reason(at); state != port.Conflict || r != port.Because(port.InUseByRelay, "127.0.0.1:80", `"wslrelay.exe"`, "4") {
		t.Errorf("%s: %s", state, r)
	}
}

func TestReservedRangeIsNamed(t *testing.T) {
	system := &sharing{by: Holder{Name: "Windows", Reserved: PortRange{49152, 49251}}}
	system.taken.Store(true)
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, 49200)
	a.begins(snapshot(1, pub(k)))
	start(t, Options{Holders: system}, a)
	o := a.wants(k, port.Failed)
	if !strings.Contains(o.Reason.String(), "Windows reserves ports 49152-49251") || !strings.Contains(o.Reason.String(), "hostPort") {
		t.Errorf("reason = %q, want the range and the way out", o.Reason)
	}
}
