// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// complaining warns about each owner.
type complaining struct{}

func (complaining) Decide(p port.Publication) port.Ruling {
	return port.Ruling{Decision: port.Decision{Allow: true}, Warnings: []string{"container \"" + p.Owner.Name + "\": no such label"}}
}

// A label without effect is logged once for each owner, however many ports it has and however
// often these are decided.
func TestLabelsAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	r := New(Options{Rules: complaining{}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	feed := r.Feed("docker")
	feed.Replace(nil)
	bind := func(id string, n uint16) port.Binding {
		b := port.Binding{Origin: port.Origin{ID: id + string(rune('a'+n))}, Owner: port.Owner{Kind: port.OwnerContainer, ID: id, Name: "web"}}
		b.Key = port.Key{Protocol: port.TCP, Address: netip.IPv6Loopback(), Port: 80 + n}
		return b
	}
	feed.Apply(port.Change{Put: []port.Binding{bind("1", 0), bind("1", 1)}})
	r.SetRules(complaining{})
	if n := strings.Count(log.String(), "a label has no effect"); n != 1 {
		t.Errorf("logged %d times: %s", n, log.String())
	}
	feed.Apply(port.Change{Put: []port.Binding{bind("2", 2)}})
	if n := strings.Count(log.String(), "a label has no effect"); n != 2 {
		t.Errorf("of two containers logged %d times: %s", n, log.String())
	}
}

// A port has the demands by which it was asked for, without what is of the source's own.
func TestDemandsOfAPort(t *testing.T) {
	r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler)})
	k := port.Key{Protocol: port.TCP, Address: netip.IPv6Loopback(), Port: 80}
	var set []port.Binding
	for _, id := range []string{"svc/default/web:80/tcp", "svc/default/web:80/tcp endpoints", "web:80/tcp"} {
		set = append(set, port.Binding{Key: k, Origin: port.Origin{Source: port.SourceDemand, ID: id}})
	}
	r.Feed(port.SourceDemand).Replace(set)
	p, _ := r.Publications().View().Get(k)
	if !slices.Equal(p.Demands(), []string{"web:80/tcp", "svc/default/web:80/tcp"}) || p.Source != port.SourceDemand {
		t.Errorf("%q of %q", p.Demands(), p.Source)
	}
}
