// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
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

func TestReadTables(t *testing.T) {
	process := t.TempDir()
	if err := os.Mkdir(filepath.Join(process, "net"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"tcp": tcpTable, "udp6": udp6Table, "udp": "not to be read",
		"sockstat": "TCP: inuse 3 orphan 0\nUDP: inuse 0 mem 1\n", "sockstat6": "TCP6: inuse 1\nUDP6: inuse 2\n",
	} {
		if err := os.WriteFile(filepath.Join(process, "net", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := readTables(8080, space{process: process})
	if err != nil || len(got) != 1 || got[0].Address != netip.MustParseAddr("127.0.0.1") || !got[0].Listening || got[0].Inode != 4711 {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = readTables(53, space{process: process})
	if err != nil || len(got) != 2 || got[0].Address != netip.IPv6Loopback() || got[0].Client || !got[1].Client || got[1].Inode != 4715 {
		t.Errorf("%+v, %v", got, err)
	}
}
