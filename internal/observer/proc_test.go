// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// fakeProc makes a /proc in which processes hold what their links name.
func fakeProc(t *testing.T, processes map[string][]string) string {
	t.Helper()
	root := t.TempDir()
	for pid, links := range processes {
		fds := filepath.Join(root, pid, "fd")
		if err := os.MkdirAll(fds, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, pid, "comm"), []byte("name-"+pid+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		for i, l := range links {
			if err := os.Symlink(l, filepath.Join(fds, fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root
}

func TestOwners(t *testing.T) {
	address := netip.MustParseAddr("127.0.0.1")
	f := ownerFinder{
		budget: 1000,
		proc: fakeProc(t, map[string][]string{
			"10":   {"/dev/null", "socket:[100]", "pipe:[101]", "socket:[102]"},
			"20":   {"socket:[200]", "socket:[x]", "socket:[99999999999]"},
			"self": {"socket:[300]"},
		}),
		mptcp: func() (map[netip.AddrPort]uint32, error) {
			return map[netip.AddrPort]uint32{netip.AddrPortFrom(address, 80): 200}, nil
		},
	}
	got := f.find(t.Context(), []Socket{
		{Cookie: 1, Inode: 100, Address: address, Port: 79, Listening: true},
		{Cookie: 2, Inode: 555, Protocol: port.TCP, Address: address, Port: 80, Listening: true}, // a subflow
		{Cookie: 3, Inode: 300, Address: address, Port: 81, Listening: true},
		{Cookie: 4, Inode: 101, Address: address, Port: 82, Listening: true},
		{Cookie: 5, Address: address, Port: 83, Listening: true},
		{Cookie: 6, Inode: 102, Protocol: port.UDP, Address: address, Port: 80, Listening: true},
	})
	want := map[uint64]owner{1: {10, "name-10"}, 2: {20, "name-20"}, 6: {10, "name-10"}}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestOwnersAreBounded(t *testing.T) {
	var links []string
	for i := range 100 {
		links = append(links, fmt.Sprintf("socket:[%d]", 1000+i))
	}
	processes := map[string][]string{"10": links, "20": links, "30": links}
	f := ownerFinder{proc: fakeProc(t, processes), budget: 50}
	var wanted []Socket
	for i := range uint64(100) {
		wanted = append(wanted, Socket{Cookie: 1 + i, Inode: uint32(1000 + i)})
	}
	if n := len(f.find(t.Context(), wanted)); n != 50 {
		t.Errorf("found %d with a budget of 50 descriptors", n)
	}
	f.proc = filepath.Join(f.proc, "nowhere")
	if n := len(f.find(t.Context(), wanted)); n != 0 {
		t.Errorf("found %d nowhere", n)
	}
}
