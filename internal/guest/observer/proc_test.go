// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
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
		writeStat(t, root, pid, 7)
		for i, l := range links {
			if err := os.Symlink(l, filepath.Join(fds, fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root
}

// writeStat says when a process started, in ticks.
func writeStat(t *testing.T, root, pid string, started int) {
	t.Helper()
	stat := fmt.Sprintf("%s (name-%s) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", pid, pid, started)
	if err := os.WriteFile(filepath.Join(root, pid, "stat"), []byte(stat), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Of several processes that have a socket the oldest owns it, whatever pid it has.
func TestOldestHolderIsOwner(t *testing.T) {
	has := []string{"socket:[100]"}
	f := ownerFinder{budget: 1000, proc: fakeProc(t, map[string][]string{"9": has, "10": has, "11": has, "12": {}})}
	thread := filepath.Join(f.proc, "12", "task", "13", "fd") // of a process whose first thread has ended
	if err := errors.Join(os.MkdirAll(thread, 0o700), os.Symlink(has[0], filepath.Join(thread, "3"))); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		pid           string
		started, want int
	}{{"9", 7, 9}, {"11", 6, 11}, {"10", 6, 10}, {"12", 5, 12}} {
		writeStat(t, f.proc, c.pid, c.started)
		got := f.find(t.Context(), []Socket{{Cookie: 1, Inode: 100}}, 0).owners[1]
		if got.pid != uint32(c.want) || got.comm != fmt.Sprintf("name-%d", c.want) {
			t.Errorf("owner %+v after %s started at %d, want %d", got, c.pid, c.started, c.want)
		}
	}
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
	}, 0).owners
	want := map[uint64]owner{1: {10, "name-10", 7 * tick}, 2: {20, "name-20", 7 * tick}, 6: {10, "name-10", 7 * tick}}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Who still has a socket is judged by the process itself, also where another one has it, too.
func TestHolders(t *testing.T) {
	address := netip.MustParseAddr("127.0.0.1")
	f := ownerFinder{
		proc: fakeProc(t, map[string][]string{
			"10": {"socket:[100]", "socket:[101]"},
			"20": {"socket:[101]", "socket:[200]"},
		}),
		mptcp: func() (map[netip.AddrPort]uint32, error) {
			return map[netip.AddrPort]uint32{netip.AddrPortFrom(address, 80): 200}, nil
		},
	}
	unread := filepath.Join(f.proc, "40", "fd") // no directory: an error as where it may not be read
	if err := errors.Join(os.MkdirAll(filepath.Dir(unread), 0o700), os.WriteFile(unread, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	got := f.holders(t.Context(), []Socket{
		{Cookie: 1, PID: 20, Comm: "was", Inode: 101},
		{Cookie: 2, PID: 10, Comm: "name-10", Inode: 100},
		{Cookie: 3, PID: 20, Comm: "was", Inode: 555, Protocol: port.TCP, Address: address, Port: 80, Listening: true}, // a subflow
		{Cookie: 4, PID: 20, Comm: "was", Inode: 100},                                                                  // handed on
		{Cookie: 5, PID: 30, Comm: "was", Inode: 300},                                                                  // ended
		{Cookie: 6, PID: 40, Comm: "was", Inode: 400},                                                                  // must not be read
		{Cookie: 7, PID: 20, Comm: "was"},
	})
	ten, twenty := owner{10, "name-10", 7 * tick}, owner{20, "name-20", 7 * tick}
	want := map[uint64]owner{1: twenty, 2: ten, 3: twenty, 6: {pid: 40, comm: "was"}, 7: {pid: 20, comm: "was"}}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestOwnersAreBounded(t *testing.T) {
	processes := make(map[string][]string)
	var wanted []Socket
	for i := range 90 {
		pid := fmt.Sprint(8 + i/30) // 10 is after 9
		processes[pid] = append(processes[pid], fmt.Sprintf("socket:[%d]", 1000+i))
		wanted = append(wanted, Socket{Cookie: uint64(1 + i), Inode: uint32(1000 + i)})
	}
	wanted = append(wanted, Socket{Cookie: 999, Inode: 999})
	f := ownerFinder{proc: fakeProc(t, processes), budget: 20}
	from := uint32(0)
	for _, want := range []uint32{9, 10, 0} {
		r := f.find(t.Context(), wanted, from)
		if len(r.owners) != 30 || r.next != want || r.denied {
			t.Errorf("from %d: found %d, next %d, denied %v; want 30, next %d", from, len(r.owners), r.next, r.denied, want)
		}
		from = r.next
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r := f.find(ctx, wanted, 0); r.next != 8 {
		t.Errorf("next is %d after a search that was cancelled, want 8", r.next)
	}
	f.proc = filepath.Join(f.proc, "nowhere")
	if r := f.find(t.Context(), wanted, 0); len(r.owners) != 0 || !r.denied {
		t.Errorf("found %v nowhere", r)
	}
}

func TestUnreadableProcessIsReported(t *testing.T) {
	wanted := []Socket{{Cookie: 1, Inode: 100}, {Cookie: 2, Inode: 200}}
	f := ownerFinder{budget: 1000, proc: fakeProc(t, map[string][]string{"10": {"socket:[100]"}})}
	// A link to itself cannot be read by root either.
	for name, unreadable := range map[string]bool{"11": true, "12": false} {
		if err := os.Mkdir(filepath.Join(f.proc, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if !unreadable {
			continue // it has ended
		}
		if err := os.Symlink("fd", filepath.Join(f.proc, name, "fd")); err != nil {
			t.Fatal(err)
		}
	}
	if r := f.find(t.Context(), wanted, 0); len(r.owners) != 1 || r.next != 0 || !r.denied {
		t.Errorf("found %+v, want one owner and that a process was denied", r)
	}
	if r := f.find(t.Context(), wanted, 12); r.denied {
		t.Error("a process that has ended counts as one that cannot be read")
	}
}

// A process that ends while it is read has no name.
func TestOwnerWithoutNameIsSkipped(t *testing.T) {
	root := fakeProc(t, map[string][]string{"10": {"socket:[100]"}, "11": {"socket:[100]"}})
	if err := os.Remove(filepath.Join(root, "10", "stat")); err != nil {
		t.Fatal(err)
	}
	f := ownerFinder{budget: 1000, proc: root}
	got := f.find(t.Context(), []Socket{{Cookie: 1, Inode: 100}}, 0).owners
	if want := map[uint64]owner{1: {11, "name-11", 7 * tick}}; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
