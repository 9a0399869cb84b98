// SPDX-License-Identifier: Apache-2.0

package detect

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
)

func names(sinks []Sink) string {
	var out []string
	for _, s := range sinks {
		out = append(out, config.Sink(s).String())
	}
	return strings.Join(out, ",")
}

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		name      string
		f         facts
		want, why string
	}{
		{"a plain VM", facts{}, "hostlink", "host peer"},
		{"WSL in NAT mode", facts{wsl: true, mode: "nat"}, "listener", "relay"},
		{"WSL in mirrored mode", facts{wsl: true, mode: "mirrored"}, "listener", "mirrored"},
		{"WSL in virtioproxy mode", facts{wsl: true, mode: "virtioproxy"}, "listener", "virtioproxy"},
		{"WSL without networking", facts{wsl: true, mode: "none"}, "hostlink", "no relay"},
		{"WSL of unknown mode", facts{wsl: true}, "listener", "unknown"},
		{"WSL with a host peer", facts{wsl: true, mode: "nat", link: true}, "listener,hostlink", "a link is configured"},
		{"Rancher Desktop", facts{wsl: true, mode: "nat", gvproxy: "http://192.168.127.1:80", product: "Rancher Desktop", wslProxy: true},
			"gvproxy=http://192.168.127.1:80,vtunnel=unix:///run/wsl-proxy.sock", "Rancher Desktop"},
		{"Rancher Desktop without its gvproxy", facts{wsl: true, mode: "nat", wslProxy: true},
			"vtunnel=unix:///run/wsl-proxy.sock", "Rancher Desktop"},
		{"Podman machine", facts{gvproxy: "http://192.168.127.1:80", product: "Podman machine"},
			"gvproxy=http://192.168.127.1:80", "Podman machine"},
	} {
		t.Run(c.name, func(t *testing.T) {
			sinks, why := choose(c.f)
			if got := names(sinks); got != c.want || !strings.Contains(why, c.why) {
				t.Errorf("chose %s because %q, want %s because of %q", got, why, c.want, c.why)
			}
			for _, s := range sinks { // what is chosen can also be configured
				if _, err := config.ParseSink(config.Sink(s).String()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// guest is a file system of a guest, and what answers at URLs.
type guest struct {
	root    string
	answers map[string]string
	asked   []string
}

const usual = "http://192.168.127.1:80/services/forwarder/all"

// gateway is a routing table with that default gateway, in the kernel's byte order.
func gateway(text string) string {
	a := netip.MustParseAddr(text).As4()
	return "Iface Destination Gateway Flags RefCnt Use Metric Mask\neth0 00000000 " +
		fmt.Sprintf("%08X", binary.NativeEndian.Uint32(a[:])) + " 0003 0 0 0 00000000 0 0 0\n"
}

func newGuest(t *testing.T, files map[string]string) *guest {
	t.Helper()
	g := &guest{root: t.TempDir(), answers: make(map[string]string)}
	g.write(t, files)
	return g
}

func (g *guest) write(t *testing.T, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(g.root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
}

func (g *guest) detector() *Detector {
	return &Detector{system: system{
		root: g.root,
		get: func(_ context.Context, url string) ([]byte, error) {
			g.asked = append(g.asked, url)
			text, ok := g.answers[url]
			if !ok {
				return nil, errors.New("no answer")
			}
			return []byte(text), nil
		},
		mode: func(context.Context) (string, error) { return "", errors.New("not found") },
	}}
}

// Who answers is believed only with the product's mark, as the default gateway, and with
// a list of forwards.
func TestGvproxyNeedsProof(t *testing.T) {
	podman, hosts := "etc/containers/podman-machine", "etc/hosts"
	const list, route = `[{"local":":2222","remote":"192.168.127.2:22","protocol":"tcp"}]`, "proc/net/route"
	for _, c := range []struct {
		name   string
		files  map[string]string
		answer string
		want   string // product, or why none
	}{
		{"Podman machine", map[string]string{podman: "qemu", route: gateway("192.168.127.1")}, list, "Podman machine"},
		{"Podman machine 6", map[string]string{"etc/podman-machine": "qemu", route: gateway("192.168.127.1")}, "[]", "Podman machine"},
		{"Rancher Desktop", map[string]string{hosts: "192.168.127.1 gateway.rancher-desktop.internal\n", route: gateway("192.168.127.1")}, list, "Rancher Desktop"},
		{"no product", map[string]string{route: gateway("192.168.127.1")}, list, "neither"},
		{"no gateway", map[string]string{podman: "qemu"}, list, "no default gateway"},
		{"a name elsewhere", map[string]string{hosts: "192.168.127.1 gateway.rancher-desktop.internal\n", route: gateway("10.0.0.1")}, list, "the default gateway is 10.0.0.1"},
		{"Podman's name elsewhere", map[string]string{podman: "qemu", hosts: "10.0.0.9 gateway.containers.internal\n", route: gateway("192.168.127.1")}, list, "is 10.0.0.9 in /etc/hosts"},
		{"captive portal", map[string]string{podman: "qemu", route: gateway("192.168.127.1")}, "<html>Log in</html>", "lists no forwards"},
		{"null", map[string]string{podman: "qemu", route: gateway("192.168.127.1")}, "null", "lists no forwards"},
		{"another list", map[string]string{podman: "qemu", route: gateway("192.168.127.1")}, `[{"id":1}]`, "lists something else"},
		{"nobody", map[string]string{podman: "qemu", route: gateway("192.168.127.1")}, "", "no answer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGuest(t, c.files)
			if c.answer != "" {
				g.answers[usual] = c.answer
			}
			url, product, err := g.detector().Gvproxy(t.Context())
			if err == nil && (product != c.want || url != "http://192.168.127.1:80") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%q at %q, %v; want %q", product, url, err, c.want)
			}
			if g := g.asked; c.want == "neither" && len(g) > 0 {
				t.Errorf("asked %q without the product's mark", g)
			}
		})
	}
}

// A gvproxy that is away for a while stays proved; one whose place another program took
// does not.
func TestProofIsLost(t *testing.T) {
	g := newGuest(t, map[string]string{"etc/podman-machine": "qemu", "proc/net/route": gateway("192.168.127.1")})
	d := g.detector()
	proved := func(want bool, when string) {
		t.Helper()
		if _, _, err := d.Gvproxy(t.Context()); (err == nil) != want {
			t.Errorf("%s: %v", when, err)
		}
	}
	proved(false, "before it answered")
	g.answers[usual] = "[]"
	proved(true, "when it answers")
	delete(g.answers, usual)
	proved(true, "while it is away")
	g.answers[usual] = "<html>"
	proved(false, "when a portal answers")
	delete(g.answers, usual)
	proved(false, "when nobody answers after that")
	g.answers[usual] = "[]"
	proved(true, "when it is back")
	g.write(t, map[string]string{"proc/net/route": ""})
	proved(true, "without a network")
	g.write(t, map[string]string{"proc/net/route": gateway("10.0.0.1")})
	proved(false, "in another network")
	g.write(t, map[string]string{"proc/net/route": ""})
	proved(false, "without a network after that")
}

func TestSinksOfAGuest(t *testing.T) {
	g := newGuest(t, nil)
	want := func(sinks, fallback string) {
		t.Helper()
		if got := g.detector().Sinks(t.Context()); names(got.Sinks) != sinks || got.Fallback.Name != fallback {
			t.Errorf("chose %s, fallback %q, because %q, want %s, fallback %q", names(got.Sinks), got.Fallback.Name, got.Why, sinks, fallback)
		}
	}
	hosts := map[string]string{"etc/hosts": "192.168.127.1 gateway.rancher-desktop.internal\n", "proc/net/route": gateway("192.168.127.1")}
	want("hostlink", "")
	g.write(t, map[string]string{"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n"})
	want("listener", "listener") // without wslinfo
	g.write(t, hosts)
	want("listener", "listener") // gvproxy does not answer yet
	g.answers[usual] = "[]"
	want("gvproxy=http://192.168.127.1:80", "listener")
	delete(g.answers, usual)
	if err := os.MkdirAll(filepath.Join(g.root, "run"), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(g.root, wslProxyPath))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	want("vtunnel=unix:///run/wsl-proxy.sock", "")
	g.answers[usual] = "[]"
	want("gvproxy=http://192.168.127.1:80,vtunnel=unix:///run/wsl-proxy.sock", "")
}
