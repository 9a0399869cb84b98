// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/heap"
)

func TestMemory(t *testing.T) {
	m := Memory(filepath.Join(t.TempDir(), "peer.json"))
	if e, err := m.Load(); err != nil || e != nil {
		t.Errorf("nothing saved: %v, %v", e, err)
	}
	want := []Entry{{port.UDP, netip.MustParseAddrPort("[::1]:53"), "192.168.127.2:53"}, {Protocol: port.TCP, Host: netip.MustParseAddrPort("127.0.0.1:80")}}
	if err := m.Save(want); err != nil {
		t.Fatal(err)
	}
	if e, err := m.Load(); err != nil || !slices.Equal(e, want) {
		t.Errorf("loaded %v, %v", e, err)
	}
	if info, err := os.Stat(string(m)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	for _, bad := range []string{"", "{", `[{"protocol":"sctp","host":"127.0.0.1:1"}]`, "[{}]"} {
		if err := os.WriteFile(string(m), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if e, err := m.Load(); err == nil && len(e) > 0 {
			t.Errorf("%q: %v", bad, e)
		}
	}
	if err := m.Save(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(string(m)); !os.IsNotExist(err) {
		t.Errorf("an empty memory leaves a file: %v", err)
	}
	if err := Memory("/nowhere/peer.json").Save(want); err == nil {
		t.Error("saved nowhere")
	}
	if err := Memory("").Save(want); err != nil {
		t.Error(err)
	}
}

func FuzzFiles(f *testing.F) {
	f.Add("Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\neth0\t00000000\t017FA8C0\t0003\t0\t0\t5\t00000000\t0\t0\t0\n", "192.168.127.1\tother GW.internal # x\n", "gw.internal")
	f.Add("eth0 00000000 0 0 0 0 4294967296 00000000", "fe80::1%eth0 gw", "gw")
	root := f.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(root, "proc/net"), 0o700), os.Mkdir(filepath.Join(root, "etc"), 0o700)); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, routes, hosts, name string) {
		err := errors.Join(os.WriteFile(filepath.Join(root, "proc/net/route"), []byte(routes), 0o600), os.WriteFile(filepath.Join(root, "etc/hosts"), []byte(hosts), 0o600))
		if err != nil {
			t.Fatal(err)
		}
		if a := DefaultGateway(root); a.IsValid() && (!a.Is4() || a.IsUnspecified()) {
			t.Errorf("gateway %s of %q", a, routes)
		}
		for _, a := range HostsFile(root, name) {
			if !a.IsValid() || a.Is4In6() {
				t.Errorf("%q is %s in %q", name, a, hosts)
			}
		}
	})
}

// A book of 10,000 ports that came and went keeps less than a fiftieth of their memory.
func TestMemoryOfManyPortsIsFreed(t *testing.T) {
	const n = 10_000
	w := newWanted()
	keys := make([]port.Key, 0, n)
	for i := range n {
		keys = append(keys, key(fmt.Sprintf("0.0.0.0:%d", 1+i)))
	}
	update := func(change func(tx *table.Tx[port.Key, port.Publication], k port.Key)) {
		was := w.View().Generation()
		w.Update(func(tx *table.Tx[port.Key, port.Publication]) {
			for _, k := range keys {
				change(tx, k)
			}
		})
		w.book.Update(w.View(), reconcile.Change{Base: max(was, 1), Keys: keys})
		w.settle()
	}
	before := heap.Used()
	update(func(tx *table.Tx[port.Key, port.Publication], k port.Key) {
		host := netip.AddrPortFrom(port.Loopback(k.Address), k.Port)
		tx.Put(k, port.Publication{Fact: port.Fact{Key: k, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{host}}}})
	})
	full := heap.Used() - before
	update(func(tx *table.Tx[port.Key, port.Publication], k port.Key) { tx.Delete(k) })
	left := heap.Used() - before
	t.Logf("%d KiB with %d ports, %d KiB after them", full>>10, n, left>>10)
	if left > full/50 {
		t.Errorf("%d of %d bytes are left", left, full)
	}
	runtime.KeepAlive(w)
}
