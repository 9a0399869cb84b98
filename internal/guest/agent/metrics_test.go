// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"maps"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
)

// natSource is a source of NAT rules with hooks.
type natSource struct{ method string }

func (natSource) Name() string                             { return "nat" }
func (natSource) Run(context.Context, registry.Feed) error { return nil }
func (s natSource) Status() nat.Status                     { return nat.Status{Method: s.method} }
func (natSource) Hooks() []kernel.Method {
	return []kernel.Method{{Capability: nat.Capability, Name: kernel.MethodKprobe}}
}

func TestMethodsOfSourcesAreCounted(t *testing.T) {
	o, err := observer.New(observer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for method, want := range map[string]map[string]string{
		"":                {"legacy-tables": "kprobe"},
		nat.MethodNetlink: {"legacy-tables": "kprobe", "nftables": "nfnetlink"},
	} {
		a := &Agent{observer: o, sources: []Source{natSource{method}}}
		if got := a.methods(); !maps.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
}
