// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// A refused host, and a guest that is not connected, are named below the table.
func TestPeersBelowTheTable(t *testing.T) {
	row := published(8080, port.Owner{Kind: port.OwnerProcess, Name: "web"})
	row.HostAddresses = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")}
	row.State, row.Guest = port.Active, "unix:///a"
	lost := row
	lost.Lost = true
	for _, c := range []struct {
		name       string
		list       List
		want, miss []string
	}{
		{
			"refused host", List{Role: "agent", Peers: []Peer{{State: PeerRefused, Since: noon.Add(-4 * time.Second), Error: "the tokens differ", Next: "pair again"}}},
			[]string{"a host was refused 4s ago: the tokens differ; pair again"}, nil,
		},
		{
			"lost guest", List{
				Role: "host", Publications: []Publication{lost},
				Peers:   []Peer{{State: PeerAway, Endpoint: "unix:///a", Name: "vm", Since: noon.Add(-time.Second), Error: "connection refused"}},
				Sources: []Source{{Name: "unix:///a", State: "stale", Error: "connection refused"}},
			},
			[]string{"  lost  ", "guest vm is not connected for 1s: connection refused"}, []string{"active", "source unix:///a"},
		},
		{
			"connected", List{Role: "host", Publications: []Publication{row}, Peers: []Peer{{State: PeerConnected, Endpoint: "unix:///a", Name: "vm"}}},
			[]string{"active"}, []string{"not connected", "refused"},
		},
		{
			"two hosts", List{Role: "agent", Peers: []Peer{{State: PeerConnected, Name: "desk", Error: "desk and laptop", Next: "stop one"}}},
			[]string{"two hosts take this agent from each other: desk and laptop; stop one"}, nil,
		},
		{
			"two guests of one name", List{Role: "host", Peers: []Peer{
				{State: PeerAway, Endpoint: "unix:///a", Name: "vm"}, {State: PeerAway, Endpoint: "unix:///b", Name: "vm"},
			}},
			[]string{"guest unix:///a is", "guest unix:///b is"}, []string{"guest vm"},
		},
		{
			"guests that the configuration names", List{Role: "host", Peers: []Peer{
				{State: PeerAway, Guest: "dev", Endpoint: "unix:///a", Name: "vm"}, {State: PeerAway, Guest: "unix:///b", Endpoint: "unix:///b", Name: "vm"},
			}},
			[]string{"guest dev is", "guest vm is"}, []string{"unix:///"},
		},
	} {
		var b strings.Builder
		if err := WriteTable(&b, c.list, Style{Now: noon}); err != nil {
			t.Fatal(err)
		}
		for _, w := range c.want {
			if !strings.Contains(b.String(), w) {
				t.Errorf("%s: no %q in\n%s", c.name, w, b.String())
			}
		}
		for _, w := range c.miss {
			if strings.Contains(b.String(), w) {
				t.Errorf("%s: %q in\n%s", c.name, w, b.String())
			}
		}
	}
}

// An agent applies its own rules; a host has none to test.
func TestRulesOfARunningAgent(t *testing.T) {
	list, err := rules.Parse("rules.yaml", []byte("rules: [{name: no-debug, match: {ports: 9229}, action: deny}]"))
	if err != nil {
		t.Fatal(err)
	}
	set, err := rules.New(rules.Loopback(), list.Rules)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	control, err := ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	server := NewServer(Options{Provider: &fakeProvider{}, Logger: slog.New(slog.DiscardHandler), Rules: func() *rules.Set { return set }})
	run(t, func(ctx context.Context) { _ = server.Serve(ctx, control, true) })
	v, err := NewClient(path).TestRules(t.Context(), RuleQuery{Key: published(9229, port.Owner{}).Key, Source: "socket"})
	if err != nil || v.Allow || v.Rule != "rule 1 (no-debug)" {
		t.Errorf("%+v, %v", v, err)
	}
	query := RuleQuery{Key: published(80, port.Owner{}).Key, Source: port.SourceDemand, Demand: "web:80/tcp"}
	if v, err := NewClient(path).TestRules(t.Context(), query); err != nil || v.Demand != query.Demand {
		t.Errorf("%+v, %v", v, err)
	}
}

// A host's rules are tested for one of its guests, which must be named where it matters.
func TestRulesOfARunningHost(t *testing.T) {
	list, err := rules.Parse("host.yaml", []byte(`rules: [{match: {guest: "vsock://3:1", ports: 9000}, action: deny}, {match: {ports: 22}, action: deny}]`))
	if err != nil {
		t.Fatal(err)
	}
	set, err := rules.New(rules.Loopback(), list.Rules)
	if err != nil {
		t.Fatal(err)
	}
	denied := forwards.Entry{Request: forwards.Request{Op: forwards.Deny, Protocol: port.TCP, Port: 8080}}
	if set, err = set.WithRuntime([]rules.Rule{denied.Rule()}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	control, err := ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	server := NewServer(Options{
		Provider: &fakeProvider{}, Logger: slog.New(slog.DiscardHandler), Role: "host", Rules: func() *rules.Set { return set },
		Peers: func() []Peer {
			return []Peer{{Guest: "dev", Endpoint: "vsock://4:1"}, {Guest: "vsock://3:1", Endpoint: "vsock://3:1", Name: "build"}}
		},
	})
	run(t, func(ctx context.Context) { _ = server.Serve(ctx, control, true) })
	for _, tt := range []struct {
		port  uint16
		guest string
		want  string // the rule that decides, of which guest, or the error
	}{
		{8080, "", "host runtime rule 1 (deny 8080/tcp) "},
		{22, "", "host rule 2 "},
		{9001, "", "host default "},
		{9000, "", "the rules depend on the guest: give one with --guest: dev or build"},
		{9000, "dev", "host default dev"},
		{9000, "build", "host rule 1 vsock://3:1"},
		{9000, "vsock://3:1", "host rule 1 vsock://3:1"},
		{9000, "x", `--guest "x": this host has no such guest: want dev or build`},
	} {
		v, err := NewClient(path).TestRules(t.Context(), RuleQuery{Key: published(tt.port, port.Owner{}).Key, Source: "socket", Guest: tt.guest})
		got := v.Rule + " " + v.Guest
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%d of guest %q: %q, want %q", tt.port, tt.guest, got, tt.want)
		}
		decides := 0
		for _, s := range v.Steps {
			if s.Decides {
				decides++
			}
		}
		if err == nil && decides != 1 {
			t.Errorf("%d of guest %q: %d steps decide: %+v", tt.port, tt.guest, decides, v.Steps)
		}
	}
}
