// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
)

// The observer accepts every interval that the configuration accepts.
func TestConfiguredIntervalsAccepted(t *testing.T) {
	for _, set := range [][2]string{
		{"AUDIT_INTERVAL", "0"}, {"AUDIT_INTERVAL", "10s"}, {"AUDIT_INTERVAL", "24h"},
		{"POLL_INTERVAL", "10ms"}, {"POLL_INTERVAL", "1h"},
	} {
		cfg, err := config.LoadAgent("", nil, func(name string) (string, bool) {
			if name != "FAIRLEAD_"+set[0] {
				return "", false
			}
			return set[1], true
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := (&Agent{cfg: cfg, log: slog.New(slog.DiscardHandler)}).wireSources(); err != nil {
			t.Errorf("%s %s: %v", set[0], set[1], err)
		}
	}
}

// A reload names what differs from what runs, and takes rights away.
func TestReload(t *testing.T) {
	const publishes = "publish: {allow: [{match: {name: web}, guestPorts: 80}]}\n"
	load := func(text string) config.Agent {
		file := filepath.Join(t.TempDir(), "agent.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg, err := config.LoadAgent(file, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	for _, c := range []struct {
		before, after string
		waiting       string
	}{
		{"", "expose: all\nrules: [{match: {ports: 80}, action: deny}]\n", ""},
		{"", "logLevel: debug\nholdDown: 1s\n", "holdDown,logLevel"},
		{"", publishes, "publish.allow"},
		{publishes, "publish: {ports: 9}\n", "publish.ports"},
	} {
		var log strings.Builder
		a := &Agent{cfg: load(c.before), log: slog.New(slog.NewTextHandler(&log, nil))}
		a.wirePublish()
		a.forwards = forwards.NewStore("", a.cfg.Rules, false, a.log, func(*rules.Set) {})
		a.accepted.Store(&a.cfg)
		if a.reload(load(c.before), nil); len(a.waiting()) > 0 || strings.Contains(log.String(), "WARN") {
			t.Errorf("%q: reloaded unchanged: %q\n%s", c.before, a.waiting(), &log)
		}
		a.reload(load(c.after), nil)
		if got := strings.Join(a.waiting(), ","); got != c.waiting {
			t.Errorf("%q to %q: waiting: %s, want %s", c.before, c.after, got, c.waiting)
		}
		if strings.Contains(log.String(), "level=WARN") != (c.waiting != "") || !strings.Contains(log.String(), c.waiting) {
			t.Errorf("%q to %q: want a warning of %q:\n%s", c.before, c.after, c.waiting, &log)
		}
	}
}

// NAT rules have a queue of four times the event buffer, and of no more than the kernel takes.
func TestBufferOfNATRules(t *testing.T) {
	for buffer, want := range map[string]int{"": 8 << 20, "64": 256 << 10, "1048576": 1 << 30} {
		cfg, err := config.LoadAgent("", nil, func(name string) (string, bool) {
			if name != "FAIRLEAD_EVENT_BUFFER" || buffer == "" {
				return "", false
			}
			return buffer, true
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := (&Agent{cfg: cfg}).natOptions().ReceiveBuffer; got != want {
			t.Errorf("with an event buffer of %q KiB: %d bytes, want %d", buffer, got, want)
		}
	}
}
