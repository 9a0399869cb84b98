// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/netwatch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/sink/hostlink"
	"github.com/fairlead/fairlead/internal/source/demand"
)

// A host asks for nothing unless the configuration lets it, and is told of what waits in the
// guest if it is told of other unpublished ports.
func TestHostForwards(t *testing.T) {
	parse := func(s string) []port.Demand {
		d, err := port.ParseDemand(s)
		if err != nil {
			t.Fatal(err)
		}
		return []port.Demand{d}
	}
	for name, c := range map[string]struct {
		asks, reports bool
		want          string
	}{
		"neither": {false, false, ""}, "asks": {true, false, "host:80/tcp"}, "is told": {false, true, "guest:80/tcp"},
		"both": {true, true, "guest:80/tcp host:80/tcp"},
	} {
		source, err := demand.New(demand.Options{Logger: slog.New(slog.DiscardHandler), Kind: netwatch.Classify})
		if err != nil {
			t.Fatal(err)
		}
		a := &Agent{cfg: config.Agent{HostForwards: c.asks, ReportUnpublished: c.reports}, demand: source}
		var h hostlink.Options
		var l link.Options
		a.takeDemands(&h, &l)
		if l.Demand != c.asks || (h.Demand != nil) != c.asks || (h.Demands != nil) != (c.want != "") {
			t.Errorf("%s: hello %t, taken %t, told %t", name, l.Demand, h.Demand != nil, h.Demands != nil)
		}
		source.Ask(askedByRules, parse("guest:80"))
		if c.asks {
			h.Demand(parse("host:80"))
		}
		var told []string
		if h.Demands != nil {
			for _, w := range h.Demands() {
				told = append(told, w.Port)
				if w.Reason == "" || w.Reason != a.demands("", parse(w.Port)[0]) {
					t.Errorf("%s: %+v", name, w)
				}
			}
		}
		if got := strings.Join(told, " "); got != c.want {
			t.Errorf("%s: told of %q, want %q", name, got, c.want)
		}
	}
}
