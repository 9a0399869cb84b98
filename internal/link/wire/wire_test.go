// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
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

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead/fairlead/internal/port"
)

var update = flag.Bool("update", false, "write the golden files anew")

var rule1 = port.RuleRef{Kind: port.RuleConfigured, Number: 1, Name: "no-debug"}

var equal = []cmp.Option{cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }), cmpopts.EquateComparable(port.Reason{}), cmpopts.EquateEmpty()}

func key(p port.Protocol, addr string, n uint16) port.Key {
	return port.Key{Protocol: p, Address: netip.MustParseAddr(addr), Port: n}
}

func web() port.Fact {
	return port.Fact{
		Key: key(port.TCP, "0.0.0.0", 8080),
		Owner: port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "c0ffee",
			Labels: map[string]string{"com.example/role": "front <end>", "z": "ü"}},
		Source:   "docker",
		Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080"), netip.MustParseAddrPort("[::1]:8080")}},
	}
}

// raw encodes rows.
func raw[T any](rows ...T) (b []byte) {
	for i, v := range rows {
		row, err := EncodeRow(v)
		if err != nil {
			panic(err)
		}
		b = append(append(b, "[,"[min(i, 1)]), row...)
	}
	return append(b, ']')
}

func frames() map[string]Frame {
	dns := port.Fact{Key: key(port.UDP, "fe80::1%eth0", 5300), Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.MustParseAddrPort("[::1]:0")}}}
	return map[string]Frame{
		"snapshot":         {Table: "wanted", Generation: 7, Put: raw(web(), dns), More: true},
		"snapshot-partial": {Table: "wanted", Generation: 7, Put: raw(web()), Partial: []string{"containerd", "docker"}},
		"snapshot-empty":   {Table: "wanted"},
		"change":           {Table: "wanted", Base: 7, Generation: 9, Part: 1, Put: raw(dns), Removed: raw(key(port.TCP, "::", 22))},
		"outcomes": {Table: "outcomes", Base: 3, Generation: 4, Seen: []Seen{{"wanted", 9}}, Put: raw(
			port.NewAnswer(dns.Key, []port.Outcome{{State: port.Active, HostAddress: netip.MustParseAddrPort("[::1]:49152")}}),
			port.NewAnswer(key(port.TCP, "0.0.0.0", 80), []port.Outcome{
				{State: port.Conflict, HostAddress: netip.MustParseAddrPort("127.0.0.1:80"), Reason: port.Because(port.InUseBy, "127.0.0.1:80", "nginx", "811")},
				{State: port.Denied, Reason: rule1.Because(port.DeniedByRule)},
			}))},
		"seen":   {Seen: []Seen{{"wanted", 9}}},
		"resync": {Resync: "standing at 5, change builds on 7"},
		"unpublished": {Table: "unpublished", Generation: 5, Omitted: 3, Put: raw(
			port.Fact{
				Key:      key(port.TCP, "127.0.0.1", 9229),
				Source:   "socket",
				Owner:    port.Owner{Kind: port.OwnerProcess, Name: "node", ID: "811"},
				Decision: port.Decision{Rule: rule1, Reason: rule1.Because(port.DeniedByRule)},
			},
			port.Fact{Key: key(port.UDP, "::", 53), Decision: port.Decision{Reason: port.Join(port.Because(port.Unlistened), port.Because(port.FromSources, "10.0.0.0/8"))}},
			port.Fact{Key: key(port.TCP, "172.17.0.2", 80), Source: "demand", Decision: port.Decision{Rule: rule1}, Named: &port.Named{Demands: port.List[string]{"web:80/tcp"}}},
		)},
		"unread": {Table: "unread", Generation: 1, Put: raw(Unread{Where: "ip nat PREROUTING", Rule: "-m mark --mark 0x7 -j DNAT", Reason: "a mark"})},
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

func TestFrameGolden(t *testing.T) {
	for name, f := range frames() {
		t.Run(name, func(t *testing.T) {
			b, err := EncodeFrame(&f)
			if err != nil {
				t.Fatal(err)
			}
			body, err := ReadControl(iotest.OneByteReader(bytes.NewReader(golden(t, name, b))))
			if err != nil {
				t.Fatal(err)
			}
			got, err := DecodeFrame(body)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(f, got, equal...); d != "" {
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

func TestFrameRefused(t *testing.T) {
	for name, tt := range map[string]struct{ body, names string }{
		"empty":                 {``, ""},
		"not an object":         {`[]`, ""},
		"garbage":               {`GET / HTTP/1.1`, ""},
		"trailing":              {`{"generation":1}{}`, "after top-level value"},
		"truncated":             {`{"generation":1`, ""},
		"wrong type":            {`{"seen":7}`, "seen"},
		"wrong type, unprinted": {"{\"generation\":\"\u009b2J\u007f\"}", "generation"},
		"generation too large":  {`{"generation":18446744073709551616}`, "generation"},
		"generation of 01":      {`{"generation":01}`, ""},
		"fraction":              {`{"generation":1.0}`, "generation"},
		"negative generation":   {`{"generation":-1}`, "generation"},
		"field twice":           {`{"generation":1,"generation":2}`, "generation"},
		"unknown field twice":   {`{"generation":1,"a":{"b":1,"b":2}}`, "b"},
		"not UTF-8":             {"{\"resync\":\"\xff\"}", "UTF-8"},
		"half a character":      {`{"resync":"\ud800"}`, ""},
		"zero byte beyond":      {"{\"generation\":1}\x00", "after top-level value"},
		"long reason":           {`{"resync":"` + strings.Repeat("r", 513) + `"}`, "resync of 513 bytes"},
		"too many sources":      {`{"partial":[` + strings.Repeat(`"a",`, MaxPartial) + `"a"]}`, "17 sources"},
		"long source":           {`{"table":"t","partial":["` + strings.Repeat("e", 65) + `"]}`, "source"},
		"too many tables":       {`{"seen":[` + strings.Repeat(`{},`, 16) + `{}]}`, "17 tables"},
		"change back":           {`{"table":"t","base":5,"generation":4}`, "generation 4"},
		"nothing":               {`{}`, "nothing"},
		"unknown field alone":   {`{"reboot":{}}`, "nothing"},
		"rows of no table":      {`{"put":[]}`, "no table"},
		"omitted":               {`{"omitted":-1}`, "omitted"},
		"long garbage":          {`{"generation":"` + strings.Repeat("x", 10_000) + `"}`, "generation"},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := DecodeFrame([]byte(tt.body))
			checkRefused(t, f, err, tt.names)
		})
	}
}

func checkRefused(t *testing.T, got any, err error, names string) {
	t.Helper()
	if !errors.Is(err, ErrMalformed) {
		t.Fatalf("got %+v, %v; want ErrMalformed", got, err)
	}
	if !strings.Contains(err.Error(), names) {
		t.Errorf("error %q does not name %q", err, names)
	}
	if len(err.Error()) > 2*port.MaxReason {
		t.Errorf("error of %d bytes", len(err.Error()))
	}
	if strings.ContainsFunc(err.Error(), unicode.IsControl) {
		t.Errorf("error %q steers a terminal", err)
	}
}

func TestRowRefused(t *testing.T) {
	pub := func(fields string) string { return `[{"decision":{"allow":true},` + fields + `}]` }
	const ok = `"protocol":"tcp","address":"0.0.0.0","port":80`
	hosts := func(list string) string { return `[{` + ok + `,"decision":{"allow":true,"host":[` + list + `]}}]` }
	decided := func(fields string) string { return `[{` + ok + `,"decision":{` + fields + `}}]` }
	outcome := func(fields string) string { return `[{` + ok + `,"outcomes":[{` + fields + `}]}]` }
	for _, c := range []struct {
		kind  string
		check func(string) error
		rows  map[string]struct{ body, names string }
	}{
		{"published", decoder(published), map[string]struct{ body, names string }{
			"no protocol":         {pub(`"address":"0.0.0.0","port":80`), "protocol"},
			"protocol sctp":       {pub(`"protocol":"sctp","address":"0.0.0.0","port":80`), "sctp"},
			"no address":          {pub(`"protocol":"tcp","port":80`), "no address"},
			"bad address":         {pub(`"protocol":"tcp","address":"a.b","port":80`), "a.b"},
			"mapped address":      {pub(`"protocol":"tcp","address":"::ffff:1.2.3.4","port":80`), "mapped"},
			"no port":             {pub(`"protocol":"tcp","address":"0.0.0.0"`), "port 0"},
			"port too large":      {pub(`"protocol":"tcp","address":"0.0.0.0","port":65536`), "65536"},
			"zone too long":       {pub(`"protocol":"tcp","address":"fe80::1%` + strings.Repeat("e", 33) + `","port":80`), "zone"},
			"zone with an escape": {pub(`"protocol":"tcp","address":"fe80::1%e\u001b[2J","port":80`), "zone"},
			"mapped host address": {hosts(`"[::ffff:1.2.3.4]:80"`), "mapped"},
			"empty host address":  {hosts(`""`), "no address"},
			"too many hosts":      {hosts(strings.TrimSuffix(strings.Repeat(`"1.1.1.1:1",`, 17), ",")), "17 host addresses"},
			"long name":           {pub(ok + `,"owner":{"name":"` + strings.Repeat("n", 257) + `"}`), "owner name"},
			"long id":             {pub(ok + `,"owner":{"id":"` + strings.Repeat("n", 257) + `"}`), "owner id"},
			"long namespace":      {pub(ok + `,"owner":{"namespace":"` + strings.Repeat("n", 257) + `"}`), "owner namespace"},
			"long source":         {pub(ok + `,"source":"` + strings.Repeat("n", 65) + `"`), "source"},
			"not published":       {decided(`"allow":false`), "allowed false"},
			"reason":              {decided(`"allow":true,"reason":[{"code":"unlistened"}]`), "reason"},
			"host rule":           {decided(`"allow":true,"rule":{"kind":"rule","onHost":true,"number":1}`), "host rule 1"},
			"long label":          {pub(ok + `,"owner":{"labels":{"a":"` + strings.Repeat("n", 1025) + `"}}`), "labels"},
			"too many labels":     {pub(ok + `,"owner":{"labels":{` + manyLabels(65) + `}}`), "65 labels"},
			"too many items":      {`[` + strings.Repeat(`{},`, port.MaxListItems) + `{}]`, fmt.Sprint(port.MaxListItems)},
			"demands of one":      {pub(ok + `,"demands":["a:1/tcp"` + strings.Repeat(`,"a:1/tcp"`, 16) + `]`), "17 demands"},
		}},
		{"outcomes", decoder(port.Answer.Check), map[string]struct{ body, names string }{
			"outcome without state": {outcome(``), "no state"},
			"unknown state":         {outcome(`"state":"great"`), "great"},
			"active nowhere":        {outcome(`"state":"active"`), "host address"},
			"long reason":           {outcome(`"state":"failed","reason":[{"code":"system","args":["` + strings.Repeat("r", 513) + `"]}]`), "reason of 513 bytes"},
			"unknown reason":        {outcome(`"state":"failed","reason":[{"code":"bogus"}]`), "unknown reason"},
			"arguments of a reason": {outcome(`"state":"failed","reason":[{"code":"system"}]`), "0 arguments, want 1"},
			"rule of no kind":       {outcome(`"state":"denied","reason":[{"code":"denied","rule":{"kind":"","number":1}}]`), "want a rule"},
			"reason with no rule":   {outcome(`"state":"denied","reason":[{"code":"denied"}]`), "want a rule"},
			"kind of a rule":        {outcome(`"state":"denied","reason":[{"code":"denied","rule":{"kind":"x"}}]`), "kind of rule"},
			"many reasons":          {outcome(`"state":"failed","reason":[` + strings.Repeat(`{"code":"in-use"},`, port.MaxReasons) + `{"code":"in-use"}]`), "17 reasons"},
			"none":                  {`[{` + ok + `}]`, "0 outcomes"},
			"too many":              {`[{` + ok + `,"outcomes":[` + strings.Repeat(`{},`, port.MaxOutcomes) + `{}]}]`, "33 outcomes"},
			"list is an object":     {`{"outcomes":{}}`, "list"},
		}},
		{"unpublished", decoder(unpublished), map[string]struct{ body, names string }{
			"bad key":               {`[{"protocol":"tcp","address":"0.0.0.0"}]`, "port 0"},
			"labels":                {`[{` + ok + `,"owner":{"labels":{"a":"b"}}}]`, "labels"},
			"reason":                {decided(`"reason":[{"code":"from-list","args":["` + strings.Repeat("r", 513) + `"]}]`), "reason of"},
			"conflict":              {decided(`"reason":[{"code":"in-use","args":["1.1.1.1:1"]}]`), "in-use"},
			"waits for a host":      {decided(`"reason":[{"code":"no-host"}]`), "no-host"},
			"second reason":         {decided(`"reason":[{"code":"unlistened"},{"code":"system","args":["x"]}]`), "system"},
			"reason of a host rule": {decided(`"reason":[{"code":"denied","rule":{"kind":"rule","onHost":true,"number":1}}]`), "denied"},
			"reason of a host":      {decided(`"reason":[{"code":"nothing-asked"}]`), "nothing-asked"},
			"host rule":             {decided(`"rule":{"kind":"rule","onHost":true,"number":1}`), "host rule 1"},
			"demands":               {`[{` + ok + `,"demands":["` + strings.Repeat(`a:1/tcp","`, 16) + `a:1/tcp"]}]`, "17 demands"},
			"demand":                {`[{` + ok + `,"demands":["` + strings.Repeat("r", 513) + `"]}]`, "demand"},
			"demand without /tcp":   {`[{` + ok + `,"demands":["a:1"]}]`, "demand"},
			"published":             {pub(ok), "allowed true"},
			"host addresses":        {decided(`"host":["1.1.1.1:1"]`), "host addresses"},
			"source":                {`[{` + ok + `,"source":"` + strings.Repeat("r", 65) + `"}]`, "source"},
		}},
		{"unread", decoder(Unread.Check), map[string]struct{ body, names string }{
			"rule": {`[{"rule":"` + strings.Repeat("r", 513) + `"}]`, "text"},
		}},
		{"keys", decoder(port.Key.Check), map[string]struct{ body, names string }{
			"no address": {`[{"protocol":"tcp","port":1}]`, "no address"},
		}},
	} {
		for name, tt := range c.rows {
			t.Run(c.kind+" "+name, func(t *testing.T) { checkRefused(t, nil, c.check(tt.body), tt.names) })
		}
	}
}

func published(f port.Fact) error { return f.Check(true) }

func unpublished(f port.Fact) error { return f.Check(false) }

func decoder[T any](check func(T) error) func(string) error {
	return func(list string) error {
		_, err := DecodeRows([]byte(list), check)
		return err
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
	f, err := DecodeFrame([]byte(`{"table":"t","generation":3,"mood":"good","put":[{"protocol":"udp","address":"::","port":9,"colour":1,"decision":{"allow":true}}]}`))
	if err != nil || f.Generation != 3 {
		t.Errorf("got %+v, %v", f, err)
	}
	if rows, err := DecodeRows(f.Put, published); err != nil || len(rows) != 1 {
		t.Errorf("got %+v, %v", rows, err)
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
	if _, err := EncodeFrame(&Frame{Resync: strings.Repeat("x", MaxControlFrame)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too much: %v", err)
	}
	var n counter
	if err := WriteReply(&n, FlowReply{Status: FlowOK}); err != nil || n.calls != 1 {
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
	if err := WriteReply(&b, FlowReply{Status: FlowRefused, Reason: "line\nbreak\x1b[2J" + strings.Repeat("ü", port.MaxReason)}); err != nil {
		t.Fatal(err)
	}
	p, err := ReadReply(&b)
	if err != nil || strings.ContainsAny(p.Reason, "\n\x1b") || len(p.Reason) > port.MaxReason {
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
		"long identity": hello(func(h *Hello) { h.Identity = strings.Repeat("i", port.MaxWord+1) }),
		"long name":     hello(func(h *Hello) { h.Name = strings.Repeat("i", port.MaxName+1) }),
		"long build":    hello(func(h *Hello) { h.Build = strings.Repeat("i", port.MaxWord+1) }),
		"short proof":   {Proof: &Proof{MAC: make([]byte, 31)}},
		"long code":     {Refusal: &Refusal{Code: strings.Repeat("i", port.MaxWord+1)}},
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

func TestFit(t *testing.T) {
	long := strings.Repeat("ü", port.MaxName) // two bytes each: truncated at a character
	labels := map[string]string{"a\xff": "x", "b": "\xff", "big": strings.Repeat("v", port.MaxLabelValue+1)}
	for i := range 100 {
		labels[fmt.Sprintf("l%03d", i)] = strings.Repeat("v", 100)
	}
	p := port.Fact{
		Key: key(port.TCP, "::", 80), Target: 1<<64 - 1, Source: "nat",
		Owner:    port.Owner{Kind: port.OwnerService, Name: long + "x", ID: strings.Repeat("\xff", port.MaxName), Namespace: long, Labels: labels},
		Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.MustParseAddrPort("[::ffff:127.0.0.1]:80")}},
	}
	w := p.Fit()
	if err := w.Check(true); err != nil {
		t.Fatal(err)
	}
	if w.Key != p.Key || w.Target != p.Target || w.Source != "nat" || w.Decision.Host[0] != netip.MustParseAddrPort("127.0.0.1:80") {
		t.Errorf("got %+v", w)
	}
	if len(w.Owner.Labels) != port.MaxLabels || w.Owner.Labels["l000"] == "" || w.Owner.Labels["l063"] == "" {
		t.Errorf("%d labels left", len(w.Owner.Labels))
	}
	if len(labels) != 103 {
		t.Error("the publication's labels were changed")
	}
	if w.Owner.Name != strings.Repeat("ü", port.MaxName/2) {
		t.Errorf("name of %d bytes", len(w.Owner.Name))
	}
	o := port.Outcome{State: port.Conflict, HostAddress: netip.MustParseAddrPort("[::ffff:127.0.0.1]:80"), Reason: port.Because(port.SystemFailed, "a\nb"+strings.Repeat("\xff", port.MaxReason))}
	row, err := EncodeRow(port.NewAnswer(p.Key, slices.Repeat([]port.Outcome{o}, port.MaxOutcomes+1)))
	if err != nil {
		t.Fatal(err)
	}
	rows, err := DecodeRows(slices.Concat([]byte("["), row, []byte("]")), port.Answer.Check)
	if err != nil || len(rows[0].Outcomes) != port.MaxOutcomes {
		t.Fatal(rows, err)
	}
	if got := rows[0].Outcomes[0]; got.State != o.State || got.HostAddress.Addr().Is4In6() || strings.Contains(got.Reason.String(), "\n") {
		t.Errorf("got %+v", got)
	}
}

// fat is a publication that is as large as one can be.
func fat(n int) port.Fact {
	p := web()
	p.Address = netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
	p.Owner.Name = strings.Repeat("\x01", port.MaxName)
	p.Owner.ID, p.Owner.Namespace, p.Owner.Cluster = p.Owner.Name, p.Owner.Name, p.Owner.Name
	p.Owner.Labels = make(map[string]string)
	for i := range port.MaxLabels {
		k := fmt.Sprintf("%02d", i)
		p.Owner.Labels[k] = strings.Repeat("\x01", port.MaxLabelBytes/port.MaxLabels-len(k))
		keys := append(p.Owner.LeftOut(), strings.Repeat("\x01", port.MaxLeftOut/port.MaxLabels))
		p.Owner.LabelsLeftOut = &keys
	}
	p.Owner.LabelsOmitted = true
	p.Decision.Host = nil
	for range port.MaxHosts {
		p.Decision.Host = append(p.Decision.Host, netip.MustParseAddrPort("[fe80:1234:1234:1234:1234:1234:1234:1234%"+strings.Repeat("\\", port.MaxZone)+"]:65535"))
	}
	return p
}

// writeRow writes a row as it is sent in a message.
func writeRow(b *bytes.Buffer, p port.Fact) error {
	row, err := EncodeRow(p)
	if err != nil {
		return err
	}
	frame, err := EncodeFrame(&Frame{Table: "t", Generation: 1, Put: slices.Concat([]byte("["), row, []byte("]"))})
	b.Write(frame)
	return err
}

// readRow reads what writeRow wrote.
func readRow(b *bytes.Buffer) (p port.Fact, err error) {
	body, err := ReadControl(b)
	if err != nil {
		return p, err
	}
	f, err := DecodeFrame(body)
	if err != nil {
		return p, err
	}
	rows, err := DecodeRows(f.Put, published)
	if err != nil {
		return p, err
	}
	return rows[0], nil
}

// No row within the limits is too large for a message.
func TestLargestRowFits(t *testing.T) {
	p := fat(1)
	for range port.MaxOthers {
		p.Others = append(p.Others, port.OtherOwner{Owner: port.Owner{Name: strings.Repeat("\x01", port.MaxOtherBytes/port.MaxOthers-128)}})
	}
	if err := p.Check(true); err != nil {
		t.Fatal(err)
	}
	if b, err := EncodeRow(p); err != nil || len(b) > MaxControlFrame-8<<10 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

// An owner that is not certain is on the wire; agents that do not send that are believed.
func TestOwnerPendingIsOnTheWire(t *testing.T) {
	for _, pending := range []bool{false, true} {
		p := port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}, OwnerPending: pending, Decision: port.Decision{Allow: true}}
		b, err := EncodeRow(p.Fit())
		if err != nil {
			t.Fatal(err)
		}
		var w port.Fact
		if err := decode(b, &w); err != nil {
			t.Fatal(err)
		}
		if w.OwnerPending != pending || strings.Contains(string(b), "ownerPending") != pending {
			t.Errorf("pending %v is sent as %s", pending, b)
		}
	}
}

// An owner of which not all fits on the link says so.
func TestWhatIsLeftOutIsOnTheWire(t *testing.T) {
	many := map[string]string{}
	for i := range port.MaxLabels + 1 {
		many[fmt.Sprint("label-", i)] = "x"
	}
	long := strings.Repeat("n", port.MaxName+1)
	for _, c := range []struct {
		what        string
		owner       port.Owner
		labels, cut bool
	}{
		{"all fits", port.Owner{Name: long[1:], Namespace: "shop", Labels: map[string]string{"a": "b"}}, false, false},
		{"no labels", port.Owner{Name: "web"}, false, false},
		{"too many labels", port.Owner{Labels: many}, true, false},
		{"a long key", port.Owner{Labels: map[string]string{strings.Repeat("k", port.MaxLabelKey+1): "v", "a": "b"}}, true, false},
		{"a long value", port.Owner{Labels: map[string]string{"a": strings.Repeat("v", port.MaxLabelValue+1)}}, true, false},
		{"labels that are long together", port.Owner{Labels: map[string]string{
			"a": strings.Repeat("v", port.MaxLabelValue), "b": strings.Repeat("v", port.MaxLabelValue), "c": strings.Repeat("v", port.MaxLabelValue),
			"d": strings.Repeat("v", port.MaxLabelValue), "e": strings.Repeat("v", port.MaxLabelValue), "f": strings.Repeat("v", port.MaxLabelValue),
			"g": strings.Repeat("v", port.MaxLabelValue), "h": strings.Repeat("v", port.MaxLabelValue),
		}}, true, false},
		{"a label that is not UTF-8", port.Owner{Labels: map[string]string{"a": "\xff"}}, true, false},
		{"a cluster", port.Owner{Name: "web", Cluster: "k3s"}, false, false},
		{"a long name", port.Owner{Name: long}, false, true},
		{"a long namespace", port.Owner{Namespace: long}, false, true},
	} {
		p := port.Fact{
			Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}, Owner: c.owner,
			Others: []port.OtherOwner{{Owner: c.owner}}, Decision: port.Decision{Allow: true},
		}
		var buf bytes.Buffer
		if err := writeRow(&buf, p.Fit()); err != nil {
			t.Fatal(err)
		}
		if sent := buf.String(); strings.Contains(sent, "labelsOmitted") != c.labels || strings.Contains(sent, "nameCut") != c.cut {
			t.Errorf("%s: sent as %s", c.what, sent)
		}
		m, err := readRow(&buf)
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		got := m
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
			labels[fmt.Sprintf("%0*d", length, i)] = strings.Repeat("v", port.MaxLabelValue+1)
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
		{"as many as are named", many(port.MaxLabels, 3), port.MaxLabels, "063", "064"},
		{"one more", many(port.MaxLabels+1, 3), 0, "anything", none},
		{"as long as are named", many(port.MaxLeftOut/128, 128), port.MaxLeftOut / 128, fmt.Sprintf("%0128d", 15), "other"},
		{"longer", many(port.MaxLeftOut/128+1, 128), 0, "anything", none},
		{"a key that is too long", many(1, port.MaxLabelKey+1), 0, "anything", none},
		{"a key that is not UTF-8", map[string]string{"a": "b", "\xff": "c"}, 0, "anything", none},
		{"a value that is not UTF-8", map[string]string{"a": "b", "c": "\xff"}, 1, "c", "b"},
	} {
		p := port.Fact{Key: key(port.TCP, "0.0.0.0", 80), Owner: port.Owner{Labels: c.labels}, Decision: port.Decision{Allow: true}}
		var buf bytes.Buffer
		if err := writeRow(&buf, p.Fit()); err != nil {
			t.Fatal(err)
		}
		m, err := readRow(&buf)
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		o := m.Owner
		if len(o.LeftOut()) != c.count || o.Labels["a"] != "b" {
			t.Errorf("%s: received %+v", c.what, o)
		}
		if c.mayHave != none && !o.MayHave(c.mayHave) || c.not != none && o.MayHave(c.not) {
			t.Errorf("%s: may have %q: %v, %q: %v", c.what, c.mayHave, o.MayHave(c.mayHave), c.not, o.MayHave(c.not))
		}
	}
	for what, keys := range map[string][]string{
		"too many": make([]string, port.MaxLabels+1), "too long": {strings.Repeat("k", port.MaxLabelKey+1)}, "not UTF-8": {"\xff"},
		"too long together": slices.Repeat([]string{strings.Repeat("k", port.MaxLabelKey)}, port.MaxLeftOut/port.MaxLabelKey+1),
	} {
		p := web()
		p.Owner.LabelsOmitted, p.Owner.LabelsLeftOut = true, &keys
		if p.Check(true) == nil {
			t.Errorf("%s: accepted", what)
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
		{"as many as fit", named(port.MaxOthers, 3), port.MaxOthers, false},
		{"one more", named(port.MaxOthers+1, 3), port.MaxOthers, true},
		{"much text", named(200, 1000), port.MaxOtherBytes / 1150, true},
		{"a rival", rival, 1, true},
	} {
		p := port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}, Others: c.others, Decision: port.Decision{Allow: true}}
		var buf bytes.Buffer
		if err := writeRow(&buf, p.Fit()); err != nil {
			t.Fatal(err)
		}
		if len(c.others) == 0 && strings.Contains(buf.String(), "others") {
			t.Errorf("%s: sent as %s", c.what, buf.String())
		}
		m, err := readRow(&buf)
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		got := m
		if len(got.Others) != c.sent || got.OwnerPending != c.pending {
			t.Errorf("%s: %d other owners, pending %v; want %d and %v", c.what, len(got.Others), got.OwnerPending, c.sent, c.pending)
		}
		if n := len(got.Others); n > 0 && !got.Others[n-1].Owner.Equal(c.others[len(c.others)-1].Owner) && !c.pending {
			t.Errorf("%s: the last owner is %+v", c.what, got.Others[n-1])
		}
	}
}

func TestLabelsOnTheWire(t *testing.T) {
	f := web()
	f.Decision.Rule = port.RuleRef{Kind: port.RuleDefault}
	if w := f.Fit(); w.Named != nil || w.Decision.Rule != (port.RuleRef{}) {
		t.Errorf("without labels: %+v", w)
	}
	f.Decision.Yields, f.Decision.Rule = true, port.RuleRef{Kind: port.RuleLabel, Name: strings.Repeat("x", port.MaxReason+1)}
	f.SetNamed(strings.Repeat("a", port.MaxWord), nil)
	w := f.Fit()
	if err := w.Check(true); err != nil {
		t.Error(err)
	}
	if d := w.Decision; !d.Labelled() || !d.Yields || w.Alias() != f.Alias() || len(d.Rule.Name) != port.MaxReason {
		t.Errorf("%+v", w)
	}
	if w.SetNamed(strings.Repeat("a", port.MaxWord+1), nil); w.Check(true) == nil {
		t.Error("a name that is too long is accepted")
	}
}

// A host learns that a user's own engine names an owner: its rules must not believe it.
func TestHeldOwnerIsSent(t *testing.T) {
	held := port.Held{Engine: "podman", User: "alice", Process: "rootlessport"}
	p := web()
	p.Owner.Held = &held
	var buf bytes.Buffer
	if err := writeRow(&buf, p.Fit()); err != nil {
		t.Fatal(err)
	}
	c, err := readRow(&buf)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Owner.Held; got == nil || *got != held {
		t.Errorf("held %+v, want %+v", got, held)
	}
	held.User = strings.Repeat("a", port.MaxName+1)
	w := p.Fit()
	if len(w.Owner.Held.User) > port.MaxName || len(held.User) != port.MaxName+1 {
		t.Errorf("%d bytes of a user's name are sent", len(w.Owner.Held.User))
	}
	w.Owner.Held = &held
	if w.Check(true) == nil {
		t.Error("a long user's name is accepted")
	}
}
