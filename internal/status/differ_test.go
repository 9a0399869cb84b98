// SPDX-License-Identifier: Apache-2.0

package status

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// compared is a row of an agent without outcomes.
func compared(change func(*Publication)) List {
	p := port.Publication{
		Fact: port.Fact{
			Key:      port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8080},
			Owner:    port.Owner{Kind: port.OwnerProcess, Name: "a", ID: "7"},
			Source:   "socket",
			Decision: port.Decision{Allow: true},
		},
		Origins: []port.OriginInfo{{Origin: port.Origin{Source: "socket", ID: "1"}, Detail: port.NewDetail("pid 7 (a)"), Since: time.Unix(1, 0)}},
		Dial:    []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")}, Since: time.Unix(1, 0),
	}
	row := Describe(p, nil)
	change(&row)
	return List{Publications: []Publication{row}}
}

// What the guest says of a port is compared, field by field.
func TestDifferences(t *testing.T) {
	same := compared(func(*Publication) {})
	for want, change := range map[string]func(*Publication){
		`8080/tcp 0.0.0.0: owner {"kind":"process","name":"a","id":"7"}, of a fresh agent {"kind":"process","name":"b","id":"7"}`: func(p *Publication) { p.Owner.Name = "b" },
		`ownerPending none, of a fresh agent true`:                            func(p *Publication) { p.OwnerPending = true },
		`"kind":"rule","number":2`:                                            func(p *Publication) { p.Decision.Rule = port.RuleRef{Kind: port.RuleConfigured, Number: 2} },
		`"code":"well-known-udp"`:                                             func(p *Publication) { p.Decision.Reason = port.Because(port.WellKnownUDP) },
		`dialTarget "127.0.0.1:8080", of a fresh agent "127.0.0.2:8080"`:      func(p *Publication) { p.DialTarget = "127.0.0.2:8080" },
		`origins ["socket pid 7 (a)"], of a fresh agent ["socket pid 8 (a)"]`: func(p *Publication) { p.Origins[0].Detail = "pid 8 (a)" },
		`of a fresh agent ["socket pid 7 (a) its sources come and go"]`:       func(p *Publication) { p.Origins[0].Doubt = "its sources come and go" },
		`warnings none, of a fresh agent ["fairlead.host-port: 0"]`:           func(p *Publication) { p.Warnings = []string{"fairlead.host-port: 0"} },
		`others none, of a fresh agent [{"kind":"process","name":"c","id":"9"}]`: func(p *Publication) {
			p.Others = port.List[port.OtherOwner]{{Owner: port.Owner{Kind: port.OwnerProcess, Name: "c", ID: "9"}}}
		},
		`target none, of a fresh agent 5`: func(p *Publication) { p.Target = 5 },
	} {
		if got := Differences(same, compared(change)); len(got) != 1 || !strings.Contains(got[0], want) {
			t.Errorf("got %q, want %s", got, want)
		}
	}
	for want, lists := range map[string][2]List{
		"8080/tcp 0.0.0.0: a fresh agent lacks it: map[":                    {same, {}},
		"8080/tcp 0.0.0.0: only a fresh agent has it: map[":                 {{}, same},
		`source nat: only a fresh agent has it: map[warnings:["one rule"]]`: {{Sources: []Source{{Name: "nat"}}}, {Sources: []Source{{Name: "nat", Warnings: []string{"one rule"}}}}},
		`80/tcp web: only a fresh agent has it: map[`:                       {{}, {Publications: []Publication{DescribeWaiting(demanded(t, "web:80/tcp"), port.Because(port.LookedFor), time.Time{})}}},
	} {
		if got := Differences(lists[0], lists[1]); len(got) != 1 || !strings.HasPrefix(got[0], want) {
			t.Errorf("got %q, want %s", got, want)
		}
	}
}

func demanded(t *testing.T, text string) port.Demand {
	t.Helper()
	d, err := port.ParseDemand(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// What sinks and hosts add, and since when something is, makes no difference.
func TestNoDifferences(t *testing.T) {
	same := compared(func(*Publication) {})
	got := Differences(same, compared(func(p *Publication) {
		p.HostAddresses = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")}
		p.State, p.Reason, p.Code = port.Active, "moved", port.Moved
		p.Since, p.SinceAtLeast, p.Origins[0].Since = time.Unix(2, 0), true, time.Unix(2, 0)
		p.Outcomes = []Outcome{{Sink: "none", State: port.Active}}
	}))
	if len(got) > 0 {
		t.Errorf("got %q, want none", got)
	}
}
