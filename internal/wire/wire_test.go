// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"unicode"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead/fairlead/internal/port"
)

var update = flag.Bool("update", false, "write the golden files anew")

var rule1 = port.RuleRef{Kind: port.RuleConfigured, Number: 1, Name: "no-debug"}

var equal = []cmp.Option{cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }), cmpopts.EquateComparable(Reason{}), cmpopts.EquateEmpty()}

func key(p port.Protocol, addr string, n uint16) port.Key {
	return port.Key{Protocol: p, Address: netip.MustParseAddr(addr), Port: n}
}

func web() Publication {
	return Publication{
		Key:  key(port.TCP, "0.0.0.0", 8080),
		Host: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080"), netip.MustParseAddrPort("[::1]:8080")},
		Owner: port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "c0ffee",
			Labels: map[string]string{"com.example/role": "front <end>", "z": "ü"}},
		Source: "docker",
	}
}

func controls() map[string]Control {
	dns := Publication{Key: key(port.UDP, "fe80::1%eth0", 5300), Host: []netip.AddrPort{netip.MustParseAddrPort("[::1]:0")}}
	return map[string]Control{
		"snapshot":            {Snapshot: &Snapshot{Epoch: "E1", Generation: 7, Publications: []Publication{web(), dns}, More: true}},
		"snapshot-incomplete": {Snapshot: &Snapshot{Epoch: "E1", Generation: 7, Publications: []Publication{web()}, Incomplete: []string{"containerd", "docker"}}},
		"snapshot-empty":      {Snapshot: &Snapshot{Epoch: "E1", Publications: []Publication{}}},
		"change": {Change: &Change{Base: 7, Generation: 9, Put: []Publication{dns},
			Removed: []port.Key{key(port.TCP, "::", 22)}}},
		"ack": {Ack: &Ack{Generation: 9, Outcomes: []Outcome{
			{Key: dns.Key, State: port.Active, HostAddress: netip.MustParseAddrPort("[::1]:49152")},
			{Key: key(port.TCP, "0.0.0.0", 80), State: port.Conflict, HostAddress: netip.MustParseAddrPort("127.0.0.1:80"), Reason: FromReason(port.Because(port.InUseBy, "127.0.0.1:80", "nginx", "811"))},
		}}},
		"outcomes": {Outcomes: &Outcomes{Outcomes: []Outcome{{Key: key(port.TCP, "::", 22), State: port.Denied, Reason: FromReason(rule1.Because(port.DeniedByRule))}}}},
		"resync":   {Resync: &Resync{Reason: "standing at 5, change builds on 7"}},
		"unpublished": {Unpublished: &Unpublished{Reset: true, Omitted: 3,
			Put: []UnpublishedPort{
				{Key: key(port.TCP, "127.0.0.1", 9229), Rule: rule1, Reason: FromReason(rule1.Because(port.DeniedByRule)), Source: "socket",
					Owner: port.Owner{Kind: port.OwnerProcess, Name: "node", ID: "811"}},
				{Key: key(port.UDP, "::", 53), Reason: FromReason(port.Join(port.Because(port.Unlistened), port.Because(port.FromSources, "10.0.0.0/8")))},
			},
			Removed: []port.Key{key(port.TCP, "::", 22)},
			Unread:  &List[Unread]{{Where: "ip nat PREROUTING", Rule: "-m mark --mark 0x7 -j DNAT", Reason: "a mark"}},
		}},
		"snapshot-demand": {Snapshot: &Snapshot{Epoch: "E1", Generation: 7, Publications: []Publication{
			{Key: key(port.TCP, "172.17.0.2", 80), Host: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:80")}, Source: "demand", Demands: List[string]{"web:80/tcp"}},
		}}},
		"unpublished-demand": {Unpublished: &Unpublished{Put: []UnpublishedPort{
			{Key: key(port.TCP, "172.17.0.2", 80), Rule: rule1, Reason: FromReason(rule1.Because(port.DeniedByRule)), Source: "demand", Demands: List[string]{"web:80/tcp"}},
		}}},
		"unpublished-none": {Unpublished: &Unpublished{Unread: &List[Unread]{}}},
	}
}

// golden compares got with testdata/name.bin, and returns the file's bytes.
func golden(t *testing.T, name string, got []byte) []byte {
	t.Helper()
	path := filepath.Join("testdata", name+".bin")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, got) {
		t.Errorf("%s\n got %q\nwant %q", name, got, want)
	}
	return want
}

func TestControlGolden(t *testing.T) {
	for name, c := range controls() {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			if err := WriteControl(&b, c); err != nil {
				t.Fatal(err)
			}
			got, err := ReadControl(iotest.OneByteReader(bytes.NewReader(golden(t, name, b.Bytes()))))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c, got, equal...); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestFlowGolden(t *testing.T) {
	q := FlowRequest{Key: key(port.TCP, "0.0.0.0", 8080), Peer: netip.MustParseAddrPort("[::ffff:127.0.0.1]:51000")}
	var b bytes.Buffer
	if err := WriteRequest(&b, q); err != nil {
		t.Fatal(err)
	}
	got, err := ReadRequest(bytes.NewReader(golden(t, "request", b.Bytes())))
	if err != nil || got.Key != q.Key || got.Peer != netip.MustParseAddrPort("127.0.0.1:51000") {
		t.Errorf("got %+v, %v", got, err)
	}
	b.Reset()
	p := FlowReply{Status: FlowRefused, Reason: "connection refused"}
	if err := WriteReply(&b, p); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadReply(bytes.NewReader(golden(t, "reply", b.Bytes()))); err != nil || got != p {
		t.Errorf("got %+v, %v", got, err)
	}
}

// Windows names interfaces "Ethernet 2": a client at a link-local address of one is served, too.
func TestFlowRequestWithoutZones(t *testing.T) {
	q := FlowRequest{
		Key: key(port.TCP, "0.0.0.0", 8080), Peer: netip.MustParseAddrPort("[fe80::1%Ethernet 2]:51000"),
		At: netip.MustParseAddrPort("[fe80::2%Ethernet 2]:8080"),
	}
	var b bytes.Buffer
	if err := WriteRequest(&b, q); err != nil {
		t.Fatal(err)
	}
	want := FlowRequest{Key: q.Key, Peer: netip.MustParseAddrPort("[fe80::1]:51000"), At: netip.MustParseAddrPort("[fe80::2]:8080")}
	if got, err := ReadRequest(&b); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
}

// Where the client connected may be left out.
func TestFlowRequestAt(t *testing.T) {
	q := FlowRequest{Key: key(port.TCP, "0.0.0.0", 8080), At: netip.MustParseAddrPort("[::ffff:127.0.0.1]:8080")}
	var b bytes.Buffer
	if err := WriteRequest(&b, q); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadRequest(&b); err != nil || got.At != netip.MustParseAddrPort("127.0.0.1:8080") || got.Peer.IsValid() {
		t.Errorf("got %+v, %v", got, err)
	}
	for at, want := range map[string]bool{"127.0.0.1:1": true, "[fe80::1%eth0]:1": true, "[::ffff:127.0.0.1]:1": false, "[fe80::1%e 0]:1": false} {
		err := FlowRequest{Key: q.Key, At: netip.MustParseAddrPort(at)}.check()
		if (err == nil) != want {
			t.Errorf("at %s: %v", at, err)
		}
	}
}

func handshakes() map[string]Handshake {
	return map[string]Handshake{
		"hello": {Hello: &Hello{Version: 1, Role: RoleAgent, Identity: "I", Name: "guest", Build: "1.0",
			Nonce: bytes.Repeat([]byte{0xa5}, NonceSize), Token: true}},
		"proof":   {Proof: &Proof{MAC: bytes.Repeat([]byte{0x5a}, MACSize)}},
		"refusal": {Refusal: &Refusal{Code: "version", Reason: "update the older one"}},
	}
}

func TestHandshakeGolden(t *testing.T) {
	for name, h := range handshakes() {
		t.Run(name, func(t *testing.T) {
			frame, raw, err := EncodeHandshake(h)
			if err != nil {
				t.Fatal(err)
			}
			got, gotRaw, err := ReadHandshake(bytes.NewReader(golden(t, name, frame)))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(h, got); d != "" {
				t.Error(d)
			}
			if !bytes.Equal(raw, gotRaw) {
				t.Errorf("raw differs: %q, %q", raw, gotRaw)
			}
		})
	}
}

func frameOf(body string) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	return append(b, body...)
}

