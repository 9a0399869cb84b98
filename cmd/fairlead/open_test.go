// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

func TestURLToOpen(t *testing.T) {
	at := func(list ...string) (out []netip.AddrPort) {
		for _, s := range list {
			out = append(out, netip.MustParseAddrPort(s))
		}
		return out
	}
	ports := []status.Publication{
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 80}}, Guest: "dev", State: port.Active, HostAddresses: at("192.0.2.10:8080", "127.0.0.1:8080")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 81}}, Guest: "dev", State: port.Active, HostAddresses: at("[::1]:81")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 82}}, Guest: "dev", State: port.Active, HostAddresses: at("[::]:82", "0.0.0.0:82")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 83}}, Guest: "dev", State: port.Active, HostAddresses: at("192.0.2.10:83")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 84}}, Guest: "dev", State: port.Conflict, Reason: "held by nginx"},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 85}}, Guest: "dev", State: port.Active, HostAddresses: at("127.0.0.1:85")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 85}}, Guest: "build", GuestName: "builder", State: port.Active, HostAddresses: at("127.0.0.1:10085")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 86}}, Guest: "dev", State: port.Active, Lost: true, HostAddresses: at("127.0.0.1:10086"), Reason: "at 127.0.0.1:10086 instead of host port 86, which was in use"},
		{Fact: port.Fact{Key: port.Key{Protocol: port.UDP, Port: 87}}, Guest: "dev", State: port.Active, HostAddresses: at("127.0.0.1:87")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv6Loopback(), Port: 88}}, State: port.Active, HostAddresses: at("[::1]:88")},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 88}}, State: port.Active, HostAddresses: at("127.0.0.1:88")},
	}
	for _, c := range []struct {
		n     uint16
		guest string
		https bool
		want  string
	}{
		{80, "", false, "http://127.0.0.1:8080/"},
		{80, "", true, "https://127.0.0.1:8080/"},
		{81, "", false, "http://[::1]:81/"},
		{82, "", false, "http://127.0.0.1:82/"},
		{83, "", false, "http://192.0.2.10:83/"},
		{84, "", false, "84/tcp is not reachable: held by nginx"},
		{85, "", false, "85/tcp is served by several guests: choose one with --guest: dev, build"},
		{85, "dev", false, "http://127.0.0.1:85/"},
		{85, "builder", false, "http://127.0.0.1:10085/"},
		{86, "", false, "86/tcp is not reachable: guest dev is not connected, or has not reported it since it restarted (`fairlead explain 86/tcp` says more)"},
		{10085, "", false, "10085/tcp is not reachable: nothing serves it, and 10085 is the host port of guest port 85/tcp: `fairlead open 85`"},
		{10085, "builder", false, "10085/tcp is not reachable: nothing serves it, and 10085 is the host port of guest port 85/tcp: `fairlead open 85`"},
		{10085, "dev", false, `10085/tcp is not reachable: no guest "dev" serves it (`},
		{80, "typo", false, `80/tcp is not reachable: no guest "typo" serves it (`},
		{87, "", false, "87/tcp is not reachable: nothing serves it"},
		{88, "", false, "http://127.0.0.1:88/"},
	} {
		got, err := reachable(status.List{Publications: ports}, port.Slot{Protocol: port.TCP, Port: c.n}, c.guest)
		text := pageURL(got, c.https)
		if err != nil {
			text = err.Error()
		}
		if !strings.HasPrefix(text, c.want) {
			t.Errorf("%d %s: %s, want %s", c.n, c.guest, text, c.want)
		}
	}
}

func TestBrowsers(t *testing.T) {
	for system, want := range map[string]string{
		"windows": "rundll32.exe url.dll,FileProtocolHandler", "darwin": "/usr/bin/open", "linux": "xdg-open", "freebsd": "xdg-open", "wsl": "wslview, xdg-open",
	} {
		var got []string
		for _, argv := range browsers(system, system == "wsl") {
			got = append(got, strings.Join(argv, " "))
		}
		if !slices.Equal(got, strings.Split(want, ", ")) {
			t.Errorf("%s: %q, want %s", system, got, want)
		}
	}
}
