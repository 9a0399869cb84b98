// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/explain"
)

func hidden(pending bool) host.Row {
	rule1 := port.RuleRef{Kind: port.RuleConfigured, Number: 1, Name: "no-debug"}
	reason := rule1.Because(port.DeniedByRule)
	if pending {
		reason = port.Because(port.OwnerAwaited)
	}
	k := port.Key{Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: 9229}
	return host.Row{
		Guest: "vm", Fact: &port.Fact{
			Key: k, Owner: port.Owner{Kind: port.OwnerProcess, Name: "node", ID: "811"}, Source: "socket", Decision: port.Decision{Rule: rule1, Reason: reason},
		},
	}
}

func TestRowOfUnpublishedPort(t *testing.T) {
	for pending, state := range map[bool]port.State{false: port.Denied, true: port.Pending} {
		reason := map[bool]string{false: "denied by rule 1 (no-debug)", true: "owner not known yet"}[pending]
		row := describe(hidden(pending), map[string]string{"vm": "dev"})
		if !row.Unpublished || row.State != state || row.Guest != "vm" || row.GuestName != "dev" || row.Reason != reason || row.Code == port.Unstated || row.Owner.Name != "node" {
			t.Errorf("%+v", row)
		}
		if len(row.HostAddresses)+len(row.Outcomes) > 0 || row.DialTarget != "" {
			t.Errorf("it has an address: %+v", row)
		}
		l := status.List{Publications: []status.Publication{row, {}}}
		if got := l.Published().Publications; len(got) != 1 || got[0].Unpublished {
			t.Errorf("published: %+v", got)
		}
	}
}

// What is asked for by name and denied in the guest is found by that name.
func TestUnpublishedPortThatIsAskedFor(t *testing.T) {
	u := hidden(false)
	u.Source = port.SourceDemand
	u.SetNamed("", []string{"web:9229/tcp"})
	row := describe(u, nil)
	if row.State != port.Denied || row.Waits != "" || !slices.Equal(row.Demands(), []string{"web:9229/tcp"}) || len(row.Origins) != 1 {
		t.Errorf("%+v", row)
	}
	if u.Source = "docker"; len(describe(u, nil).Origins) != 2 {
		t.Errorf("%+v", describe(u, nil))
	}
}

// The host explains a port that the guest denies as the guest would.
func TestExplainUnpublishedPort(t *testing.T) {
	r := explain.Evaluate(explain.Facts{
		Query: explain.Query{Port: 9229}, Host: true, Publications: []explain.Publication{{Publication: publication(hidden(false)), Guest: "vm"}},
	})
	if r.Verdict != port.VerdictDenied || !strings.Contains(r.Summary, "no-debug") || !strings.Contains(r.Next, "in the guest") {
		t.Errorf("%+v", r)
	}
}

// Rules that a guest does not understand are shown with the name of the guest.
func TestUnreadRulesNameTheirGuest(t *testing.T) {
	rule := []wire.Unread{wire.NewUnread("ip nat pre", "meta mark 7 tcp dport 80", "meta mark")}
	for _, c := range []struct {
		names map[string]string
		want  string
	}{{map[string]string{"vsock://3:1023": "dev"}, "dev"}, {nil, "vsock://3:1023"}} {
		got := unread(host.GuestStatus{Name: "vsock://3:1023", Unread: rule}, c.names)
		if len(got) != 1 || got[0].Guest != c.want || got[0].Where != "ip nat pre" || got[0].Reason != "meta mark" {
			t.Errorf("%+v, want a rule of %s", got, c.want)
		}
	}
}
