// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
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

// What cannot be read is not without sockets.
func TestUnreadableTablesAreAnError(t *testing.T) {
	for _, name := range []string{"sockstat", "sockstat6", "tcp"} {
		process := t.TempDir()
		if err := os.MkdirAll(filepath.Join(process, "net", name), 0o700); err != nil { // a directory cannot be read
			t.Fatal(err)
		}
		if name == "tcp" {
			if err := os.WriteFile(filepath.Join(process, "net/sockstat"), []byte("TCP: inuse 1\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if list, err := readTables(80, space{process: process}); err == nil {
			t.Errorf("%s: %+v", name, list)
		}
	}
	if list, err := readTables(80, space{process: filepath.Join(t.TempDir(), "ended")}); err != nil || len(list) > 0 {
		t.Errorf("of a process that ended: %+v, %v", list, err)
	}
}

// The error about one namespace is not lost in the others.
func TestErrorsOfNamespaces(t *testing.T) {
	failed, none := errors.New("failed"), &fs.PathError{Op: "open", Path: "x", Err: os.ErrPermission}
	result := map[string]error{"/1": none, "/2": failed, "/3": none, "/4": nil}
	var spaces []space
	for _, path := range []string{"/1", "/2", "/3", "/4"} {
		spaces = append(spaces, space{path: path})
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	look := func(s space) ([]Found, error) { return []Found{{Space: s.path}}, result[s.path] }
	list, err := lookAll(ctx, spaces, look)
	if len(list) != 1 || list[0].Space != "/4" {
		t.Errorf("found %+v", list)
	}
	if !errors.Is(err, failed) || strings.Count(fmt.Sprint(err), "permission denied") != 1 {
		t.Errorf("error %v", err)
	}
	_, err = lookAll(ctx, spaces, func(s space) ([]Found, error) {
		if s.path == "/2" {
			cancel()
		}
		return look(s)
	})
	if !errors.Is(err, failed) || !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// Only a namespace that does not exist any more has no sockets.
func TestNamespaceThatCannotBeEntered(t *testing.T) {
	loop := filepath.Join(t.TempDir(), "loop")
	if err := os.Symlink(loop, loop); err != nil {
		t.Fatal(err)
	}
	if _, err := lookInto(t.Context(), 80, space{path: loop}); !errors.Is(err, unix.ELOOP) {
		t.Errorf("error %v", err)
	}
	if _, err := lookInto(t.Context(), 80, space{path: loop + "x"}); err != nil {
		t.Errorf("gone: %v", err)
	}
}
