// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/netwatch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/sink/hostlink"
	"github.com/fairlead/fairlead/internal/source/demand"
	"github.com/fairlead/fairlead/internal/source/engine"
)

// A host asks for nothing unless the configuration lets it.
func TestHostForwards(t *testing.T) {
	source, err := demand.New(demand.Options{
		Directories: []demand.Directory{new(engine.Table)}, Logger: slog.New(slog.DiscardHandler),
		Kind: func(netip.Addr) (netwatch.Kind, error) { return netwatch.Elsewhere, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, allowed := range []bool{false, true} {
		a := &Agent{cfg: config.Agent{HostForwards: allowed}, demand: source}
		var h hostlink.Options
		var l link.Options
		a.takeDemands(&h, &l)
		if l.Demand != allowed || (h.Demand != nil) != allowed || (h.Demands != nil) != allowed {
			t.Errorf("allowed %t: hello %t, taken %t", allowed, l.Demand, h.Demand != nil)
		}
	}
	var h hostlink.Options
	var l link.Options
	(&Agent{cfg: config.Agent{HostForwards: true}}).takeDemands(&h, &l)
	if l.Demand || h.Demand != nil {
		t.Error("an agent that knows no containers takes them")
	}
	if why := (&Agent{}).demands("", port.Demand{}); why == "" {
		t.Error("it does not say why nothing is found")
	}
}
