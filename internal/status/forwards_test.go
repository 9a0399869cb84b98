// SPDX-License-Identifier: Apache-2.0

package status

import (
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
)

// noForwards is a store without rules.
func noForwards(tb testing.TB) *forwards.Store {
	tb.Helper()
	return forwards.NewStore(filepath.Join(tb.TempDir(), "forwards.yaml"), rules.Empty(rules.Loopback()), true, slog.New(slog.DiscardHandler), func(*rules.Set) {})
}

// A refusal says why and no more; a request with an unknown field is not carried out.
func TestForwardsOverTheControlSocket(t *testing.T) {
	s := servePage(t)
	q := forwards.Request{Op: forwards.Add, Protocol: port.TCP, Port: 8080, To: 18080}
	v, err := s.client.ChangeForwards(t.Context(), q)
	if err != nil || len(v.Added) != 1 || len(v.Rules) != 1 || v.Rules[0].State != "pending" || v.Rules[0].Reason != notServed {
		t.Errorf("%+v, %v", v, err)
	}
	q.To = 18081
	if _, err := s.client.ChangeForwards(t.Context(), q); err == nil || !strings.HasPrefix(err.Error(), "forward 8080/tcp exists already") {
		t.Errorf("%v", err)
	}
	resp, body := request(t, s.client.http, http.MethodPost, "http://fairlead/v1/forwards", func(r *http.Request) {
		r.Body = io.NopCloser(strings.NewReader(`{"op":"deny","protocol":"tcp","port":1,"until":"2h"}`))
	})
	if resp.StatusCode != http.StatusBadRequest || !strings.Contains(body, "until") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if f, err := s.client.Forwards(t.Context()); err != nil || len(f.Rules) != 1 || f.Rules[0].HostPort != "18080" {
		t.Errorf("%+v, %v", f, err)
	}
}

// A rule has the best state of the ports that it names, and says if there are none.
func TestDescribeRule(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:18080")
	ports := []Publication{
		{Protocol: port.TCP, Port: 8080, Guest: "dev", State: port.Conflict, Reason: "taken"},
		{Protocol: port.TCP, Port: 8080, Guest: "dev", State: port.Active, HostAddresses: []netip.AddrPort{at}},
		{Protocol: port.TCP, Port: 8080, Guest: "build", State: port.Conflict, Reason: "taken"},
		{Protocol: port.TCP, Port: 9090, Guest: "dev", State: port.Denied, Reason: "denied by rule 1", Unpublished: true},
		{Protocol: port.TCP, Port: 7070, Guest: "dev", State: port.Active, Lost: true},
	}
	for _, c := range []struct {
		yaml, state, reason string
		addresses           int
	}{
		{"match: {ports: 8080}, action: allow", "active", "", 1},
		{"match: {ports: 8080, guest: build}, action: allow", "conflict", "taken", 0},
		{"match: {ports: 8080, protocol: udp}, action: allow", "pending", notServed, 0},
		{"match: {ports: 9090}, action: allow", "denied", "denied by rule 1", 0},
		{"match: {ports: 7070}, action: allow", "lost", "", 0},
		{"match: {ports: 8080}, action: deny", "denied", "", 0},
		{"match: {owner: container}, action: allow", "", "", 0},
	} {
		file, err := rules.Parse("rules", []byte("rules: [{"+c.yaml+"}]"))
		if err != nil {
			t.Fatal(err)
		}
		if f := describeRule(file.Rules[0], slices.Clone(ports)); f.State != c.state || f.Reason != c.reason || len(f.HostAddresses) != c.addresses {
			t.Errorf("%s: %+v", c.yaml, f)
		}
	}
}