func TestControlRefused(t *testing.T) {
	pub := func(fields string) string {
		return `{"snapshot":{"epoch":"E","publications":[{` + fields + `}]}}`
	}
	const ok = `"protocol":"tcp","address":"0.0.0.0","port":80`
	tests := map[string]struct{ body, names string }{
		"empty":                 {``, ""},
		"not an object":         {`[]`, ""},
		"garbage":               {`GET / HTTP/1.1`, ""},
		"no message":            {`{}`, "no message"},
		"unknown message":       {`{"reboot":{}}`, `"reboot"`},
		"two messages":          {`{"ack":{"generation":1},"resync":{"reason":""}}`, `"resync"`},
		"message twice":         {`{"ack":{"generation":1},"ack":{"generation":2}}`, `"ack"`},
		"null":                  {`{"ack":null}`, "0 messages"},
		"trailing":              {`{"ack":{"generation":1}}{}`, "after top-level value"},
		"truncated":             {`{"ack":{"generation":1}`, ""},
		"wrong type":            {`{"ack":7}`, "ack"},
		"wrong type, unprinted": {"{\"ack\":\"\u009b2J\u007f\"}", "ack"},
		"generation too large":  {`{"ack":{"generation":18446744073709551616}}`, "ack"},
		"generation of 01":      {`{"ack":{"generation":01}}`, "ack"},
		"fraction":              {`{"ack":{"generation":1.0}}`, "ack"},
		"field twice":           {`{"ack":{"generation":1,"generation":2}}`, "generation"},
		"unknown field twice":   {`{"ack":{"generation":1,"a":{"b":1,"b":2}}}`, "ack"},
		"not UTF-8":             {"{\"resync\":{\"reason\":\"\xff\"}}", "UTF-8"},
		"half a character":      {`{"resync":{"reason":"\ud800"}}`, "resync"},
		"zero byte beyond":      {"{\"ack\":{\"generation\":1}}\x00", "after top-level value"},
		"negative generation":   {`{"ack":{"generation":-1}}`, "ack"},
		"no epoch":              {`{"snapshot":{"publications":[]}}`, "epoch"},
		"long epoch":            {`{"snapshot":{"epoch":"` + strings.Repeat("e", 65) + `"}}`, "epoch"},
		"too many sources":      {`{"snapshot":{"epoch":"E","incomplete":[` + strings.Repeat(`"a",`, MaxIncomplete) + `"a"]}}`, "17 sources"},
		"long missing source":   {`{"snapshot":{"epoch":"E","incomplete":["` + strings.Repeat("e", 65) + `"]}}`, "source"},
		"change back":           {`{"change":{"base":5,"generation":5}}`, "generation 5"},
		"no protocol":           {pub(`"address":"0.0.0.0","port":80`), "protocol"},
		"protocol sctp":         {pub(`"protocol":"sctp","address":"0.0.0.0","port":80`), "sctp"},
		"no address":            {pub(`"protocol":"tcp","port":80`), "no address"},
		"bad address":           {pub(`"protocol":"tcp","address":"a.b","port":80`), "a.b"},
		"mapped address":        {pub(`"protocol":"tcp","address":"::ffff:1.2.3.4","port":80`), "mapped"},
		"no port":               {pub(`"protocol":"tcp","address":"0.0.0.0"`), "port 0"},
		"port too large":        {pub(`"protocol":"tcp","address":"0.0.0.0","port":65536`), "65536"},
		"zone too long":         {pub(`"protocol":"tcp","address":"fe80::1%` + strings.Repeat("e", 33) + `","port":80`), "zone"},
		"zone with an escape":   {pub(`"protocol":"tcp","address":"fe80::1%e\u001b[2J","port":80`), "zone"},
		"mapped host address":   {pub(ok + `,"host":["[::ffff:1.2.3.4]:80"]`), "mapped"},
		"empty host address":    {pub(ok + `,"host":[""]`), "no address"},
		"too many hosts":        {pub(ok + `,"host":[` + strings.TrimSuffix(strings.Repeat(`"1.1.1.1:1",`, 17), ",") + `]`), "17 host addresses"},
		"long name":             {pub(ok + `,"owner":{"name":"` + strings.Repeat("n", 257) + `"}`), "owner name"},
		"long id":               {pub(ok + `,"owner":{"id":"` + strings.Repeat("n", 257) + `"}`), "owner id"},
		"long namespace":        {pub(ok + `,"owner":{"namespace":"` + strings.Repeat("n", 257) + `"}`), "owner namespace"},
		"long source":           {pub(ok + `,"source":"` + strings.Repeat("n", 65) + `"`), "source"},
		"long label":            {pub(ok + `,"owner":{"labels":{"a":"` + strings.Repeat("n", 1025) + `"}}`), "labels"},
		"too many labels":       {pub(ok + `,"owner":{"labels":{` + manyLabels(65) + `}}`), "65 labels"},
		"outcome without state": {`{"ack":{"generation":1,"outcomes":[{` + ok + `}]}}`, "no state"},
		"unknown state":         {`{"ack":{"generation":1,"outcomes":[{` + ok + `,"state":"great"}]}}`, "great"},
		"active nowhere":        {`{"ack":{"generation":1,"outcomes":[{` + ok + `,"state":"active"}]}}`, "host address"},
		"long reason":           {`{"outcomes":{"outcomes":[{` + ok + `,"state":"failed","reason":[{"code":"system","args":["` + strings.Repeat("r", 513) + `"]}]}]}}`, "reason of 513 bytes"},
		"unknown reason":        {`{"outcomes":{"outcomes":[{` + ok + `,"state":"failed","reason":[{"code":"bogus"}]}]}}`, "unknown reason"},
		"arguments of a reason": {`{"outcomes":{"outcomes":[{` + ok + `,"state":"failed","reason":[{"code":"system"}]}]}}`, "0 arguments, want 1"},
		"reason with no rule":   {`{"outcomes":{"outcomes":[{` + ok + `,"state":"denied","reason":[{"code":"denied"}]}]}}`, "want a rule"},
		"rule of no kind":       {`{"outcomes":{"outcomes":[{` + ok + `,"state":"denied","reason":[{"code":"denied","rule":{"kind":"","number":1}}]}]}}`, "want a rule"},
		"kind of a rule":        {`{"outcomes":{"outcomes":[{` + ok + `,"state":"denied","reason":[{"code":"denied","rule":{"kind":"x"}}]}]}}`, "kind of rule"},
		"many reasons":          {`{"outcomes":{"outcomes":[{` + ok + `,"state":"failed","reason":[` + strings.Repeat(`{"code":"in-use"},`, MaxReasons) + `{"code":"in-use"}]}]}}`, "17 reasons"},
		"too many items":        {`{"snapshot":{"epoch":"E","publications":[` + strings.Repeat(`{},`, MaxListItems) + `{}]}}`, fmt.Sprint(MaxListItems)},
		"list is an object":     {`{"outcomes":{"outcomes":{}}}`, "list"},
		"unpublished, bad key":  {`{"unpublished":{"put":[{"protocol":"tcp","address":"0.0.0.0"}]}}`, "port 0"},
		"unpublished, labels":   {`{"unpublished":{"put":[{` + ok + `,"owner":{"labels":{"a":"b"}}}]}}`, "labels"},
		"unpublished, reason":   {`{"unpublished":{"put":[{` + ok + `,"reason":[{"code":"from-list","args":["` + strings.Repeat("r", 513) + `"]}]}]}}`, "reason of"},
		"unpublished, conflict": {`{"unpublished":{"put":[{` + ok + `,"reason":[{"code":"in-use","args":["1.1.1.1:1"]}]}]}}`, "in-use"},
		"unpublished, waits":    {`{"unpublished":{"put":[{` + ok + `,"reason":[{"code":"no-host"}]}]}}`, "no-host"},
		"unpublished, second":   {`{"unpublished":{"put":[{` + ok + `,"reason":[{"code":"unlistened"},{"code":"system","args":["x"]}]}]}}`, "system"},
		"unpublished, by host":  {`{"unpublished":{"put":[{` + ok + `,"reason":[{"code":"denied","rule":{"kind":"rule","onHost":true,"number":1}}]}]}}`, "denied"},
		"unpublished, of host":  {`{"unpublished":{"put":[{` + ok + `,"reason":[{"code":"nothing-asked"}]}]}}`, "nothing-asked"},
		"unpublished, host's":   {`{"unpublished":{"put":[{` + ok + `,"rule":{"kind":"rule","onHost":true,"number":1}}]}}`, "host rule 1"},
		"unpublished, rule":     {`{"unpublished":{"unread":[{"rule":"` + strings.Repeat("r", 513) + `"}]}}`, "text"},
		"unpublished, demands":  {`{"unpublished":{"put":[{` + ok + `,"demands":["` + strings.Repeat(`a:1","`, 16) + `a:1"]}]}}`, "17 demands"},
		"unpublished, demand":   {`{"unpublished":{"put":[{` + ok + `,"demands":["` + strings.Repeat("r", 513) + `"]}]}}`, "demand"},
		"unpublished, source":   {`{"unpublished":{"put":[{` + ok + `,"source":"` + strings.Repeat("r", 65) + `"}]}}`, "source"},
		"demands of one": {`{"snapshot":{"epoch":"E","publications":[{"protocol":"tcp","address":"10.0.0.1","port":1,"host":[],"owner":{"kind":"unknown","name":"","id":""},` +
			`"demands":["a:1"` + strings.Repeat(`,"a:1"`, 16) + `]}]}}`, "17 demands"},
		"unpublished, omitted": {`{"unpublished":{"omitted":-1}}`, "omitted"},
		"unpublished, removed": {`{"unpublished":{"removed":[{"protocol":"tcp","port":1}]}}`, "no address"},
		"long garbage":         {`{"` + strings.Repeat("x", 10_000) + `":1}`, "unknown message"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			next := frameOf(`{"resync":{"reason":"after"}}`)
			r := bytes.NewReader(append(frameOf(tt.body), next...))
			c, err := ReadControl(r)
			if !errors.Is(err, ErrMalformed) {
				t.Fatalf("got %+v, %v; want ErrMalformed", c, err)
			}
			if !strings.Contains(err.Error(), tt.names) {
				t.Errorf("error %q does not name %q", err, tt.names)
			}
			if len(err.Error()) > 2*MaxReason {
				t.Errorf("error of %d bytes", len(err.Error()))
			}
			if strings.ContainsFunc(err.Error(), unicode.IsControl) {
				t.Errorf("error %q steers a terminal", err)
			}
			// The stream is still in step.
			if c, err := ReadControl(r); err != nil || c.Resync == nil || c.Resync.Reason != "after" {
				t.Errorf("next message: %+v, %v", c, err)
			}
		})
	}
}

