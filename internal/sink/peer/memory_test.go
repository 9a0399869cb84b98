// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
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
