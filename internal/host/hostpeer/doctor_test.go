// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
)

func TestRelayOfWSL(t *testing.T) {
	for text, want := range map[string]bool{
		"":                         true,
		"[wsl2]\r\nmemory=4GB\r\n": true,
		"[wsl2]\r\nlocalhostForwarding=false\r\n":      false,
		"\ufeff[WSL2]\n localhostforwarding = False\n": false,
		"[wsl2]\nnetworkingMode=mirrored\n":            false,
		"[experimental]\nlocalhostForwarding=false\n":  true,
		"[wsl2]\n#localhostForwarding=false\n":         true,
	} {
		if got, err := relays(strings.NewReader(text)); got != want || err != nil {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

// Each port that is not open is counted, by its state.
func TestPortsThatAreNotOpen(t *testing.T) {
	var f doctor.HostFacts
	var l status.List
	for i, state := range []port.State{port.Active, port.Pending, port.Denied, port.Conflict, port.Failed} {
		l.Publications = append(l.Publications, status.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 80 + uint16(i)}}, Outcomes: []status.Outcome{{State: state, Reason: "why"}}})
	}
	describeList(&f, l)
	if !slices.Equal(f.Conflicts, []doctor.Conflict{{Port: "83/tcp", Reason: "why"}}) || !slices.Equal(f.Failed, []doctor.Conflict{{Port: "84/tcp", Reason: "why"}}) {
		t.Errorf("%+v, %+v", f.Conflicts, f.Failed)
	}
}

// Doctor looks at the configuration that the running host peer reads, unless another one is named.
func TestConfigurationOfTheRunningHost(t *testing.T) {
	for name, reports := range map[string]bool{"reports its settings": true, "is named": false} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			file, control := filepath.Join(t.TempDir(), "host.yaml"), filepath.Join(dir, "s")
			if err := os.WriteFile(file, []byte("metricsAddr: 0.0.0.0:9464\nrules:\n- {match: {ports: 1}, action: deny}\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			fs := pflag.NewFlagSet("host", pflag.ContinueOnError)
			new(config.Host).Flags(fs)
			cfg, err := config.LoadHost(file, fs, nil)
			if err != nil {
				t.Fatal(err)
			}
			h, err := host.New(host.Options{})
			if err != nil {
				t.Fatal(err)
			}
			o := status.Options{Provider: provider{host: h}, Role: "host", Level: new(loglevel.Levels), Logger: slog.New(slog.DiscardHandler)}
			if reports {
				o.Settings, o.ConfigFile = cfg.Settings, cfg.File()
			}
			ln, err := status.ListenControl(control)
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			var served sync.WaitGroup
			served.Go(func() { _ = status.NewServer(o).Serve(ctx, ln, true) })
			defer served.Wait()
			defer stop()

			named := file
			if reports {
				named = ""
			}
			f := Facts(t.Context(), named, control)
			if f.Running == "" || f.Config.File != file || f.Config.Rules != 1 {
				t.Errorf("running %q, %+v, want %s with a rule", f.Running, f.Config, file)
			}
		})
	}
}

// A port that is open in one family and in conflict in the other is a conflict, once: clients may
// get another program. One that fails in one family is open, as on a host without IPv6.
func TestPartialConflict(t *testing.T) {
	outcome := func(s port.State, at string) status.Outcome {
		return status.Outcome{State: s, HostAddress: at, Reason: "about " + at}
	}
	var f doctor.HostFacts
	describeList(&f, status.List{Publications: []status.Publication{
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 80}}, State: port.Active, Outcomes: []status.Outcome{outcome(port.Active, "127.0.0.1:80"), outcome(port.Conflict, "[::1]:80")}},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 81}}, State: port.Conflict, Outcomes: []status.Outcome{outcome(port.Conflict, "127.0.0.1:81"), outcome(port.Conflict, "[::1]:81")}},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 82}}, State: port.Active, Outcomes: []status.Outcome{outcome(port.Active, "127.0.0.1:82"), outcome(port.Failed, "[::1]:82")}},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 83}}, State: port.Failed, Outcomes: []status.Outcome{outcome(port.Failed, "127.0.0.1:83"), outcome(port.Failed, "[::1]:83")}},
		{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Port: 84}}, State: port.Conflict, Outcomes: []status.Outcome{outcome(port.Failed, "127.0.0.1:84"), outcome(port.Conflict, "[::1]:84")}},
	}})
	want := []doctor.Conflict{{Port: "80/tcp", Reason: "about [::1]:80"}, {Port: "81/tcp", Reason: "about 127.0.0.1:81"}, {Port: "84/tcp", Reason: "about [::1]:84"}}
	failed := []doctor.Conflict{{Port: "83/tcp", Reason: "about 127.0.0.1:83"}}
	if !slices.Equal(f.Conflicts, want) || !slices.Equal(f.Failed, failed) {
		t.Errorf("conflicts %v, want %v; failed %v, want %v", f.Conflicts, want, f.Failed, failed)
	}
}

// The host peer keeps its own ports from publications.
func TestOwnListenersAreHeld(t *testing.T) {
	at := netip.MustParseAddrPort
	cfg := config.Host{Names: config.Names{HTTP: []netip.AddrPort{at("127.0.0.1:80")}, TLS: []netip.AddrPort{at("[::1]:443")}}}
	cfg.WebAddr, cfg.MetricsAddr = "127.0.0.1:7420", ":9464"
	cfg.Serving.At = config.Endpoint{Listen: true, Server: "localhost:8443"}
	var got []netip.AddrPort
	for _, h := range held(&cfg) {
		got = append(got, h.At)
	}
	want := []netip.AddrPort{at("127.0.0.1:80"), at("[::1]:443"), at("127.0.0.1:7420"), at("[::]:9464"), at("127.0.0.1:8443")}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	none := new(config.Host)
	none.MetricsAddr = "127.0.0.1:0"
	if got := held(none); len(got) > 0 {
		t.Errorf("held without ports: %v", got)
	}
}
