// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// A request is written as the command line that makes it.
func TestCommand(t *testing.T) {
	for want, q := range map[string]Request{
		"fairlead forward add 8080/tcp --to 18080 --on-conflict next --bind all --guest 'd*'": {
			Op: Forward, Protocol: port.TCP, Port: 8080, To: 18080, OnConflict: "next", Bind: "all", Guest: "d*",
		},
		"fairlead forward rm web:80/tcp":             {Op: Remove, Demand: "web:80/tcp"},
		"fairlead deny --all":                        {Op: Deny, All: true},
		`fairlead allow --owner 'it'\''s x'`:         {Op: Allow, Owner: "it's x"},
		"fairlead deny 5353/udp --guest vsock://3:1": {Op: Deny, Protocol: port.UDP, Port: 5353, Guest: "vsock://3:1"},
		"fairlead allow 8080/tcp":                    {Op: Allow, Protocol: port.TCP, Port: 8080},
		"fairlead expose 8080/tcp --for 2h0m0s":      {Op: Expose, Protocol: port.TCP, Port: 8080, Seconds: 7200},
		"fairlead expose 8080/tcp --end":             {Op: Hide, Protocol: port.TCP, Port: 8080},
	} {
		if got := q.Command(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// A port that the system refuses is told to another host port. The commands work where a forward
// made the port, and move that of no other guest.
func TestElsewhere(t *testing.T) {
	web := port.Slot{Protocol: port.TCP, Port: 80}
	for _, c := range []struct {
		demand, guest string
		refused       uint16
		want          string
	}{
		{"", "", 80, "`fairlead forward add 80/tcp --to 8080` (before that, if it is a forward already, `fairlead forward rm 80/tcp`)"},
		{"", "", 443, "`fairlead forward add 80/tcp --to 8443` (before that, if it is a forward already, `fairlead forward rm 80/tcp`)"},
		{"web:80/tcp", "", 80, "`fairlead forward add web:80/tcp --to 8080` (before that, if it is a forward already, `fairlead forward rm web:80/tcp`)"},
		{"", "dev", 65535, "`fairlead forward add 80/tcp --to 23535 --guest dev` (before that, if it is a forward already, `fairlead forward rm 80/tcp --guest dev`)"},
	} {
		if got := Elsewhere(web, c.demand, c.guest, c.refused); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
	f := newFixture(t, configOfTest)
	f.do(forward(8080, 80))
	f.refuse(forward(8080, 8088), "exists already")
	f.do(tcp(Remove, 8080))
	f.do(forward(8080, 8088))
}
