// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// A host peer that cannot open one of its listeners leaves none open.
func TestNoListenerIsLeftOpen(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = busy.Close() }()
	for _, flag := range []string{"--web-addr", "--metrics-addr"} {
		cfg := config.DefaultHost()
		cfg.Control = filepath.Join(t.TempDir(), "run", "s")
		cfg.LinkToken = filepath.Join(t.TempDir(), "token")
		var open []string
		for _, addr := range []*string{&cfg.WebAddr, &cfg.MetricsAddr} {
			*addr = fmt.Sprintf("127.0.0.1:%d", ports.Free(t))
			open = append(open, *addr)
		}
		if flag == "--web-addr" {
			cfg.WebAddr = busy.Addr().String()
		} else {
			cfg.MetricsAddr = busy.Addr().String()
		}
		d, err := New(cfg, slog.New(slog.DiscardHandler), new(loglevel.Levels))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Run(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "choose another "+flag) {
			t.Errorf("%s: %v", flag, err)
		}
		for _, addr := range open {
			l, err := net.Listen("tcp", addr)
			if err != nil {
				t.Errorf("%s: left open: %v", flag, err)
				continue
			}
			_ = l.Close()
		}
	}
}

// A reload names the settings that need a restart.
func TestReloadNamesWhatWaits(t *testing.T) {
	load := func(text string) *config.Host {
		file := filepath.Join(t.TempDir(), "host.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg, err := config.LoadHost(file, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return &cfg
	}
	for _, c := range []struct{ before, after, want string }{
		{"", "bind: loopback\nrules: [{match: {ports: 80}, action: deny}]\n", ""},
		{"", "grace: 1s\n", "grace"},
		{"grace: 1s\n", "grace: 1s\n", ""},
	} {
		d := &Daemon{cfg: *load(c.before)}
		if got := strings.Join(d.waiting(load(c.after)), ","); got != c.want {
			t.Errorf("%q to %q: waiting: %q, want %q", c.before, c.after, got, c.want)
		}
	}
}
