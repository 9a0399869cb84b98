// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
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
