// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
)

// openConn opens a connection to nftables in the namespace.
func (w *world) openConn(t testing.TB) *nftables.Conn {
	t.Helper()
	ns, err := os.Open(w.path())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())), nftables.AsLasting())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.CloseLasting()
		_ = ns.Close()
	})
	return conn
}

// A ruleset that is changed as fast as the kernel takes it, with dumps and audits
// in the middle of commits: nothing that an audit finds differs, and when it ends
// every method has the last word. A dump that begins while a commit ends reads what
// was before, under the new generation; it must not be taken.
func TestDumpsDuringCommits(t *testing.T) {
	w := newWorld(t)
	w.run(pre, "nft", "-f", "-")
	conn := w.openConn(t)
	table := &nftables.Table{Name: "t", Family: nftables.TableFamilyIPv4}
	chain := &nftables.Chain{Name: "pre", Table: table}
	stop := make(chan struct{})
	var writer sync.WaitGroup
	commits := 0
	var failed error
	writer.Go(func() {
		for i := 0; failed == nil; i++ {
			select {
			case <-stop:
				return
			default:
			}
			conn.FlushChain(chain)
			for p := range 30 {
				conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: dnatRule(uint16(1000 + i%100*30 + p))})
			}
			failed = conn.Flush()
			commits++
		}
	})
	var all []running
	for range 3 {
		for _, r := range methods() {
			opt := nat.Options{Methods: []string{r.nft}, Audit: time.Second, LegacyPoll: time.Hour}
			if r.filter {
				opt.Filter = w.filter()
			}
			src, f, end := w.start(opt)
			all = append(all, running{r.String(), src, f, end})
			time.Sleep(200 * time.Millisecond)
		}
	}
	time.Sleep(2 * time.Second)
	close(stop)
	writer.Wait()
	if failed != nil {
		t.Fatal(failed)
	}
	var want []string
	last := (commits - 1) % 100 * 30
	for p := range 30 {
		want = append(want, fmt.Sprintf("tcp 0.0.0.0:%d [ip t] 10.3.0.1:%d", 1000+last+p, 1000+last+p))
	}
	for _, x := range all {
		expect(t, x.feed, x.method, want...)
		x.stop()
		if st := x.src.Status(); st.Drift != 0 {
			t.Errorf("%s: an audit repaired %d objects", x.method, st.Drift)
		}
	}
	t.Logf("%d commits", commits)
}

// replacer replaces the legacy nat table of a namespace by itself, as
// iptables-legacy does.
type replacer struct {
	fd                int
	request, counters []byte
}

// inside runs f on a thread that is in the namespace, because the hooks tell the
// caller's.
func (w *world) inside(t testing.TB, f func() error) {
	t.Helper()
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		ns, err := os.Open(w.path())
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			_ = ns.Close()
		}
		if err == nil {
			err = f()
		}
		errc <- err
	}()
	if err := <-errc; err != nil {
		t.Fatal(err)
	}
}

func (r *replacer) open() (err error) {
	if r.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
		return err
	}
	get := func(opt int, b []byte) error {
		n := uint32(len(b))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(r.fd), unix.SOL_IP, uintptr(opt),
			uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
		if errno != 0 {
			return errno
		}
		return nil
	}
	// struct ipt_getinfo: name[32], valid_hooks, hook_entry[5], underflow[5], num_entries, size.
	info := make([]byte, 84)
	copy(info, "nat")
	if err := get(64, info); err != nil {
		return err
	}
	entries, size := binary.NativeEndian.Uint32(info[76:]), binary.NativeEndian.Uint32(info[80:])
	blob := make([]byte, 40+int(size))
	copy(blob, "nat")
	binary.NativeEndian.PutUint32(blob[32:], size)
	if err := get(65, blob); err != nil {
		return err
	}
	// struct ipt_replace: name[32], valid_hooks, num_entries, size, hook_entry[5],
	// underflow[5], num_counters, counters, entries.
	r.counters = make([]byte, 16*int(entries)) // the kernel writes the old ones there
	r.request = make([]byte, 96)
	copy(r.request, "nat")
	copy(r.request[32:], info[32:36])
	binary.NativeEndian.PutUint32(r.request[36:], entries)
	binary.NativeEndian.PutUint32(r.request[40:], size)
	copy(r.request[44:], info[36:76])
	binary.NativeEndian.PutUint32(r.request[84:], entries)
	r.request = append(r.request, blob[40:]...)
	return nil
}

func (r *replacer) replace() error {
	binary.NativeEndian.PutUint64(r.request[88:], uint64(uintptr(unsafe.Pointer(&r.counters[0]))))
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(r.fd), unix.SOL_IP, 64,
		uintptr(unsafe.Pointer(&r.request[0])), uintptr(len(r.request)), 0)
	runtime.KeepAlive(r.counters)
	if errno != 0 {
		return errno
	}
	return nil
}

// A legacy table that is replaced a thousand times a second is not read a
// thousand times a second, and the last state is read.
func TestLegacyReplacementStorm(t *testing.T) {
	w := newWorld(t)
	dnat := func(port int) {
		w.run("", "iptables-legacy", "-w", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", fmt.Sprint(port), "-j", "DNAT", "--to-destination", "10.0.0.1")
	}
	for p := range 50 {
		dnat(100 + p)
	}
	src, f, _ := w.start(nat.Options{LegacyPoll: time.Hour, Wake: w.legacyHook()})
	eventually(t, "a first set", f.ready)
	before := src.Status().LegacyReads
	replaced := uint64(0)
	w.inside(t, func() error {
		r := &replacer{}
		if err := r.open(); err != nil {
			return err
		}
		defer func() { _ = unix.Close(r.fd) }()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); <-tick.C {
			if err := r.replace(); err != nil {
				return err
			}
			replaced++
		}
		return nil
	})
	eventually(t, "a read", func() bool { return src.Status().LegacyReads > before })
	reads := src.Status().LegacyReads - before
	t.Logf("%d replacements, %d reads", replaced, reads)
	if reads > replaced {
		t.Errorf("%d reads for %d replacements", reads, replaced)
	}
	dnat(99)
	eventually(t, "the last replacement", func() bool { return len(f.lines()) == 51 && f.staleNow() == nil })
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.drops) > 0 {
		t.Errorf("withdrawn %v", f.drops)
	}
}

// dnatRule redirects a TCP port.
func dnatRule(p uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(p)},
		&expr.Immediate{Register: 1, Data: []byte{10, 3, 0, 1}},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1},
	}
}
