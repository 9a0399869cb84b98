// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func TestTablesOfTheIPHelper(t *testing.T) {
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	all, err := systemHolders().(*windowsHolders).owners()
	if err != nil {
		t.Fatal(err)
	}
	want := owned{port.TCP, addrOf(tcp.Addr(), netip.AddrPort{}), os.Getpid()}
	if !slices.Contains(all, want) {
		t.Errorf("%v is not among %d sockets", want, len(all))
	}
}

func TestProcessName(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if got := processName(os.Getpid()); !strings.EqualFold(got, filepath.Base(self)) {
		t.Errorf("our name is %q, want %q", got, filepath.Base(self))
	}
	if got := processName(4); got != "System" {
		t.Errorf("the kernel is %q", got)
	}
}
