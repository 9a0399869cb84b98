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
	addr := addrOf(tcp.Addr(), netip.AddrPort{})
	if !slices.ContainsFunc(all, func(o owned) bool {
		// Wine does not always know the process, and says 0.
		return o.protocol == port.TCP && o.addr == addr && (o.pid == os.Getpid() || o.pid == 0)
	}) {
		t.Errorf("%s of process %d is not among %v", addr, os.Getpid(), all)
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
