// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func TestFlowsAreAskedForDirectlyAsJSONWritesIt(t *testing.T) {
	for name, q := range map[string]FlowRequest{
		"IPv4":    {Key: key(port.TCP, "0.0.0.0", 80), Peer: netip.MustParseAddrPort("127.0.0.1:40000")},
		"IPv6":    {Key: key(port.UDP, "::", 53), Peer: netip.MustParseAddrPort("[fe80::1%eth0]:1")},
		"no peer": {Key: key(port.TCP, "fe80::1%3", 1)},
	} {
		t.Run(name, func(t *testing.T) {
			want, err := json.Marshal(q)
			if err != nil {
				t.Fatal(err)
			}
			got, ok := appendRequest(nil, &q)
			if !ok || !bytes.Equal(got, want) {
				t.Errorf("written directly: %v\n got %s\nwant %s", ok, got, want)
			}
			if back, ok := parseRequest(want); !ok || back != q {
				t.Errorf("read directly: %v, %+v; want %+v", ok, back, q)
			}
			// Any other form of it is read as well, though not directly.
			other := bytes.ReplaceAll(want, []byte(":{"), []byte(" : {"))
			if _, ok := parseRequest(other); ok {
				t.Errorf("%s was read directly", other)
			}
			var b bytes.Buffer
			if err := writeFrame(&b, json.RawMessage(other), MaxRequestFrame); err != nil {
				t.Fatal(err)
			}
			if back, err := ReadRequest(&b); err != nil || back != q {
				t.Errorf("read %+v, %v; want %+v", back, err, q)
			}
			if err := WriteRequest(&b, q); err != nil {
				t.Fatal(err)
			}
			if back, err := ReadRequest(&b); err != nil || back != q {
				t.Errorf("read %+v, %v; want %+v", back, err, q)
			}
		})
	}
	want, err := json.Marshal(FlowReply{Status: FlowOK})
	if err != nil || string(want) != plainOK {
		t.Errorf("JSON writes %s, %v; want %s", want, err, plainOK)
	}
}

func TestWhatAsksForNoFlowIsNotReadDirectly(t *testing.T) {
	q := FlowRequest{Key: key(port.TCP, "0.0.0.0", 80), Peer: netip.MustParseAddrPort("127.0.0.1:40000")}
	good, _ := appendRequest(nil, &q)
	for i := range good {
		if _, ok := parseRequest(good[:i]); ok {
			t.Errorf("%s was read", good[:i])
		}
	}
	if _, ok := parseRequest(append(good, ' ')); ok {
		t.Error("a space behind it was read")
	}
}
