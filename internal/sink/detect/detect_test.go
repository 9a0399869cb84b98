// SPDX-License-Identifier: Apache-2.0

package detect

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
)

func names(sinks []config.Sink) string {
	var out []string
	for _, s := range sinks {
		out = append(out, s.String())
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
		{"Rancher Desktop", facts{wsl: true, mode: "nat", gvproxy: rancherSwitch, product: "Rancher Desktop", wslProxy: true},
			"gvproxy=http://gateway.rancher-desktop.internal:80,vtunnel=unix:///run/wsl-proxy.sock", "Rancher Desktop"},
		{"Rancher Desktop without its gvproxy", facts{wsl: true, mode: "nat", wslProxy: true},
			"vtunnel=unix:///run/wsl-proxy.sock", "Rancher Desktop"},
		{"Podman machine", facts{gvproxy: podmanGateway, product: "Podman machine"},
			"gvproxy=http://gateway.containers.internal", "Podman machine"},
	} {
		t.Run(c.name, func(t *testing.T) {
			sinks, why := choose(c.f)
			if got := names(sinks); got != c.want || !strings.Contains(why, c.why) {
				t.Errorf("chose %s because %q, want %s because of %q", got, why, c.want, c.why)
			}
			for _, s := range sinks { // what is chosen can also be configured
				if _, err := config.ParseSink(s.String()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestGather(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "proc/sys/kernel"), 0o755); err != nil {
		t.Fatal(err)
	}
	none := system{
		root: root,
		get:  func(context.Context, string) bool { return false },
		run:  func(context.Context, string, ...string) (string, error) { return "", errors.New("not found") },
	}
	if f := gather(t.Context(), none); f != (facts{}) {
		t.Errorf("an empty machine: %+v", f)
	}
	release := []byte("6.6.87.2-microsoft-standard-WSL2\n")
	if err := os.WriteFile(filepath.Join(root, "proc/sys/kernel/osrelease"), release, 0o644); err != nil {
		t.Fatal(err)
	}
	if f := gather(t.Context(), none); f != (facts{wsl: true}) {
		t.Errorf("WSL without wslinfo: %+v", f)
	}
	if err := os.MkdirAll(filepath.Join(root, "run"), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(root, wslProxyPath))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	all := none
	all.get = func(_ context.Context, url string) bool { return strings.HasPrefix(url, rancherSwitch) }
	all.run = func(_ context.Context, name string, args ...string) (string, error) {
		return "mirrored\n", nil
	}
	want := facts{wsl: true, mode: "mirrored", gvproxy: rancherSwitch, product: "Rancher Desktop", wslProxy: true}
	if f := gather(t.Context(), all); f != want {
		t.Errorf("Rancher Desktop: %+v, want %+v", f, want)
	}
}
