// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"io"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// A flow is traced from its request to its end, also what the kernel moves.
func TestTrace(t *testing.T) {
	const size = 3 << 20 // beyond spliceAfter
	ln, pub := listen(t)
	gone := port.Publication{Fact: port.Fact{Key: tcpKey(1)}, Dial: []netip.AddrPort{closedPort(t)}}
	hub := new(trace.Hub)
	g := newGuest(t, ServerOptions{Trace: hub}, pub, gone)
	sub := hub.Subscribe(trace.Filter{Port: pub.Port, Hex: 4})
	defer sub.Close()
	none := hub.Subscribe(trace.Filter{Port: gone.Port})
	defer none.Close()

	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, c)
		_, _ = io.WriteString(c, "done")
		_ = c.Close()
	}()
	client := g.connect(t, pub.Key)
	write(t, client, strings.Repeat("abcdef", size/6))
	closeWrite(client)
	if got := readAll(t, client); got != "done" {
		t.Fatalf("answer %q", got)
	}
	var last trace.Event
	var payload []string
	for last.Event != trace.Close {
		last = wait.For(t, "event", sub.C())
		payload = append(payload, last.Payload)
	}
	if last.ToGuest != size || last.ToHost != 4 || last.Reason != "closed by both sides" || last.Peer.String() != "127.0.0.1:50000" {
		t.Errorf("%+v", last)
	}
	if got := strings.Join(payload, " "); got != " 61626364 646f6e65 " {
		t.Errorf("payload %q", got)
	}

	_, _ = g.open(t, gone.Key, "")
	if e := wait.For(t, "event", none.C()); e.Event != trace.Open {
		t.Errorf("%+v", e)
	}
	if e := wait.For(t, "event", none.C()); e.Event != trace.Close || !strings.HasPrefix(e.Reason, "refused: ") || e.Payload != "" {
		t.Errorf("%+v", e)
	}
}

func TestTraceOfDatagrams(t *testing.T) {
	hub := new(trace.Hub)
	pub := echo(t, "")
	g := newGuest(t, ServerOptions{Trace: hub}, pub)
	sub := hub.Subscribe(trace.Filter{Port: pub.Port, Protocol: port.UDP, Hex: 8})
	defer sub.Close()
	stream, _ := g.open(t, pub.Key, "")
	sendDatagram(t, stream, "query")
	answer := readDatagram(t, stream)
	_ = stream.Close()
	var last trace.Event
	for last.Event != trace.Close {
		last = wait.For(t, "event", sub.C())
		if last.Event == trace.Payload && last.Sent == "client" && last.Payload != "7175657279" {
			t.Errorf("payload %q", last.Payload)
		}
	}
	if last.ToGuest != 5 || last.ToHost != uint64(len(answer)) {
		t.Errorf("%+v", last)
	}
}
