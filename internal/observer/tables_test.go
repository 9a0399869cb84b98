// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

const tcpTable = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0 0 10 0
`

const udp6Table = `  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  10: 00000000000000000000000001000000:0035 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4714 2 0 0
  11: 00000000000000000000000001000000:0035 00000000000000000000000001000000:0036 01 00000000:00000000 00:00000000 00000000     0        0 4715 2 0 0
`

func TestAppendTable(t *testing.T) {
	got, err := appendTable(nil, strings.NewReader(tcpTable), port.TCP, 8080)
	if err != nil || len(got) != 1 || got[0].Address != netip.MustParseAddr("127.0.0.1") || !got[0].Listening || got[0].Inode != 4711 {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = appendTable(nil, strings.NewReader(udp6Table), port.UDP, 53)
	if err != nil || len(got) != 2 || got[0].Address != netip.IPv6Loopback() || got[0].Client || !got[1].Client || got[1].Inode != 4715 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{
		"0: 0100007:1F90 0 0A 0 0 0 0 0 1", "0: 0100007F 0 0A 0 0 0 0 0 1", "0: 0100007F:1F90 0 XX 0 0 0 0 0 1",
	} {
		if got, err := appendTable(nil, strings.NewReader(bad), port.TCP, 8080); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}
