// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/windows"

	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/port"
)

const (
	ownersAge   = 200 * time.Millisecond // how long Vet uses the tables that it read
	netshTime   = 10 * time.Second
	maxTableTry = 5 // the table may grow after its size was read
)

func systemHolders() HolderFinder {
	helper := windows.NewLazySystemDLL("iphlpapi.dll")
	return &windowsHolders{
		tcp: helper.NewProc("GetExtendedTcpTable"), udp: helper.NewProc("GetExtendedUdpTable"), reserved: netshReserved,
	}
}

// windowsHolders asks the IP helper API for the holders of ports, and netsh for the
// ports that Windows reserves.
type windowsHolders struct {
	tcp, udp *windows.LazyProc
	reserved func(context.Context, Socket) ([]PortRange, error)

	mu   sync.Mutex
	read time.Time
	last []owned
}

// owned is a socket that a process holds.
type owned struct {
	protocol port.Protocol
	addr     netip.AddrPort
	pid      int
}

// excludes reports whether another process has a socket that excludes s.
func (o owned) excludes(s Socket) bool {
	return o.protocol == s.Protocol && o.pid != os.Getpid() && excludes(o.addr, s.Addr)
}

// Vet implements Vetter: on Windows two processes can bind one port, one at the
// wildcard and one at an address, and the latter gets the connections.
func (w *windowsHolders) Vet() func(Socket) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.read) > ownersAge {
		all, err := w.owners()
		if err != nil {
			return func(Socket) bool { return false } // bind may still fail
		}
		w.last, w.read = all, time.Now()
	}
	last := w.last
	return func(s Socket) bool {
		return slices.ContainsFunc(last, func(o owned) bool { return o.excludes(s) })
	}
}

// Holders implements HolderFinder.
func (w *windowsHolders) Holders(ctx context.Context, sockets []Socket) (map[Socket]Holder, error) {
	all, err := w.owners()
	out := make(map[Socket]Holder)
	ranges := make(map[Socket][]PortRange) // by protocol and family: address and port are not set
	for _, s := range sockets {
		for _, o := range all {
			if o.excludes(s) {
				out[s] = Holder{PID: o.pid, Name: processName(o.pid)}
				break
			}
		}
		if _, known := out[s]; known {
			continue
		}
		kind := Socket{s.Protocol, netip.AddrPortFrom(netip.IPv6Unspecified(), 0)}
		if s.Addr.Addr().Is4() {
			kind.Addr = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
		}
		list, asked := ranges[kind]
		if !asked {
			var rerr error
			list, rerr = w.reserved(ctx, kind)
			ranges[kind], err = list, errors.Join(err, rerr)
		}
		for _, r := range list {
			if r.Contains(s.Addr.Port()) {
				out[s] = Holder{Name: "Windows", Reserved: r}
			}
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	return out, err
}

// owners reads all four tables.
func (w *windowsHolders) owners() ([]owned, error) {
	var all []owned
	for _, t := range []struct {
		proc   *windows.LazyProc
		family uint32
		class  uint32 // TCP_TABLE_OWNER_PID_LISTENER, UDP_TABLE_OWNER_PID
		layout ownerTable
		proto  port.Protocol
	}{
		{w.tcp, windows.AF_INET, 3, tcp4Owners, port.TCP}, {w.tcp, windows.AF_INET6, 3, tcp6Owners, port.TCP},
		{w.udp, windows.AF_INET, 1, udp4Owners, port.UDP}, {w.udp, windows.AF_INET6, 1, udp6Owners, port.UDP},
	} {
		b, err := readTable(t.proc, t.family, t.class)
		if err == nil {
			err = t.layout.parse(b, func(addr netip.AddrPort, pid int) { all = append(all, owned{t.proto, addr, pid}) })
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", t.proc.Name, err)
		}
	}
	return all, nil
}

// readTable calls GetExtendedTcpTable or GetExtendedUdpTable.
func readTable(proc *windows.LazyProc, family, class uint32) ([]byte, error) {
	if err := proc.Find(); err != nil {
		return nil, err
	}
	size := uint32(16 << 10)
	for range maxTableTry {
		b := make([]byte, size)
		code, _, _ := proc.Call(uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0, uintptr(family), uintptr(class), 0)
		switch errno := syscall.Errno(code); {
		case errno == 0:
			return b, nil
		case !errors.Is(errno, windows.ERROR_INSUFFICIENT_BUFFER):
			return nil, errno
		}
		size += size / 4
	}
	return nil, windows.ERROR_INSUFFICIENT_BUFFER
}

// processName returns the file name of a process's program, empty if access to it
// is denied.
func processName(pid int) string {
	if pid == 4 {
		return "System" // the kernel: HTTP.sys and the like
	}
	h, err := windows.OpenProcess(windows.PROCESS_QUERY_LIMITED_INFORMATION, false, uint32(pid))
	if err != nil {
		return ""
	}
	defer func() { _ = windows.CloseHandle(h) }()
	name := make([]uint16, windows.MAX_LONG_PATH)
	n := uint32(len(name))
	if err := windows.QueryFullProcessImageName(h, 0, &name[0], &n); err != nil {
		return ""
	}
	return filepath.Base(windows.UTF16ToString(name[:n]))
}

// netshReserved asks netsh for the ports that Windows reserves.
func netshReserved(ctx context.Context, kind Socket) ([]PortRange, error) {
	netsh, err := trust.Find("netsh.exe")
	if err != nil {
		return nil, err
	}
	family := "ipv6"
	if kind.Addr.Addr().Is4() {
		family = "ipv4"
	}
	ctx, cancel := context.WithTimeout(ctx, netshTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, netsh, "interface", family, "show", "excludedportrange",
		"protocol="+kind.Protocol.String())
	cmd.SysProcAttr = &syscall.SysProcAttr{HideWindow: true, CreationFlags: windows.CREATE_NO_WINDOW}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("netsh: %w", err)
	}
	return parseReserved(bytes.NewReader(out))
}
