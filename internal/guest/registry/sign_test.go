// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// What a container of Podman opens is a sign for its own user's engine, once.
func TestPodmanSigns(t *testing.T) {
	process := func(name string) port.Owner { return port.Owner{Kind: port.OwnerProcess, Name: name, ID: "7"} }
	for _, c := range []struct {
		name             string
		b                port.Binding
		root, alice, all bool
	}{
		{"conmon", port.Binding{Owner: process("conmon")}, true, false, true},
		{"netavark", port.Binding{Maker: port.MakerNetavark}, true, false, true},
		{"rootlessport", port.Binding{Owner: process("rootlessport-ch"), Hints: port.Hints{User: 1000}}, false, true, true},
		{"pasta", port.Binding{Owner: process("pasta.avx2"), Hints: port.Hints{User: 1000}}, false, true, true},
		{"another user's", port.Binding{Owner: process("rootlessport"), Hints: port.Hints{User: 1001}}, false, false, true},
		{"the host's network", port.Binding{Owner: process("httpd"), Hints: port.Hints{User: 33, Paths: []string{"/machine.slice/libpod-1.scope"}}}, true, false, true},
		{"docker", port.Binding{Owner: process("docker-proxy")}, false, false, false},
		{"a server", port.Binding{Owner: process("sshd")}, false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler)})
			root, alice, all := r.PodmanSigns(0), r.PodmanSigns(1000), r.PodmanSigns(AllUsers)
			f := r.Feed("x")
			c.b.Key = port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}
			c.b.Origin.ID = "1"
			for _, first := range []bool{true, false} {
				f.Replace([]port.Binding{c.b})
				for _, s := range []struct {
					name   string
					signal schedule.Signal
					want   bool
				}{{"root", root, c.root}, {"alice", alice, c.alice}, {"all", all, c.all}} {
					got := false
					select {
					case <-s.signal:
						got = true
					default:
					}
					if got != (s.want && first) {
						t.Errorf("%s: a sign is %v, first %v", s.name, got, first)
					}
				}
			}
		})
	}
}

// Who asks for signs later learns of what is there, and wakes nobody else.
func TestPodmanSignsOfWhatIsThere(t *testing.T) {
	r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler)})
	root := r.PodmanSigns(0)
	r.Feed("x").Replace([]port.Binding{{
		Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}, Origin: port.Origin{ID: "1"},
		Owner: port.Owner{Kind: port.OwnerProcess, Name: "rootlessport", ID: "7"}, Hints: port.Hints{User: 1000},
	}})
	if len(r.PodmanSigns(1000)) != 1 || len(r.PodmanSigns(1001)) != 0 || len(root) != 0 {
		t.Error("a user's container is no sign for that user alone")
	}
}