func manyLabels(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"l%d":""`, i)
	}
	return b.String()[1:]
}

func TestUnknownFieldsAreIgnored(t *testing.T) {
	c, err := ReadControl(bytes.NewReader(frameOf(`{"ack":{"generation":3,"mood":"good","outcomes":[{"protocol":"udp","address":"::","port":9,"state":"pending","colour":1}]}}`)))
	if err != nil || c.Ack.Generation != 3 || len(c.Ack.Outcomes) != 1 {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestFrames(t *testing.T) {
	huge := binary.BigEndian.AppendUint32(nil, MaxControlFrame+1)
	if _, err := ReadControl(bytes.NewReader(huge)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("oversized: %v", err)
	}
	if _, err := ReadControl(bytes.NewReader(nil)); err != io.EOF {
		t.Errorf("end between frames: %v", err)
	}
	whole := frameOf(`{"ack":{"generation":1}}`)
	for n := 1; n < len(whole); n++ {
		if _, err := ReadControl(bytes.NewReader(whole[:n])); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("end after %d bytes: %v", n, err)
		}
	}
	if _, _, err := ReadHandshake(bytes.NewReader(binary.BigEndian.AppendUint32(nil, MaxHelloFrame+1))); !errors.Is(err, ErrTooLarge) {
		t.Errorf("oversized hello: %v", err)
	}
	if _, err := ReadRequest(bytes.NewReader(binary.BigEndian.AppendUint32(nil, MaxRequestFrame+1))); !errors.Is(err, ErrTooLarge) {
		t.Errorf("oversized request: %v", err)
	}
	var n counter
	if err := WriteControl(&n, Control{Resync: &Resync{Reason: strings.Repeat("x", MaxControlFrame)}}); !errors.Is(err, ErrTooLarge) || n.calls != 0 {
		t.Errorf("write of too much: %v, %d writes", err, n.calls)
	}
	if err := WriteControl(&n, Control{Resync: &Resync{}}); err != nil || n.calls != 1 {
		t.Errorf("a frame took %d writes, %v", n.calls, err)
	}
}

// No memory is allocated for a length before its bytes arrive.
func TestFrameMemoryFollowsInput(t *testing.T) {
	per := testing.AllocsPerRun(10, func() {
		r := &io.LimitedReader{R: zeros{}, N: 4 + 100}
		h := binary.BigEndian.AppendUint32(nil, MaxControlFrame)
		_, err := readFrame(io.MultiReader(bytes.NewReader(h), r), MaxControlFrame)
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Error(err)
		}
	})
	if per > 20 {
		t.Errorf("%v allocations", per)
	}
	body, err := readFrame(io.MultiReader(bytes.NewReader([]byte{0, 16, 0, 0}), &io.LimitedReader{R: zeros{}, N: MaxControlFrame}), MaxControlFrame)
	if err != nil || len(body) != MaxControlFrame {
		t.Errorf("%d bytes, %v", len(body), err)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

type counter struct{ calls, bytes int }

func (c *counter) Write(b []byte) (int, error) { c.calls++; c.bytes += len(b); return len(b), nil }

func TestRequestRefused(t *testing.T) {
	for name, body := range map[string]string{
		"no key":      `{}`,
		"mapped peer": `{"key":{"protocol":"tcp","address":"::","port":1},"peer":"[::ffff:1.1.1.1]:1"}`,
		"garbage":     `x`,
		"bad peer":    `{"key":{"protocol":"tcp","address":"::","port":1},"peer":"host"}`,
	} {
		if q, err := ReadRequest(bytes.NewReader(frameOf(body))); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %+v, %v", name, q, err)
		}
	}
	if q, err := ReadRequest(bytes.NewReader(frameOf(`{"key":{"protocol":"tcp","address":"::","port":1},"peer":""}`))); err != nil {
		t.Errorf("unknown peer: %+v, %v", q, err)
	}
	if p, err := ReadReply(bytes.NewReader(frameOf(`{"status":"maybe"}`))); !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), "maybe") {
		t.Errorf("unknown status: %+v, %v", p, err)
	}
	var b bytes.Buffer
	if err := WriteReply(&b, FlowReply{Status: FlowRefused, Reason: "line\nbreak\x1b[2J" + strings.Repeat("ü", MaxReason)}); err != nil {
		t.Fatal(err)
	}
	p, err := ReadReply(&b)
	if err != nil || strings.ContainsAny(p.Reason, "\n\x1b") || len(p.Reason) > MaxReason {
		t.Errorf("reason %q, %v", p.Reason, err)
	}
}

func TestHandshakeRefused(t *testing.T) {
	hello := func(edit func(*Hello)) Handshake {
		h := *handshakes()["hello"].Hello
		edit(&h)
		return Handshake{Hello: &h}
	}
	for name, h := range map[string]Handshake{
		"version 0":     hello(func(h *Hello) { h.Version = 0 }),
		"role":          hello(func(h *Hello) { h.Role = "king" }),
		"short nonce":   hello(func(h *Hello) { h.Nonce = h.Nonce[1:] }),
		"no identity":   hello(func(h *Hello) { h.Identity = "" }),
		"long identity": hello(func(h *Hello) { h.Identity = strings.Repeat("i", MaxWord+1) }),
		"long name":     hello(func(h *Hello) { h.Name = strings.Repeat("i", MaxName+1) }),
		"long build":    hello(func(h *Hello) { h.Build = strings.Repeat("i", MaxWord+1) }),
		"short proof":   {Proof: &Proof{MAC: make([]byte, 31)}},
		"long code":     {Refusal: &Refusal{Code: strings.Repeat("i", MaxWord+1)}},
		"nothing":       {},
	} {
		frame, _, err := EncodeHandshake(h)
		if err != nil {
			t.Fatal(err)
		}
		if got, _, err := ReadHandshake(bytes.NewReader(frame)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

func TestDatagrams(t *testing.T) {
	var b bytes.Buffer
	var n counter
	for _, size := range []int{0, 1, 1400, MaxDatagram} {
		frame := make([]byte, DatagramHeader+size)
		for i := range size {
			frame[DatagramHeader+i] = byte(size)
		}
		if err := WriteDatagram(io.MultiWriter(&b, &n), frame); err != nil {
			t.Fatal(err)
		}
	}
	if n.calls != 4 {
		t.Errorf("%d writes for 4 datagrams", n.calls)
	}
	buf := make([]byte, MaxDatagram)
	r := iotest.HalfReader(&b)
	for _, size := range []int{0, 1, 1400, MaxDatagram} {
		n, err := ReadDatagram(r, buf)
		if err != nil || n != size || !bytes.Equal(buf[:n], bytes.Repeat([]byte{byte(size)}, size)) {
			t.Fatalf("datagram of %d: %d bytes, %v", size, n, err)
		}
	}
	if _, err := ReadDatagram(r, buf); err != io.EOF {
		t.Errorf("end: %v", err)
	}
	if _, err := ReadDatagram(bytes.NewReader([]byte{0, 5, 1}), buf); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("end inside: %v", err)
	}
	if _, err := ReadDatagram(bytes.NewReader([]byte{0, 5, 1, 2, 3, 4, 5}), buf[:4]); !errors.Is(err, io.ErrShortBuffer) {
		t.Errorf("short buffer: %v", err)
	}
	for _, size := range []int{0, 1, DatagramHeader + MaxDatagram + 1} {
		if err := WriteDatagram(io.Discard, make([]byte, size)); !errors.Is(err, ErrTooLarge) {
			t.Errorf("frame of %d bytes: %v", size, err)
		}
	}
}

func TestConversion(t *testing.T) {
	long := strings.Repeat("ü", MaxName) // two bytes each: truncated at a character
	labels := map[string]string{"a\xff": "x", "b": "\xff", "big": strings.Repeat("v", MaxLabelValue+1)}
	for i := range 100 {
		labels[fmt.Sprintf("l%03d", i)] = strings.Repeat("v", 100)
	}
	p := port.Publication{
		Key: key(port.TCP, "::", 80), Rule: 1<<64 - 1,
		Owner:    port.Owner{Kind: port.OwnerService, Name: long + "x", ID: strings.Repeat("\xff", MaxName), Namespace: long, Labels: labels},
		Origins:  []port.OriginInfo{{Origin: port.Origin{Source: "nat"}}, {Origin: port.Origin{Source: "socket"}}},
		Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.MustParseAddrPort("[::ffff:127.0.0.1]:80")}},
	}
	w := FromPublication(p)
	if err := w.Check(); err != nil {
		t.Fatal(err)
	}
	if w.Key != p.Key || w.Rule != p.Rule || w.Source != "nat" || w.Host[0] != netip.MustParseAddrPort("127.0.0.1:80") {
		t.Errorf("got %+v", w)
	}
	if len(w.Owner.Labels) != MaxLabels || w.Owner.Labels["l000"] == "" || w.Owner.Labels["l063"] == "" {
		t.Errorf("%d labels left", len(w.Owner.Labels))
	}
	if len(labels) != 103 {
		t.Error("the publication's labels were changed")
	}
	if w.Owner.Name != strings.Repeat("ü", MaxName/2) {
		t.Errorf("name of %d bytes", len(w.Owner.Name))
	}
	back := w.Port()
	if back.Key != p.Key || back.Rule != p.Rule || !back.Decision.Allow || back.Origins[0].Source != "nat" || back.Owner.Kind != port.OwnerService {
		t.Errorf("back %+v", back)
	}

	o := port.Outcome{Key: p.Key, State: port.Conflict, HostAddress: netip.MustParseAddrPort("[::ffff:127.0.0.1]:80"), Reason: port.Because(port.SystemFailed, "a\nb"+strings.Repeat("\xff", MaxReason))}
	wo := FromOutcome(o)
	var b bytes.Buffer
	if err := WriteControl(&b, Control{Outcomes: &Outcomes{Outcomes: []Outcome{wo}}}); err != nil {
		t.Fatal(err)
	}
	c, err := ReadControl(&b)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Outcomes.Outcomes[0].Port(); got.Key != o.Key || got.State != o.State || got.HostAddress.Addr().Is4In6() || strings.Contains(got.Reason.String(), "\n") {
		t.Errorf("got %+v", got)
	}
}

// fat is a publication that is as large as one can be.
func fat(n int) Publication {
	p := web()
	p.Address = netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
	p.Owner.Name = strings.Repeat("\x01", MaxName)
	p.Owner.ID, p.Owner.Namespace, p.Owner.Cluster = p.Owner.Name, p.Owner.Name, p.Owner.Name
	p.Owner.Labels = make(map[string]string)
	for i := range MaxLabels {
		k := fmt.Sprintf("%02d", i)
		p.Owner.Labels[k] = strings.Repeat("\x01", MaxLabelBytes/MaxLabels-len(k))
		keys := append(p.Owner.LeftOut(), strings.Repeat("\x01", MaxLeftOut/MaxLabels))
		p.Owner.LabelsLeftOut = &keys
	}
	p.Owner.LabelsOmitted = true
	p.Host = nil
	for range MaxHosts {
		p.Host = append(p.Host, netip.MustParseAddrPort("[fe80:1234:1234:1234:1234:1234:1234:1234%"+strings.Repeat("\\", MaxZone)+"]:65535"))
	}
	return p
}

func thin(n int) Publication {
	return Publication{Key: port.Key{Protocol: port.TCP, Address: netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), Port: 80}}
}

func TestSplitAndJoin(t *testing.T) {
	for name, item := range map[string]func(int) Publication{"thin": thin, "fat": fat} {
		for _, n := range []int{0, 1, SnapshotPart, SnapshotPart + 1, 1500} {
			if name == "fat" {
				n = min(n, 60)
			}
			pubs := []Publication{}
			var keys []port.Key
			for i := range n {
				pubs = append(pubs, item(i))
				keys = append(keys, key(port.UDP, "1.2.3.4", uint16(i+1)))
			}
			for what, parts := range map[string][]Control{
				"snapshot": Snapshot{Epoch: "E", Generation: 4, Publications: pubs}.Split(),
				"change":   Change{Base: 3, Generation: 4, Put: pubs, Removed: keys}.Split(),
				"removal":  Change{Base: 3, Generation: 4, Removed: keys}.Split(),
			} {
				whole := joinThroughFrames(t, parts)
				switch {
				case what == "snapshot" && (whole.Snapshot == nil || whole.Snapshot.More || len(whole.Snapshot.Publications) != n),
					what == "change" && (whole.Change == nil || whole.Change.More || len(whole.Change.Put) != n || len(whole.Change.Removed) != n),
					what == "removal" && (whole.Change == nil || len(whole.Change.Put) != 0 || len(whole.Change.Removed) != n):
					t.Errorf("%s of %d %s publications: lost some", what, n, name)
				}
				if what == "snapshot" {
					if d := cmp.Diff(pubs, []Publication(whole.Snapshot.Publications), equal...); d != "" {
						t.Error(d)
					}
				}
				if small := n <= SnapshotPart/2 && name == "thin"; small && len(parts) != 1 {
					t.Errorf("%s of %d in %d parts", what, n, len(parts))
				}
			}
		}
	}
}

// joinThroughFrames writes and reads each part, and joins them.
func joinThroughFrames(t *testing.T, parts []Control) Control {
	t.Helper()
	var j Joiner
	for i, p := range parts {
		var b bytes.Buffer
		if err := WriteControl(&b, p); err != nil {
			t.Fatal(err)
		}
		c, err := ReadControl(&b)
		if err != nil {
			t.Fatal(err)
		}
		whole, done, err := j.Add(c)
		if err != nil {
			t.Fatal(err)
		}
		if done != (i == len(parts)-1) {
			t.Fatalf("part %d of %d: done %v", i+1, len(parts), done)
		}
		if done {
			return whole
		}
	}
	t.Fatal("no parts")
	return Control{}
}

// Each part has the sources that are missing, the longest that fit, and so has the whole.
func TestSplitIncompleteSnapshot(t *testing.T) {
	var sources []string
	for range MaxIncomplete + 1 {
		sources = append(sources, strings.Repeat("\u0001", MaxWord+1))
	}
	s := Snapshot{Epoch: strings.Repeat("\u0001", MaxWord), Generation: 4, Incomplete: FitSources(sources)}
	for i := range 60 {
		s.Publications = append(s.Publications, fat(i))
	}
	parts := s.Split()
	if len(parts) < 2 {
		t.Fatalf("%d parts", len(parts))
	}
	whole := joinThroughFrames(t, parts).Snapshot
	if d := cmp.Diff(s, *whole, equal...); d != "" {
		t.Error(d)
	}
	if len(whole.Incomplete) != MaxIncomplete {
		t.Errorf("%d sources", len(whole.Incomplete))
	}
}

func TestSplitOutcomes(t *testing.T) {
	var outs []Outcome
	for i := range 2000 {
		for range 3 {
			outs = append(outs, Outcome{Key: thin(i).Key, State: port.Failed, Reason: FromReason(port.Because(port.SystemFailed, strings.Repeat("\x01", i%MaxReason)))})
		}
	}
	for name, parts := range map[string][]Control{
		"ack":      Ack{Generation: 8, Outcomes: outs}.Split(),
		"outcomes": Outcomes{Outcomes: outs}.Split(),
	} {
		seen, total := make(map[port.Key]int), 0
		for i, p := range parts {
			var b bytes.Buffer
			if err := WriteControl(&b, p); err != nil {
				t.Fatal(err)
			}
			var part []Outcome
			switch last := i == len(parts)-1; {
			case p.Ack != nil && last && name == "ack" && p.Ack.Generation == 8:
				part = p.Ack.Outcomes
			case p.Outcomes != nil && (!last || name == "outcomes"):
				part = p.Outcomes.Outcomes
			default:
				t.Fatalf("%s: part %d of %d is %+v", name, i+1, len(parts), p)
			}
			for _, o := range part {
				if in, ok := seen[o.Key]; ok && in != i {
					t.Errorf("%s: outcomes of %s in parts %d and %d", name, o.Key, in, i)
				}
				seen[o.Key] = i
				total++
			}
		}
		if total != len(outs) {
			t.Errorf("%s: %d outcomes of %d", name, total, len(outs))
		}
	}
	if parts := (Ack{Generation: 1}).Split(); len(parts) != 1 || parts[0].Ack.Generation != 1 {
		t.Errorf("empty ack: %+v", parts)
	}
	// One key alone may fill more than a part.
	one := make([]Outcome, 2*SnapshotPart)
	for i := range one {
		one[i] = Outcome{Key: thin(1).Key, State: port.Pending}
	}
	if parts := (Outcomes{Outcomes: one}).Split(); len(parts) != 2 {
		t.Errorf("%d parts", len(parts))
	}
}

func TestJoinerRefuses(t *testing.T) {
	part := func(epoch string, gen uint64) Control {
		return Control{Snapshot: &Snapshot{Epoch: epoch, Generation: gen, More: true}}
	}
	delta := func(base, gen uint64) Control {
		return Control{Change: &Change{Base: base, Generation: gen, More: true}}
	}
	for name, row := range map[string][]Control{
		"other epoch":        {part("A", 1), part("B", 1)},
		"other generation":   {part("A", 1), part("A", 2)},
		"change in snapshot": {part("A", 1), delta(1, 2)},
		"snapshot in change": {delta(1, 2), part("A", 2)},
		"other base":         {delta(1, 3), delta(2, 3)},
		"message between":    {part("A", 1), {Resync: &Resync{}}},
	} {
		var j Joiner
		var err error
		for _, c := range row {
			_, _, err = j.Add(c)
		}
		if !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
		if c, done, err := j.Add(Control{Snapshot: &Snapshot{Epoch: "C"}}); err != nil || !done || c.Snapshot.Epoch != "C" {
			t.Errorf("%s: no fresh start: %v", name, err)
		}
	}
	var j Joiner
	c := Control{Snapshot: &Snapshot{Epoch: "A", More: true, Publications: make([]Publication, MaxListItems)}}
	for range MaxPublications / MaxListItems {
		if _, _, err := j.Add(c); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := j.Add(Control{Snapshot: &Snapshot{Epoch: "A", Publications: make([]Publication, 1)}}); !errors.Is(err, ErrMalformed) {
		t.Errorf("one publication too many: %v", err)
	}
	pubs := make([]Publication, 128)
	for i := range pubs {
		pubs[i] = fat(i)
	}
	c.Snapshot.Publications = pubs
	held, err := 0, error(nil)
	for err == nil {
		held += len(pubs) * pubs[0].TextBytes()
		_, _, err = j.Add(c)
	}
	if !errors.Is(err, ErrMalformed) || held > MaxSetBytes+2<<20 {
		t.Errorf("%d bytes of text until %v", held, err)
	}
}

// The limits bound memory only if what they bound stays small.
func TestSizes(t *testing.T) {
	if n := MaxListItems * unsafe.Sizeof(Publication{}); n > 4<<20 {
		t.Errorf("a list can become %d bytes", n)
	}
	p := fat(1)
	one := fitOwner(p.Owner)
	for (otherSize+ownerText(one))*(len(p.Others)+1) <= MaxOtherBytes {
		p.Others = append(p.Others, one)
	}
	if err := p.Check(); err != nil {
		t.Error(err)
	}
	if n := publicationSize(p); n > partSize {
		t.Errorf("one publication can need %d bytes of %d", n, partSize)
	}
	if err := WriteControl(io.Discard, Control{Snapshot: &Snapshot{Epoch: "A", Publications: []Publication{p}}}); err != nil {
		t.Error(err)
	}
	p.Others = append(p.Others, one)
	if p.Check() == nil {
		t.Error("more text than is allowed is accepted")
	}
	if p.Others = make([]port.Owner, MaxOthers+1); p.Check() == nil {
		t.Error("more owners than are allowed are accepted")
	}
}

// An owner that is not certain is on the wire; agents that do not send that are believed.
func TestOwnerPendingIsOnTheWire(t *testing.T) {
	for _, pending := range []bool{false, true} {
		p := port.Publication{
			Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}, OwnerPending: pending,
			Decision: port.Decision{Allow: true},
		}
		b, err := json.Marshal(FromPublication(p))
		if err != nil {
			t.Fatal(err)
		}
		var w Publication
		if err := json.Unmarshal(b, &w); err != nil {
			t.Fatal(err)
		}
		if w.Port().OwnerPending != pending || strings.Contains(string(b), "ownerPending") != pending {
			t.Errorf("pending %v is sent as %s", pending, b)
		}
	}
}

// An owner of which not all fits on the link says so.
func TestWhatIsLeftOutIsOnTheWire(t *testing.T) {
	many := map[string]string{}
	for i := range MaxLabels + 1 {
		many[fmt.Sprint("label-", i)] = "x"
	}
	long := strings.Repeat("n", MaxName+1)
	for _, c := range []struct {
		what        string
		owner       port.Owner
		labels, cut bool
	}{
		{"all fits", port.Owner{Name: long[1:], Namespace: "shop", Labels: map[string]string{"a": "b"}}, false, false},
		{"no labels", port.Owner{Name: "web"}, false, false},
		{"too many labels", port.Owner{Labels: many}, true, false},
		{"a long key", port.Owner{Labels: map[string]string{strings.Repeat("k", MaxLabelKey+1): "v", "a": "b"}}, true, false},
		{"a long value", port.Owner{Labels: map[string]string{"a": strings.Repeat("v", MaxLabelValue+1)}}, true, false},
		{"labels that are long together", port.Owner{Labels: map[string]string{
			"a": strings.Repeat("v", MaxLabelValue), "b": strings.Repeat("v", MaxLabelValue), "c": strings.Repeat("v", MaxLabelValue),
			"d": strings.Repeat("v", MaxLabelValue), "e": strings.Repeat("v", MaxLabelValue), "f": strings.Repeat("v", MaxLabelValue),
			"g": strings.Repeat("v", MaxLabelValue), "h": strings.Repeat("v", MaxLabelValue),
		}}, true, false},
		{"a label that is not UTF-8", port.Owner{Labels: map[string]string{"a": "\xff"}}, true, false},
		{"a cluster", port.Owner{Name: "web", Cluster: "k3s"}, false, false},
		{"a long name", port.Owner{Name: long}, false, true},
		{"a long namespace", port.Owner{Namespace: long}, false, true},
	} {
		p := port.Publication{
			Key:   port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80},
			Owner: c.owner, Others: []port.OtherOwner{{Owner: c.owner}}, Decision: port.Decision{Allow: true},
		}
		var buf bytes.Buffer
		if err := WriteControl(&buf, Control{Snapshot: &Snapshot{Epoch: "A", Publications: []Publication{FromPublication(p)}}}); err != nil {
			t.Fatal(err)
		}
		if sent := buf.String(); strings.Contains(sent, "labelsOmitted") != c.labels || strings.Contains(sent, "nameCut") != c.cut {
			t.Errorf("%s: sent as %s", c.what, sent)
		}
		m, err := ReadControl(&buf)
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		got := m.Snapshot.Publications[0].Port()
		for _, o := range []port.Owner{got.Owner, got.Others[0].Owner} {
			if o.LabelsOmitted != c.labels || o.NameCut != c.cut || o.Cluster != c.owner.Cluster {
				t.Errorf("%s: received %+v", c.what, o)
			}
		}
	}
}

// The labels that were left out are named, all of them or none.
func TestLabelsLeftOutAreNamed(t *testing.T) {
	many := func(n, length int) map[string]string {
		labels := map[string]string{"a": "b"}
		for i := range n {
			labels[fmt.Sprintf("%0*d", length, i)] = strings.Repeat("v", MaxLabelValue+1)
		}
		return labels
	}
	none := "no key"
	for _, c := range []struct {
		what         string
		labels       map[string]string
		count        int
		mayHave, not string
	}{
		{"nothing", many(0, 3), 0, none, "000"},
		{"one", many(1, 3), 1, "000", "001"},
		{"as many as are named", many(MaxLabels, 3), MaxLabels, "063", "064"},
		{"one more", many(MaxLabels+1, 3), 0, "anything", none},
		{"as long as are named", many(MaxLeftOut/128, 128), MaxLeftOut / 128, fmt.Sprintf("%0128d", 15), "other"},
		{"longer", many(MaxLeftOut/128+1, 128), 0, "anything", none},
		{"a key that is too long", many(1, MaxLabelKey+1), 0, "anything", none},
		{"a key that is not UTF-8", map[string]string{"a": "b", "\xff": "c"}, 0, "anything", none},
		{"a value that is not UTF-8", map[string]string{"a": "b", "c": "\xff"}, 1, "c", "b"},
	} {
		p := port.Publication{Key: key(port.TCP, "0.0.0.0", 80), Owner: port.Owner{Labels: c.labels}, Decision: port.Decision{Allow: true}}
		var buf bytes.Buffer
		if err := WriteControl(&buf, Control{Snapshot: &Snapshot{Epoch: "A", Publications: []Publication{FromPublication(p)}}}); err != nil {
			t.Fatal(err)
		}
		m, err := ReadControl(&buf)
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		o := m.Snapshot.Publications[0].Port().Owner
		if len(o.LeftOut()) != c.count || o.Labels["a"] != "b" {
			t.Errorf("%s: received %+v", c.what, o)
		}
		if c.mayHave != none && !o.MayHave(c.mayHave) || c.not != none && o.MayHave(c.not) {
			t.Errorf("%s: may have %q: %v, %q: %v", c.what, c.mayHave, o.MayHave(c.mayHave), c.not, o.MayHave(c.not))
		}
	}
	for what, keys := range map[string][]string{
		"too many": make([]string, MaxLabels+1), "too long": {strings.Repeat("k", MaxLabelKey+1)}, "not UTF-8": {"\xff"},
		"too long together": slices.Repeat([]string{strings.Repeat("k", MaxLabelKey)}, MaxLeftOut/MaxLabelKey+1),
	} {
		p := web()
		p.Owner.LabelsOmitted, p.Owner.LabelsLeftOut = true, &keys
		if err := p.Check(); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Owners behind NAT rules are on the wire. Where one cannot be sent, or engines name
// several owners for the port, the owner is pending.
func TestOtherOwnersAreOnTheWire(t *testing.T) {
	named := func(n, text int) (out []port.OtherOwner) {
		for i := range n {
			name := fmt.Sprint("pod-", i)
			out = append(out, port.OtherOwner{Owner: port.Owner{
				Kind: port.OwnerContainer, ID: name, Name: name, Namespace: "shop", Labels: map[string]string{"app": strings.Repeat("x", text)},
			}})
		}
		return out
	}
	rival := named(2, 3)
	rival[0].Rival = true
	for _, c := range []struct {
		what    string
		others  []port.OtherOwner
		sent    int
		pending bool
	}{
		{"none", nil, 0, false},
		{"one", named(1, 3), 1, false},
		{"as many as fit", named(MaxOthers, 3), MaxOthers, false},
		{"one more", named(MaxOthers+1, 3), MaxOthers, true},
		{"much text", named(200, 1000), MaxOtherBytes / 1150, true},
		{"a rival", rival, 1, true},
	} {
		p := port.Publication{
			Key:    port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80},
			Others: c.others, Decision: port.Decision{Allow: true},
		}
		var buf bytes.Buffer
		if err := WriteControl(&buf, Control{Snapshot: &Snapshot{Epoch: "A", Publications: []Publication{FromPublication(p)}}}); err != nil {
			t.Fatal(err)
		}
		if len(c.others) == 0 && strings.Contains(buf.String(), "others") {
			t.Errorf("%s: sent as %s", c.what, buf.String())
		}
		m, err := ReadControl(&buf)
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		got := m.Snapshot.Publications[0].Port()
		if len(got.Others) != c.sent || got.OwnerPending != c.pending {
			t.Errorf("%s: %d other owners, pending %v; want %d and %v", c.what, len(got.Others), got.OwnerPending, c.sent, c.pending)
		}
		if n := len(got.Others); n > 0 && !got.Others[n-1].Owner.Equal(c.others[len(c.others)-1].Owner) && !c.pending {
			t.Errorf("%s: the last owner is %+v", c.what, got.Others[n-1])
		}
	}
}

// All that is not published reaches the host, in frames of limited size, and each part can
// be applied by itself.
func TestSplitUnpublished(t *testing.T) {
	long := strings.Repeat("\x01", 2*MaxReason)
	unread := List[Unread]{}
	for range MaxUnread {
		unread = append(unread, NewUnread(long, long, long))
	}
	var asked []port.OriginInfo
	for i := range 2 * MaxDemandsOfOne {
		asked = append(asked, port.OriginInfo{Origin: port.Origin{Source: port.SourceDemand, ID: fmt.Sprintf("%s:%d", strings.Repeat("n", 253), i+1)}})
	}
	u := Unpublished{Reset: true, Unread: &unread, Omitted: 9}
	for i := range MaxUnpublished {
		w, ok := FromUnpublished(port.Publication{
			Key: thin(i).Key, Owner: port.Owner{Kind: port.OwnerProcess, Name: long, ID: long, Namespace: long, Labels: map[string]string{"a": "b"}},
			Origins: asked, Decision: port.Decision{Rule: port.RuleRef{Kind: port.RuleConfigured, Name: long}, Reason: port.Because(port.FromSources, long)}, Dial: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80")},
		})
		if !ok || w.check() != nil || len(w.Demands) != MaxDemandsOfOne {
			t.Fatalf("%+v: %v", w, w.check())
		}
		u.Put, u.Removed = append(u.Put, w), append(u.Removed, key(port.UDP, "1.2.3.4", uint16(i+1)))
	}
	put, removed, rules := 0, 0, 0
	parts := u.Split()
	for i, part := range parts {
		var b bytes.Buffer
		if err := WriteControl(&b, part); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(b.String(), "10.0.0.1") && i == 0 {
			t.Error("an address that can be dialled is sent")
		}
		c, err := ReadControl(&b)
		if err != nil || c.Unpublished == nil || c.Unpublished.Reset != (i == 0) || c.Unpublished.More != (i < len(parts)-1) || c.Unpublished.Omitted != 9 {
			t.Fatalf("part %d: %+v, %v", i, c.Unpublished, err)
		}
		if put > 0 && len(c.Unpublished.Removed) > 0 {
			t.Errorf("part %d: ports are removed after others took their room", i)
		}
		put += len(c.Unpublished.Put)
		removed += len(c.Unpublished.Removed)
		if c.Unpublished.Unread != nil {
			rules += len(*c.Unpublished.Unread)
		}
	}
	if put != MaxUnpublished || removed != MaxUnpublished || rules != MaxUnread {
		t.Errorf("%d ports, %d removed, %d rules", put, removed, rules)
	}
	if parts := (Unpublished{Reset: true}).Split(); len(parts) != 1 || !parts[0].Unpublished.Reset {
		t.Errorf("nothing: %+v", parts)
	}
	if _, ok := FromUnpublished(port.Publication{Key: key(port.TCP, "::ffff:1.2.3.4", 80)}); ok {
		t.Error("a key that hosts refuse is sent")
	}
}

// What a host cannot read of demands it ignores.
func TestDemandTexts(t *testing.T) {
	p := port.Publication{Key: key(port.TCP, "172.17.0.2", 80)}
	for _, id := range []string{"svc/default/web:80/tcp", "svc/default/web:80/tcp endpoints", "web:80/tcp"} {
		p.Origins = append(p.Origins, port.OriginInfo{Origin: port.Origin{Source: port.SourceDemand, ID: id}})
	}
	w := FromPublication(p)
	if !slices.Equal(w.Demands, List[string]{"svc/default/web:80/tcp", "web:80/tcp"}) {
		t.Errorf("sent %q", w.Demands)
	}
	w.Demands = append(w.Demands, "no name")
	for _, d := range []string{"svc/default/web:80", "web:80"} {
		asked, err := port.ParseDemand(d)
		if got := w.Port(); err != nil || !got.Demanded(asked) || len(got.Origins) != 3 {
			t.Errorf("%s: %+v, %v", d, got.Origins, err)
		}
	}
}

func TestHelloWithUnpublished(t *testing.T) {
	h := *handshakes()["hello"].Hello
	for _, on := range []bool{false, true} {
		h.Unpublished = on
		frame, raw, err := EncodeHandshake(Handshake{Hello: &h})
		if err != nil || strings.Contains(string(raw), "unpublished") != on {
			t.Fatalf("%s, %v", raw, err)
		}
		got, _, err := ReadHandshake(bytes.NewReader(frame))
		if err != nil || got.Hello.Unpublished != on {
			t.Errorf("%+v, %v", got.Hello, err)
		}
	}
	later := strings.Replace(`{"hello":{"version":2,"role":"host","identity":"I","nonce":"NONCE","token":false,"later":{"a":[1]}}}`,
		"NONCE", strings.Repeat("A", 43)+"=", 1)
	if _, _, err := ReadHandshake(bytes.NewReader(frameOf(later))); err != nil {
		t.Errorf("another version, which is to be named: %v", err)
	}
}

func TestLabelsOnTheWire(t *testing.T) {
	p := port.Publication{
		Key:      port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80},
		Decision: port.Decision{Allow: true, Rule: port.RuleRef{Kind: port.RuleDefault}, Host: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:80")}},
	}
	if w := FromPublication(p); w.Labels != nil {
		t.Errorf("without labels: %+v", w.Labels)
	}
	p.Decision.Yields, p.Decision.Rule = true, port.RuleRef{Kind: port.RuleLabel, Name: strings.Repeat("x", MaxReason+1)}
	p.Decision.SetLabels(port.Labels{Alias: strings.Repeat("a", MaxWord)})
	w := FromPublication(p)
	if err := w.Check(); err != nil {
		t.Error(err)
	}
	d := w.Port().Decision
	if !d.Labelled() || !d.Yields || d.Alias() != p.Decision.Alias() || len(d.Rule.Name) != MaxReason {
		t.Errorf("%+v", d)
	}
	w.Labels = &Labels{Alias: strings.Repeat("a", MaxWord+1)}
	if w.Check() == nil {
		t.Error("a name that is too long is accepted")
	}
}

// A host learns that a user's own engine names an owner: its rules must not believe it.
func TestHeldOwnerIsSent(t *testing.T) {
	held := port.Held{Engine: "podman", User: "alice", Process: "rootlessport"}
	p := port.Publication{Key: web().Key, Owner: port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "w", Held: &held}}
	var buf bytes.Buffer
	if err := WriteControl(&buf, Control{Snapshot: &Snapshot{Epoch: "A", Publications: []Publication{FromPublication(p)}}}); err != nil {
		t.Fatal(err)
	}
	c, err := ReadControl(&buf)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Snapshot.Publications[0].Owner.Held; got == nil || *got != held {
		t.Errorf("held %+v, want %+v", got, held)
	}
	held.User = strings.Repeat("a", MaxName+1)
	w := FromPublication(p)
	if len(w.Owner.Held.User) > MaxName || len(held.User) != MaxName+1 {
		t.Errorf("%d bytes of a user's name are sent", len(w.Owner.Held.User))
	}
	w.Owner.Held = &held
	if err := w.Check(); !errors.Is(err, ErrMalformed) {
		t.Errorf("a long user's name: %v", err)
	}
}
