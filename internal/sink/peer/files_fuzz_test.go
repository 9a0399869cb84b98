// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

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
