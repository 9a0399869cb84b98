// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

func TestSystemHolders(t *testing.T) {
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	want := Holder{PID: os.Getpid(), Name: strings.TrimSpace(string(comm))}
	tcp, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	udp, err := net.ListenUDP("udp6", &net.UDPAddr{IP: net.IPv6loopback})
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	held := Socket{port.TCP, at(lo4, tcp.Addr().(*net.TCPAddr).AddrPort().Port())}
	held6 := Socket{port.UDP, udp.LocalAddr().(*net.UDPAddr).AddrPort()}
	free := Socket{port.TCP, at(lo4, ports.Free(t))}
	got, err := systemHolders().Holders(t.Context(), []Socket{held, held6, free})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[held] != want || got[held6] != want {
		t.Errorf("holders = %v, want %v for %v and %v", got, want, held, held6)
	}
}

func TestHoldersWithoutProc(t *testing.T) {
	if _, err := (procHolders{t.TempDir()}).Holders(t.Context(), []Socket{{port.TCP, at(lo4, 80)}}); err == nil {
		t.Error("no /proc gave no error")
	}
}

const procTCP = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000000000000000 100 0 0 10 0
   1: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0000000000000000 100 0 0 10 0
   2: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 4713 1 0000000000000000 100 0 0 10 0
`

const procTCP6 = `  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4714 1 0000000000000000 100 0 0 10 0
`

func TestHoldersFromFiles(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("thread-self/net/tcp", procTCP)
	write("thread-self/net/tcp6", procTCP6)
	for pid, inode := range map[string]string{"11": "4711", "12": "4712", "13": "4714"} {
		write(pid+"/comm", "p"+pid+"\n")
		if err := os.MkdirAll(filepath.Join(root, pid, "fd"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("socket:["+inode+"]", filepath.Join(root, pid, "fd", "3")); err != nil {
			t.Fatal(err)
		}
	}
	s := func(addr string) Socket { return Socket{port.TCP, netip.MustParseAddrPort(addr)} }
	want := map[Socket]Holder{
		s("127.0.0.1:8080"): {PID: 11, Name: "p11"},
		s("0.0.0.0:8080"):   {PID: 11, Name: "p11"}, // a wildcard has no room beside any address
		s("127.0.0.1:80"):   {PID: 12, Name: "p12"},
		s("[::1]:22"):       {PID: 13, Name: "p13"},
	}
	ask := []Socket{s("127.0.0.2:8080"), s("127.0.0.1:40000"), s("127.0.0.1:22")}
	for k := range want {
		ask = append(ask, k)
	}
	got, err := procHolders{root}.Holders(t.Context(), ask)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Errorf("holders = %v, want %v", got, want)
	}
	for k, h := range want {
		if got[k] != h {
			t.Errorf("holder of %v = %v, want %v", k, got[k], h)
		}
	}
}

// A table that cannot be read is an error beside what the others show: an address without a
// holder may have one.
func TestHoldersWithAnUnreadableTable(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"thread-self/net/tcp6", "11/fd"} { // a directory cannot be read as a table
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "thread-self/net/tcp"), []byte(procTCP), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("socket:[4711]", filepath.Join(root, "11/fd/3")); err != nil {
		t.Fatal(err)
	}
	known := Socket{port.TCP, netip.MustParseAddrPort("127.0.0.1:8080")}
	got, err := procHolders{root}.Holders(t.Context(), []Socket{known, {port.TCP, netip.MustParseAddrPort("[::1]:22")}})
	if err == nil || len(got) != 1 || got[known].PID != 11 {
		t.Errorf("%v, %v", got, err)
	}
}
