// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
)

// hexOf writes an address as the kernel does in /proc/net/route.
func hexOf(text string) string {
	a := netip.MustParseAddr(text).As4()
	return fmt.Sprintf("%08X", binary.NativeEndian.Uint32(a[:]))
}

func TestDefaultGateway(t *testing.T) {
	root := t.TempDir()
	table := func(lines ...string) {
		t.Helper()
		text := "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
		for _, l := range lines {
			text += l + "\n"
		}
		dir := filepath.Join(root, "proc/net")
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "route"), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	route := func(to, via, mask string, metric int) string {
		return fmt.Sprintf("eth0\t%s\t%s\t0003\t0\t0\t%d\t%s\t0\t0\t0", hexOf(to), hexOf(via), metric, hexOf(mask))
	}
	for want, lines := range map[string][]string{
		"invalid IP":    {route("192.168.127.0", "0.0.0.0", "255.255.255.0", 0), route("0.0.0.0", "10.0.0.1", "128.0.0.0", 0), "eth0 0", route("0.0.0.0", "0.0.0.0", "0.0.0.0", 0)},
		"192.168.127.1": {route("0.0.0.0", "10.0.0.1", "0.0.0.0", 700), route("0.0.0.0", "192.168.127.1", "0.0.0.0", 5), route("0.0.0.0", "10.0.0.2", "0.0.0.0", 6)},
	} {
		table(lines...)
		if got := DefaultGateway(root).String(); got != want {
			t.Errorf("gateway %s, want %s", got, want)
		}
	}
	if got := DefaultGateway(t.TempDir()); got.IsValid() {
		t.Errorf("without a table: %s", got)
	}
}

func TestHostsFile(t *testing.T) {
	root := t.TempDir()
	text := "127.0.0.1 localhost\n# 10.0.0.1 gw.internal\n192.168.127.1\tother GW.internal # gw2.internal\nnonsense gw.internal\nfd00::1 gw.internal\n"
	if err := errors.Join(os.Mkdir(filepath.Join(root, "etc"), 0o755), os.WriteFile(filepath.Join(root, "etc/hosts"), []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"gw.internal": "[192.168.127.1 fd00::1]", "gw2.internal": "[]", "localhost": "[127.0.0.1]"} {
		if got := fmt.Sprint(HostsFile(root, name)); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}
