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
