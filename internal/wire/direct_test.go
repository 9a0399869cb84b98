// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"reflect"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// plainControls have only what is written and read directly.
func plainControls() map[string]Control {
	at := netip.MustParseAddrPort("127.0.0.1:8080")
	k := key(port.TCP, "127.0.0.1", 8080)
	pub := Publication{Key: k, Host: []netip.AddrPort{at}, Owner: port.Owner{Kind: port.OwnerProcess, Name: "web & <co>", ID: "811"}, Source: "socket"}
	wide := Publication{
		Key: key(port.UDP, "fe80::1%eth0", 53), DualStack: true, Host: []netip.AddrPort{at, netip.MustParseAddrPort("[::1]:0")},
		Owner: port.Owner{Kind: port.OwnerService, Name: "dns", ID: "kube-system/dns", Namespace: "kube-system"},
	}
	outcomes := []Outcome{
		{Key: k, State: port.Active, HostAddress: at},
		{Key: key(port.TCP, "::", 22), State: port.Denied, Reason: "rule 1"},
		{Key: key(port.TCP, "::", 23), State: port.Denied, Reason: "rule 1"},
	}
	return map[string]Control{
		"put":      {Change: &Change{Base: 7, Generation: 1<<64 - 1, Put: []Publication{pub, wide, pub}, More: true}},
		"removed":  {Change: &Change{Generation: 9, Removed: []port.Key{k, wide.Key}}},
		"both":     {Change: &Change{Generation: 9, Put: []Publication{pub}, Removed: []port.Key{wide.Key}}},
		"neither":  {Change: &Change{Generation: 9}},
		"no hosts": {Change: &Change{Generation: 9, Put: []Publication{{Key: k, Host: []netip.AddrPort{}}}}},
		"snapshot": {Snapshot: &Snapshot{Epoch: "E1", Generation: 3, Publications: []Publication{pub, wide}}},
		"ack":      {Ack: &Ack{Generation: 9, Outcomes: outcomes}},
		"bare ack": {Ack: &Ack{Generation: 9}},
		"outcomes": {Outcomes: &Outcomes{Outcomes: outcomes}},
	}
}

func marshal(t *testing.T, c Control) []byte {
	t.Helper()
	frame, err := encode(c, MaxControlFrame)
	if err != nil {
		t.Fatal(err)
	}
	return frame[frameHeader:]
}

func TestWhatIsWrittenDirectlyIsWhatJSONWrites(t *testing.T) {
	for name, c := range plainControls() {
		got, ok := appendControl(nil, &c)
		if want := marshal(t, c); !ok || !bytes.Equal(got, want) {
			t.Errorf("%s: written directly: %v\n got %s\nwant %s", name, ok, got, want)
		}
		if len(got) > controlSize(&c) {
			t.Errorf("%s: %d bytes, counted on %d", name, len(got), controlSize(&c))
		}
		back, ok := parseControl(got)
		if !ok || !reflect.DeepEqual(back, c) {
			t.Errorf("%s: read directly: %v\n got %s\nwant %s", name, ok, marshal(t, back), marshal(t, c))
		}
	}
}

func TestWhatNeedsMoreThanPlainTextIsLeftToJSON(t *testing.T) {
	pub := func(change func(*Publication)) Control {
		p := Publication{Key: key(port.TCP, "::", 80), Host: []netip.AddrPort{}}
		change(&p)
		return Control{Change: &Change{Generation: 1, Put: []Publication{p}}}
	}
	for name, c := range map[string]Control{
		"quote":     pub(func(p *Publication) { p.Owner.Name = `a"b` }),
		"backslash": pub(func(p *Publication) { p.Owner.ID = `a\b` }),
		"control":   pub(func(p *Publication) { p.Owner.Name = "a\x01b" }),
		"delete":    pub(func(p *Publication) { p.Owner.Name = "a\x7fb" }),
		"umlaut":    pub(func(p *Publication) { p.Owner.Namespace = "ü" }),
		"not UTF-8": pub(func(p *Publication) { p.Source = "\xff" }),
		"zone":      pub(func(p *Publication) { p.Address = netip.MustParseAddr(`fe80::1%a"b`) }),
		"labels":    pub(func(p *Publication) { p.Owner.Labels = map[string]string{"a": "b"} }),
		"no host":   pub(func(p *Publication) { p.Host = nil }),
		"empty":     {Snapshot: &Snapshot{Epoch: "E", Publications: []Publication{}}},
		"resync":    {Resync: &Resync{Reason: "why not"}},
		"nothing":   {},
	} {
		if b, ok := appendControl(nil, &c); ok {
			t.Errorf("%s: written as %s", name, b)
		}
		if _, ok := parseControl(marshal(t, c)); ok {
			t.Errorf("%s: read from %s", name, marshal(t, c))
		}
	}
}

func TestAListBeyondTheLimitIsRefusedHoweverItIsRead(t *testing.T) {
	c := Control{Ack: &Ack{Generation: 1}}
	for range MaxListItems + 1 {
		c.Ack.Outcomes = append(c.Ack.Outcomes, Outcome{Key: key(port.TCP, "::", 1), State: port.Pending})
	}
	body, ok := appendControl(nil, &c)
	if !ok {
		t.Fatal("not written directly")
	}
	if _, ok := parseControl(body); ok {
		t.Error("read directly")
	}
	if _, err := decodeControl(body); err == nil {
		t.Error("accepted")
	}
}

// What is read directly is what JSON says, and what is written is what JSON writes.
func FuzzDirect(f *testing.F) {
	for _, set := range []map[string]Control{controls(), plainControls()} {
		for _, c := range set {
			b, err := json.Marshal(c)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b)
		}
	}
	f.Add([]byte(`{"ack":{"generation":01}}`))
	f.Add([]byte(`{"ack":{"generation":18446744073709551616}}`))
	f.Add([]byte(`{"change":{"base":1,"generation":2,"put":[]}}`))
	f.Add([]byte(`{"change":{"base":1,"generation":2,"removed":[{"protocol":"TCP","address":"","port":65536}]}} `))
	f.Fuzz(func(t *testing.T, b []byte) {
		want, err := unmarshalControl(b)
		if c, ok := parseControl(b); ok && (err != nil || !reflect.DeepEqual(c, want)) {
			t.Fatalf("%q\n got %#v\nwant %#v, %v", b, c, want, err)
		}
		if err != nil {
			return
		}
		got, ok := appendControl(nil, &want)
		if !ok {
			return
		}
		if frame, err := encode(want, 1<<30); err != nil || !bytes.Equal(got, frame[frameHeader:]) {
			t.Fatalf("%v\n got %s\nwant %s", err, got, frame)
		}
	})
}
