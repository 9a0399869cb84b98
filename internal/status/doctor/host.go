// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// HostFacts is what is judged about a host.
type HostFacts struct {
	OS      string // runtime.GOOS
	Version string // of this program
	Now     time.Time

	Running   string // version of the host peer that runs; empty if none does
	HostError string // why none answers
	Config    Config
	Pair      string // how the token is fetched
	Keep      bool   // the configuration keeps all capabilities
	Guests    []Guest
	Ports     int // published by the guests
	// Unpublished is how many other ports the guests have reported, by reason.
	Unpublished map[string]int
	Conflicts   []Conflict // ports that something else has, at one address or more
	Failed      []Conflict // ports that are open nowhere, for another reason
	Reserved    []string   // ranges that Windows reserves, such as "49152-49251"
	Relay       *Relay     // of WSL; nil outside Windows
	Names       []NameListener
}

// NameListener is an address at which the host peer serves names.
type NameListener struct {
	Protocol string // "http" or "tls"
	At       netip.AddrPort
	Open     bool
	Error    string // why it is not open, and what to do
}

// Guest is one guest of the host.
type Guest struct {
	Endpoint, Name, Version string // name and version as the agent reported, empty if unknown
	Label                   string // its name in the configuration; empty if it has none
	Connected               bool
	Error                   string // why it is not connected
	Code                    string // of the error; empty if it has none
	Remote                  bool   // the guest refused us, with the code
	Since                   time.Time
}

// Conflict is a port that is not open, and why.
type Conflict struct {
	Port, Reason string
	Code         port.Code // of the reason
}

// Relay is whether WSL's own relay forwards ports, by .wslconfig.
type Relay struct {
	File    string // .wslconfig of this user
	Forward bool   // localhostForwarding, on by default
	Error   string // why that is unknown
}

// EvaluateHost judges the facts about a host. It is pure.
func EvaluateHost(f HostFacts) Report {
	j := &judge{f: Facts{Config: f.Config}}
	j.host(f)
	j.hostConfig(f)
	for _, g := range f.Guests {
		j.guest(f, g)
	}
	j.ports(f)
	for _, l := range f.Names {
		j.names(l)
	}
	j.unpublished(f.Unpublished, "fairlead ls -a")
	if f.Relay != nil {
		j.relay(*f.Relay)
	}
	if len(f.Reserved) > 0 {
		j.add("windows", "reserved", OK, fmt.Sprintf("Windows reserves %s of TCP; a rule with hostPort puts such a port elsewhere",
			strings.Join(f.Reserved, ", ")), "")
	}
	return j.report(f.Version)
}

func (j *judge) host(f HostFacts) {
	switch {
	case f.Running == "":
		j.add("host", "running", Failing, f.HostError, "start it with `fairlead host`, or now and at each logon with `fairlead host install`")
	case f.Running != f.Version:
		j.add("host", "running", Warning, fmt.Sprintf("version %s runs, this is %s", f.Running, f.Version), "restart `fairlead host`")
	default:
		j.add("host", "running", OK, "version "+f.Running, "")
	}
}

func (j *judge) hostConfig(f HostFacts) {
	c := f.Config
	switch {
	case c.Error != "":
		j.add("config", "file", Failing, c.Error, "correct it: `"+c.check(" --host")+"` lists the mistakes")
		return
	case c.File == "":
		j.add("config", "file", OK, "none: defaults", "")
	default:
		j.add("config", "file", OK, fmt.Sprintf("%s, %s", c.File, plural(c.Rules, "rule")), "")
	}
	if f.Keep {
		j.add("config", "privileges", Warning, "the host peer keeps capabilities that it does not need", "remove keepPrivileges")
	}
	switch {
	case c.TokenFile == "":
		j.add("config", "token", OK, "none: unix peers are authenticated by their user", "")
	case c.TokenError == "":
		j.add("config", "token", OK, c.TokenFile+", readable by its owner only", "")
	default:
		j.add("config", "token", Failing, c.TokenError, f.Pair)
	}
}

func (j *judge) guest(f HostFacts, g Guest) {
	what := g.Endpoint
	if name := cmp.Or(g.Label, g.Name); name != "" {
		what = name + " at " + g.Endpoint
	}
	if !g.Connected {
		j.add("guest", "link", Failing, what+" is not connected: "+g.Error, explain.NextOnHost(g.Code, g.Endpoint, g.Remote, g.Label))
		return
	}
	j.add("guest", "link", OK, what+", version "+g.Version, "")
	if g.Version != f.Running {
		j.add("guest", "version", Warning, fmt.Sprintf("the agent of %s has version %s, the host %s", what, g.Version, f.Running), Mismatch(g.Version, f.Running))
	}
}

func (j *judge) ports(f HostFacts) {
	if f.Running == "" {
		return
	}
	relayed := 0
	for _, c := range f.Conflicts {
		if c.Code == port.InUseByRelay {
			relayed++
			continue
		}
		j.add("ports", "conflict", Warning, c.Port+": "+c.Reason, "free that address, or give the port another host port by a rule: hostPort")
	}
	if relayed > 0 {
		j.add("ports", "wslrelay", Failing, fmt.Sprintf("WSL's own relay has %s of the guest", plural(relayed, "port")), relayRemedy)
	}
	for _, c := range f.Failed {
		j.add("ports", "failed", Failing, c.Port+": "+c.Reason, "correct that: fairlead retries by itself")
	}
	if len(f.Conflicts)+len(f.Failed) == 0 {
		j.add("ports", "open", OK, plural(f.Ports, "port")+" published, no conflicts", "")
	}
}

func (j *judge) names(l NameListener) {
	what := fmt.Sprintf("names over %s at %s", l.Protocol, l.At)
	if l.Open {
		j.add("names", "listen", OK, what+" are served", "")
		return
	}
	j.add("names", "listen", Failing, what+" are not served", l.Error)
}

const relayRemedy = "put `[wsl2]` and `localhostForwarding=false` into %UserProfile%\\.wslconfig, then run `wsl --shutdown`"

func (j *judge) relay(r Relay) {
	switch {
	case r.Error != "":
		j.add("wsl", "relay", Warning, "unknown: "+r.Error, relayRemedy)
	case r.Forward:
		j.add("wsl", "relay", Warning, r.File+" leaves localhostForwarding on: WSL's own relay takes the guest's TCP ports", relayRemedy)
	default:
		j.add("wsl", "relay", OK, "off by "+r.File, "")
	}
}
