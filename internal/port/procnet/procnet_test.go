// SPDX-License-Identifier: Apache-2.0

package procnet

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// line is a line of a table with a local address, in this machine's byte order.
func line(local netip.AddrPort, state string) string {
	b := local.Addr().AsSlice()
	for i := 0; i < len(b); i += 4 {
		binary.BigEndian.PutUint32(b[i:], binary.NativeEndian.Uint32(b[i:]))
	}
	p := binary.BigEndian.AppendUint16(nil, local.Port())
	return " 0: " + hex.EncodeToString(b) + ":" + hex.EncodeToString(p) + " 00000000:0000 " + state +
		" 00000000:00000000 00:00000000 00000000     0        0 4711 1 0\n"
}

func TestParse(t *testing.T) {
	want := []Socket{
		{netip.MustParseAddrPort("127.0.0.1:8080"), Listen, 4711},
		{netip.MustParseAddrPort("[::1]:53"), Close, 4711},
		{netip.MustParseAddrPort("10.1.2.3:80"), Established, 4711},
	}
	text := "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n" +
		line(want[0].Local, "0A") + line(want[1].Local, "07") + line(netip.MustParseAddrPort("[::ffff:10.1.2.3]:80"), "01")
	var got []Socket
	if err := Parse(strings.NewReader(text), func(s Socket) { got = append(got, s) }); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	for _, bad := range []string{
		"0: 0100007:1F90 0 0A 0 0 0 0 0 1", "0: 0100007F 0 0A 0 0 0 0 0 1", "0: 0100007F:1F90 0 XX 0 0 0 0 0 1", "0: 0100007F:1F90 0 0A 0 0 0 0 0 x",
	} {
		if err := Parse(strings.NewReader(bad), func(s Socket) { t.Errorf("%q: %+v", bad, s) }); err == nil {
			t.Errorf("%q is no error", bad)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(line(netip.MustParseAddrPort("127.0.0.1:8080"), "0A"))
	f.Add(line(netip.MustParseAddrPort("[::1]:53"), "07"))
	f.Add("\n 0: zz:1 0:0 0A 0 0 0 0 0 1")
	f.Fuzz(func(t *testing.T, text string) {
		_ = Parse(strings.NewReader(text), func(s Socket) {
			if a := s.Local; !a.IsValid() || a.Addr().Is4In6() {
				t.Errorf("address %v from %q", a, text)
			}
		})
	})
}
