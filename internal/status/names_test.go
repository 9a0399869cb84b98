// SPDX-License-Identifier: Apache-2.0

package status

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/names"
)

func TestWriteNames(t *testing.T) {
	var b strings.Builder
	err := WriteNames(&b, names.Report{
		Domain: "localhost",
		Listeners: []names.Listener{
			{Protocol: "http", Address: netip.MustParseAddrPort("127.0.0.1:80"), Error: "127.0.0.1:80 is in use"},
			{Protocol: "tls", Address: netip.MustParseAddrPort("127.0.0.1:443"), Open: true},
		},
		Names: []names.Entry{
			{Names: []string{"a-b.vm.localhost"}, Ambiguous: []string{"a-b.localhost"}, Kind: port.OwnerContainer, OwnerName: "a\x1b[31mb", Guest: "vm", Ports: []uint16{80, 443}},
			{Names: []string{}, Ambiguous: []string{"web.localhost", "web.default.localhost"}, Kind: port.OwnerService, OwnerName: "web", Namespace: "default", Guest: "vm", Ports: []uint16{30080}},
		},
	}, Style{})
	if err != nil {
		t.Fatal(err)
	}
	want := `NAME              PORTS   KIND       OWNER         GUEST
a-b.vm.localhost  80,443  container  "a\x1b[31mb"  vm
-                 30080   service    default/web   vm
"a-b.localhost: others than a\x1b[31mb have it, too"
web.localhost, web.default.localhost: others than web have it, too
http names are not served: 127.0.0.1:80 is in use
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	b.Reset()
	if err := WriteNames(&b, names.Report{}, Style{}); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); !strings.Contains(got, "No container") || !strings.Contains(got, "--names 127.0.0.1:80") {
		t.Errorf("without any: %q", got)
	}
}
