// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
)

// The host learns of ports that it must not open, and of NAT rules, only as far as the
// configuration lets it.
func TestReportUnpublished(t *testing.T) {
	for _, report := range []bool{true, false} {
		cfg := config.DefaultAgent()
		cfg.ReportUnpublished = report
		a := &Agent{cfg: cfg, registry: registry.New(registry.Options{Rules: rules.Empty(rules.Loopback()), Logger: slog.New(slog.DiscardHandler)})}
		var o hostlink.Options
		a.reportUnpublished(&o)
		if ports, rules := o.Unpublished != nil, o.Unread != nil; ports != report || rules != report {
			t.Errorf("reportUnpublished %v: ports are reported: %v, NAT rules: %v", report, ports, rules)
		}
	}
}
