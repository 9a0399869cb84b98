// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

var update = flag.Bool("update", false, "write the golden files")

var since = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func pub(protocol port.Protocol, at string, change ...func(*Publication)) Publication {
	a := netip.MustParseAddrPort(at)
	p := Publication{Publication: port.Publication{
		Fact: port.Fact{Key: port.Key{Protocol: protocol, Address: a.Addr(), Port: a.Port()}, Owner: port.Owner{Kind: port.OwnerProcess, Name: "nginx", ID: "811"}},
		Origins: []port.OriginInfo{{
			Origin: port.Origin{Source: "socket", ID: "1"}, Detail: port.NewDetail("pid 811 (nginx)"), Since: since,
		}},
		Dial:  []netip.AddrPort{netip.AddrPortFrom(port.Loopback(a.Addr()), a.Port())},
		Since: since,
	}}
	p.Apply(rules.Empty(rules.Loopback()).Decide(p.Publication))
	p.Rules = rules.Empty(rules.Loopback()).Explain(p.Publication)
	for _, c := range change {
		c(&p)
	}
	return p
}

var (
	none     port.Reason
	hostRule = port.RuleRef{Kind: port.RuleConfigured, Number: 1, OnHost: true}
)

func inUse(at string) port.Reason { return port.Because(port.InUseBy, at, `"nginx"`, "4") }

func outcome(state port.State, at string, reason port.Reason) func(*Publication) {
	return func(p *Publication) {
		o := port.SinkOutcome{Sink: "hostlink", Outcome: port.Outcome{State: state, Reason: reason, Since: since}}
		if at != "" {
			o.HostAddress = netip.MustParseAddrPort(at)
		}
		p.Outcomes = append(p.Outcomes, o)
	}
}

func dialed(a Answer) func(*Publication) {
	return func(p *Publication) { p.Dials = append(p.Dials, Dial{Target: p.Dial[0], Answer: a}) }
}

// onHost makes it what a host knows of it, with answers of the guest.
func onHost(answers ...Dial) func(*Publication) {
	return func(p *Publication) { p.Dial, p.Dials = nil, answers }
}

// container makes it the port of a container, with answers of the loopback and of the
// container's address.
func container(detail string, answers ...Answer) func(*Publication) {
	return func(p *Publication) {
		p.Owner = port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "c0ffee"}
		p.Origins = []port.OriginInfo{{Origin: port.Origin{Source: "docker", ID: "c0ffee"}, Detail: port.NewDetail(detail), Since: since}}
		p.Dial = append(p.Dial, netip.MustParseAddrPort("172.17.0.2:80"))
		for i, a := range answers {
			p.Dials = append(p.Dials, Dial{Target: p.Dial[i], Answer: a})
		}
	}
}

func rivals(p *Publication) {
	p.Decision = port.Decision{Rule: port.RuleRef{Kind: port.RuleConfigured, Number: 1}, Reason: port.Because(port.OwnerContested, "container web and container db")}
}

func withheld(why port.Reason) func(*Publication) {
	return func(p *Publication) {
		p.Origins[0].Withheld = why
		p.Apply(rules.Empty(rules.Loopback()).Decide(p.Publication))
		p.Dial = nil
	}
}

func denied(p *Publication) {
	deniedBy(port.RuleRef{Kind: port.RuleConfigured, Number: 2, Name: "no-debug"})(p)
}

func sock(protocol port.Protocol, at string, kind SocketKind, change ...func(*Socket)) Socket {
	s := Socket{Protocol: protocol, Address: netip.MustParseAddrPort(at), Kind: kind, NetNS: "net:[7]", Process: "pid 9 (nc)"}
	for _, c := range change {
		c(&s)
	}
	return s
}

func inContainer(s *Socket) {
	s.Container = port.Owner{Kind: port.OwnerContainer, Name: "web", ID: strings.Repeat("ab", 32)}
}

func source(state string) []Source {
	s := Source{Name: "socket", State: state}
	if state == "stale" {
		s.Error = "dump tcp: permission denied"
	}
	return []Source{s}
}

var now = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

var tcp8080 = Query{Port: 8080, Protocol: port.TCP}

// Each verdict, with what of the summary and of the next step must be there.
var cases = []struct {
	name    string
	facts   Facts
	want    port.Verdict
	summary string
	next    string
}{
	{
		"active", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", dialed(Answers), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictActive, "8080/tcp is reachable on the host at 127.0.0.1:8080", "",
	},
	{
		"another host port", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", dialed(Answers), outcome(port.Active, "127.0.0.1:9090", none))}},
		port.VerdictActive, "at 127.0.0.1:9090, another port than in the guest", "",
	},
	{
		"one family", Facts{Publications: []Publication{pub(port.TCP, "[::1]:8080", dialed(Answers), outcome(port.Active, "[::1]:8080", none))}},
		port.VerdictOneFamily, "the guest serves IPv6 only", "connect to [::1]:8080",
	},
	{
		"half in conflict", Facts{Publications: []Publication{pub(port.TCP, "[::]:8080",
			outcome(port.Conflict, "127.0.0.1:8080", inUse("127.0.0.1:8080")), outcome(port.Active, "[::1]:8080", none))}},
		port.VerdictPartial, "but not everywhere: 127.0.0.1:8080 is in use by \"nginx\" (pid 4)", "use [::1]:8080",
	},
	{
		"no answer", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", dialed(Refuses), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictNoAnswer, "127.0.0.1:8080 refuses", "a connection to 127.0.0.1:8080 must work first",
	},
	{
		"a relay accepts for a container that does not listen", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080",
			container("web container port 80/tcp", Answers, Refuses), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictNoAnswer, "container web (c0ffee) does not listen: 172.17.0.2:80 refuses", "check the container",
	},
	{
		"a container that listens", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080",
			container("web container port 80/tcp", Answers, Answers), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictActive, "reachable", "",
	},
	{
		"a container that cannot be reached directly", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080",
			container("web container port 80/tcp", Answers, Silent), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictActive, "reachable", "",
	},
	{
		"paused", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080",
			container("web container port 80/tcp (paused)", Answers, Answers), func(p *Publication) { p.Origins[0].Paused = true }, outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictNoAnswer, "container web (c0ffee) is paused", "unpause",
	},
	{
		"claimed for two", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", rivals)}},
		port.VerdictPending, "rule 1 depends on who owns it: owner not certain: claimed for container web and container db", "change rule 1",
	},
	{
		"not tried is no failure", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", dialed(NotTried), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictUntested, "8080/tcp is open, not tested, on the host at 127.0.0.1:8080", "",
	},
	{
		"UDP is not tested", Facts{Query: Query{Port: 8080}, Publications: []Publication{pub(port.UDP, "0.0.0.0:8080", outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictUntested, "8080/udp is open, not tested,", "",
	},
	{
		"not tested on a host", Facts{Host: true, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", onHost(), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictUntested, "8080/tcp is open, not tested,", "",
	},
	{
		"the guest answers its host", Facts{Host: true, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", onHost(Dial{Answer: Answers}), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictActive, "8080/tcp is reachable on the host at 127.0.0.1:8080", "",
	},
	{
		"no answer on a host", Facts{Host: true, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080",
			onHost(Dial{Answer: Refuses, Detail: "connection refused"}), outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictNoAnswer, "is open on the host at 127.0.0.1:8080, but the server in the guest refuses (connection refused)", "`fairlead explain 8080/tcp` in the guest",
	},
	{
		"declared only", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080",
			func(p *Publication) { p.Dial = nil }, outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictNotServed, "nothing in the guest serves it", "start the server",
	},
	{
		"conflict", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080",
			outcome(port.Conflict, "127.0.0.1:8080", inUse("127.0.0.1:8080")))}, ForwardsFile: forwardsFile},
		port.VerdictConflict, "on the host: 127.0.0.1:8080 is in use by \"nginx\" (pid 4)", "--to 18080",
	},
	{
		"host denies", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Denied, "", hostRule.Because(port.DeniedByRule)))}},
		port.VerdictHostDenied, "denied by host rule 1", "rules of the host peer",
	},
	{
		"listener without UDP", Facts{Query: Query{Port: 8080}, Publications: []Publication{pub(port.UDP, "0.0.0.0:8080", outcome(port.Denied, "127.0.0.1:8080", port.Because(port.UDPDisabled)))}},
		port.VerdictDenied, "hostlink refuses it: UDP is not enabled", "--listener-udp",
	},
	{
		"host denies at run time", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Denied, "", port.RuleRef{Kind: port.RuleDeny, Number: 1, Name: "all", OnHost: true}.Because(port.DeniedByRule)))}},
		port.VerdictHostDenied, "denied by host runtime rule 1", "undo it on the host by `fairlead allow`",
	},
	{
		"denied at run time", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", func(p *Publication) {
			deniedBy(port.RuleRef{Kind: port.RuleDeny, Number: 1, Name: "8080/tcp"})(p)
		})}},
		port.VerdictDenied, "denied by runtime rule 1", "undo it by `fairlead allow`",
	},
	{
		"sink failed", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Failed, "", port.Because(port.SystemFailed, "no route")))}},
		port.VerdictFailed, "no route", "doctor",
	},
	{
		"no host", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Pending, "", port.Because(port.NoHost)))}},
		port.VerdictNoHost, "no host is connected", "start `fairlead host`",
	},
	{
		"pending", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Pending, "127.0.0.1:8080", none))}},
		port.VerdictPending, "hostlink has not reported yet", "ask again",
	},
	{
		"no sink reported", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080")}},
		port.VerdictPending, "no sink has reported", "ask again",
	},
	{
		"owner pending", Facts{Publications: []Publication{ownerPending(pub(port.TCP, "0.0.0.0:8080"))}},
		port.VerdictPending, "rule 1 (secrets) depends on who owns it", "engine is starting or stale",
	},
	{
		"denied", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", denied)}},
		port.VerdictDenied, "denied by rule 2 (no-debug)", "change rule 2 (no-debug) in the agent's configuration",
	},
	{
		"well-known", Facts{Query: Query{Port: 5353}, Publications: []Publication{pub(port.UDP, "0.0.0.0:5353")}, ForwardsFile: forwardsFile},
		port.VerdictWellKnown, "a service of the guest's own network", "run `fairlead allow 5353/udp`, or add a rule for the port to the agent's configuration: {match: {protocol: udp, ports: 5353}, action: allow}",
	},
	{
		"bound only", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", withheld(port.Because(port.Unlistened)))}},
		port.VerdictUnlistened, "bound, not listening", "listen()",
	},
	{
		"device", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", withheld(port.Because(port.InterfaceBare, "eth1")))}},
		port.VerdictInterface, "eth1", "without binding it to an interface",
	},
	{
		"address of nobody", Facts{Publications: []Publication{pub(port.TCP, "10.0.0.9:8080", withheld(port.Because(port.AddressNowhere)))}},
		port.VerdictWithheld, "no interface has", "have the server listen on an address of the guest",
	},
	{
		"interface of a rule", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", withheld(port.Because(port.OnInterface, "eth9")))}},
		port.VerdictInterface, "eth9", "action: allow",
	},
	{
		"clients of a rule", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", withheld(port.Because(port.FromSources, "10.0.0.0/8")))}},
		port.VerdictSourceOnly, "10.0.0.0/8", "action: allow",
	},
	{
		"hidden by a rule", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", withheld(port.Because(port.OverlappedRules)))}},
		port.VerdictWithheld, "come before it", "action: allow",
	},
	{
		"own", Facts{Sockets: []Socket{sock(port.TCP, "127.0.0.1:8080", Listening, func(s *Socket) { s.Own = true })}},
		port.VerdictOwn, "fairlead's own", "another port",
	},
	{
		"UDP client", Facts{Query: Query{Port: 40000, Protocol: port.UDP}, Sockets: []Socket{sock(port.UDP, "0.0.0.0:40000", Client)}},
		port.VerdictClient, "chosen by the kernel", "bind its port explicitly",
	},
	{
		"socket source disabled", Facts{Sockets: []Socket{sock(port.TCP, "0.0.0.0:8080", Listening)}},
		port.VerdictDisabled, "the socket source is disabled", "add socket",
	},
	{
		"starting", Facts{Sockets: []Socket{sock(port.TCP, "0.0.0.0:8080", Listening)}, Sources: source("starting")},
		port.VerdictStarting, "still starting", "ask again",
	},
	{
		"stale", Facts{Sockets: []Socket{sock(port.TCP, "0.0.0.0:8080", Listening)}, Sources: source("stale")},
		port.VerdictStale, "permission denied", "doctor",
	},
	{"stale and nothing else", Facts{Sources: source("stale")}, port.VerdictStale, "permission denied", "doctor"},
	{"starting and nothing else", Facts{Sources: source("starting")}, port.VerdictStarting, "socket", "ask again"},
	{
		"not told", Facts{Sockets: []Socket{sock(port.TCP, "0.0.0.0:8080", Listening)}, Sources: source("live")},
		port.VerdictUnseen, "has not reported it yet", "ask again",
	},
	{
		"unsupported NAT rule", Facts{Unread: []Unread{{Where: "ip nat PREROUTING", Rule: "meta mark 7 tcp dport 8080 dnat to 10.0.0.2", Reason: "meta mark"}}},
		port.VerdictNAT, "meta mark 7 tcp dport 8080", "supported form",
	},
	{
		"unsupported NAT rule of a guest", Facts{Host: true, Unread: []Unread{{Guest: "dev", Where: "ip nat PREROUTING", Rule: "meta mark 7 tcp dport 8080 dnat to 10.0.0.2", Reason: "meta mark"}}},
		port.VerdictNAT, "a NAT rule of guest dev about port 8080 is not supported", "supported form",
	},
	{
		"container elsewhere", Facts{Elsewhere: []Socket{sock(port.TCP, "0.0.0.0:8080", Listening, inContainer)}},
		port.VerdictNetNS, "container web (abababababab), pid 9 (nc), is listening in another network namespace (net:[7])", "-p 8080:8080",
	},
	{
		"loopback elsewhere", Facts{Elsewhere: []Socket{sock(port.TCP, "127.0.0.1:8080", Listening)}},
		port.VerdictNetNS, "of pid 9 (nc) is listening in another", "nothing else can reach it",
	},
	{
		"process elsewhere", Facts{Elsewhere: []Socket{sock(port.TCP, "0.0.0.0:8080", Listening)}},
		port.VerdictNetNS, "pid 9 (nc)", "start it in the agent's network namespace",
	},
	{
		"a client elsewhere is nothing", Facts{Query: Query{Port: 8080}, Elsewhere: []Socket{sock(port.UDP, "0.0.0.0:8080", Client)}},
		port.VerdictNothingHere, "nothing in the guest serves port 8080", "start the server",
	},
	{
		"the other protocol", Facts{Publications: []Publication{pub(port.UDP, "0.0.0.0:8080", outcome(port.Active, "127.0.0.1:8080", none))}},
		port.VerdictProtocol, "0.0.0.0:8080 of process nginx (811) is UDP, not TCP", "fairlead explain 8080/udp",
	},
	{
		"the other protocol elsewhere", Facts{Elsewhere: []Socket{sock(port.UDP, "0.0.0.0:8080", Listening)}},
		port.VerdictProtocol, "(in net:[7]) is UDP", "fairlead explain 8080/udp",
	},
	{"nothing", Facts{}, port.VerdictNothingHere, "nothing in the guest serves 8080/tcp", "start the server"},
	{"similar", Facts{Similar: []port.Slot{{Protocol: port.TCP, Port: 8081}}}, port.VerdictNothingHere, "nothing", "did you mean 8081/tcp?"},
	{"nothing on a host", Facts{Host: true}, port.VerdictNothingHere, "no guest publishes 8080/tcp", "run in the guest"},
	{
		"a host port", Facts{Host: true, OtherPorts: []OtherPort{{Slot: port.Slot{Protocol: port.TCP, Port: 80}, Guest: "dev"}}},
		port.VerdictHostPort, "8080/tcp is the host port of port 80/tcp of guest dev", "run: fairlead explain 80/tcp",
	},
	{
		"a host port of the other protocol", Facts{Host: true, OtherPorts: []OtherPort{{Slot: port.Slot{Protocol: port.UDP, Port: 80}, Guest: "dev"}}},
		port.VerdictNothingHere, "no guest publishes 8080/tcp", "run in the guest",
	},
	{
		"no guest on a host", Facts{Host: true, Sources: []Source{{Name: "unix:///run/link.sock", State: "stale", Error: "no such file", Next: "pair it"}}},
		port.VerdictStale, "guest unix:///run/link.sock is not connected: no such file", "pair it",
	},
	{
		"guest lost, ports still open", Facts{
			Host: true, Sources: []Source{{Name: "unix:///run/link.sock", State: "stale", Error: "no such file", Next: "pair it"}},
			Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Active, "127.0.0.1:8080", none),
				func(p *Publication) { p.Guest = "unix:///run/link.sock" })},
		},
		port.VerdictGuestLost, "8080/tcp does not answer on the host: guest unix:///run/link.sock is not connected: no such file", "pair it",
	},
	{
		"another guest is lost", Facts{
			Host: true, Sources: []Source{{Name: "a", State: "stale", Error: "no such file", Next: "pair it"}, {Name: "b", State: "live"}},
			Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", onHost(Dial{Answer: Answers}), outcome(port.Active, "127.0.0.1:8080", none), func(p *Publication) { p.Guest = "b" })},
		},
		port.VerdictActive, "reachable", "",
	},
	{
		"a host was refused", Facts{
			Now: now, Refused: &Refusal{At: now.Add(-4 * time.Second), Code: "proof", Reason: "the tokens differ"},
			Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Pending, "", port.Because(port.NoHost)))},
		},
		port.VerdictNoHost, "no host is connected; a host was refused 4s ago: the tokens differ", "`fairlead host pair`",
	},
	{
		"the better of two", Facts{Query: Query{Port: 8080}, Publications: []Publication{
			pub(port.UDP, "0.0.0.0:8080", denied), pub(port.TCP, "0.0.0.0:8080", dialed(Answers), outcome(port.Active, "127.0.0.1:8080", none)),
		}},
		port.VerdictActive, "8080/tcp", "",
	},
}

func TestVerdicts(t *testing.T) {
	for _, tt := range cases {
		t.Run(tt.name, func(t *testing.T) {
			f := tt.facts
			if f.Query == (Query{}) {
				f.Query = tcp8080
			}
			r := Evaluate(f)
			if r.Verdict != tt.want || !strings.Contains(r.Summary, tt.summary) || !strings.Contains(r.Next, tt.next) ||
				(tt.next == "") != (r.Next == "") {
				t.Errorf("got %s: %q, next %q\nwant %s: %q, next %q", r.Verdict, r.Summary, r.Next, tt.want, tt.summary, tt.next)
			}
		})
	}
}

// A guest that is lost is named once: with its port, or else as what is related.
func TestLostGuestIsNamedOnce(t *testing.T) {
	for guest, related := range map[string]int{"a": 0, "b": 1} {
		r := Evaluate(Facts{
			Query: tcp8080, Host: true, Sources: []Source{{Name: "a", State: "stale", Error: "refused"}, {Name: "b", State: "live"}},
			Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Active, "127.0.0.1:8080", none), func(p *Publication) { p.Guest = guest })},
		})
		if len(r.Related) != related {
			t.Errorf("port of guest %s: related %+v, want %d", guest, r.Related, related)
		}
	}
}

func TestEveryVerdictHasACase(t *testing.T) {
	seen := map[port.Verdict]bool{}
	for _, tt := range cases {
		seen[tt.want] = true
	}
	src, err := os.ReadFile("../../port/verdict.go")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(src)) {
		if f := strings.Fields(line); len(f) > 3 && f[1] == "Verdict" && f[2] == "=" || len(f) == 4 && strings.HasPrefix(f[0], "Verdict") {
			if v := port.Verdict(strings.Trim(f[3], `"`)); !seen[v] {
				t.Errorf("no case for %q", v)
			}
		}
	}
}

// Related findings are reported with a publication, too.
func TestRelatedWithPublication(t *testing.T) {
	r := Evaluate(Facts{
		Query:        Query{Port: 8080},
		Publications: []Publication{pub(port.TCP, "127.0.0.1:8080", denied)},
		Unread:       []Unread{{Where: "ip nat pre", Rule: "meta mark 7 tcp dport 8080", Reason: "meta mark"}},
		// Does not matter then:
		Elsewhere: []Socket{sock(port.TCP, "0.0.0.0:8080", Listening)},
		Sockets:   []Socket{sock(port.UDP, "0.0.0.0:8080", Client), sock(port.TCP, "127.0.0.1:8080", Listening, func(s *Socket) { s.Own = true })},
	})
	if r.Verdict != port.VerdictDenied || len(r.Related) != 1 || r.Related[0].Kind != port.VerdictNAT {
		t.Errorf("%+v", r)
	}
}

// A rule whose ports cannot be read is reported after likelier causes.
func TestRuleOfUnknownPortsIsOnlyRelated(t *testing.T) {
	r := Evaluate(Facts{Query: tcp8080, Unread: []Unread{{Where: "ip nat pre", Rule: "meta mark 7", Reason: "meta mark", Unsure: true}}})
	if r.Verdict != port.VerdictNothingHere || len(r.Related) != 1 || !strings.Contains(r.Related[0].Text, "a NAT rule that may be about port 8080") {
		t.Errorf("%+v", r)
	}
	r = Evaluate(Facts{Host: true, Query: tcp8080, Unread: []Unread{{Guest: "dev", Where: "ip nat pre", Rule: "meta mark 7", Reason: "meta mark", Unsure: true}}})
	if len(r.Related) != 1 || !strings.Contains(r.Related[0].Text, "a NAT rule of guest dev that may be about port 8080") {
		t.Errorf("on a host: %+v", r)
	}
}

func TestJSON(t *testing.T) {
	f := Facts{
		Query: tcp8080, Now: since.Add(time.Hour), NetNS: "net:[4026531840]", ForwardsFile: forwardsFile,
		Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", dialed(Answers),
			outcome(port.Conflict, "127.0.0.1:8080", inUse("127.0.0.1:8080")))},
		Elsewhere: []Socket{sock(port.TCP, "10.0.0.2:8080", Listening, inContainer)},
		Missing:   []string{"sockets: timed out"},
	}
	var got bytes.Buffer
	enc := json.NewEncoder(&got)
	enc.SetIndent("", "  ")
	if err := enc.Encode(Evaluate(f)); err != nil {
		t.Fatal(err)
	}
	const golden = "testdata/report.golden"
	if *update {
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || !bytes.Equal(got.Bytes(), want) {
		t.Errorf("got\n%s\nwant (%v)\n%s", got.Bytes(), err, want)
	}
}

func ownerPending(p Publication) Publication {
	p.Decision = port.Decision{Rule: port.RuleRef{Kind: port.RuleConfigured, Number: 1, Name: "secrets"}, Reason: port.Because(port.OwnerAwaited)}
	return p
}

// A process that has not got the socket is not its owner.
func TestOwnerWithoutTheSocket(t *testing.T) {
	for holder, want := range map[string]Step{
		"":            {Step: "owner", Mark: OK, Text: "process web (9)"},
		"pid 8 (api)": {Step: "owner", Mark: Warning, Text: "process web (9), but pid 8 (api) has the socket, as an audit will see"},
	} {
		p := pub(port.TCP, "0.0.0.0:8080", func(p *Publication) {
			p.Owner, p.Holder = port.Owner{Kind: port.OwnerProcess, ID: "9", Name: "web"}, holder
		})
		r := Evaluate(Facts{Query: Query{Port: 8080}, Publications: []Publication{p}})
		if !slices.Contains(r.Chains[0].Steps, want) {
			t.Errorf("steps %+v, want %+v", r.Chains[0].Steps, want)
		}
	}
}

// It says that the server is told the client's address, and by which sinks it is not.
func TestExplainProxyProtocol(t *testing.T) {
	told := func(p *Publication) { p.ProxyProtocol = port.ProxyProtocolV2 }
	by := func(sink string, state port.State) func(*Publication) {
		return func(p *Publication) {
			p.Outcomes = append(p.Outcomes, port.SinkOutcome{Sink: sink, Outcome: port.Outcome{State: state}})
		}
	}
	for name, c := range map[string]struct {
		changes    []func(*Publication)
		mark       Mark
		want, miss string
	}{
		"host":    {[]func(*Publication){told, by("hostlink", port.Active), by("gvproxy", port.Failed)}, OK, "PROXY protocol (v2)", "hidden"},
		"gvproxy": {[]func(*Publication){told, by("gvproxy", port.Active), by("gvproxy", port.Active)}, Warning, "by way of gvproxy clients", "gvproxy and"},
		"no rule": {[]func(*Publication){by("gvproxy", port.Active)}, "", "", ""},
	} {
		r := Evaluate(Facts{Query: Query{Port: 8080}, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", c.changes...)}})
		var step Step
		for _, s := range r.Chains[0].Steps {
			if s.Step == "proxy" {
				step = s
			}
		}
		if step.Mark != c.mark || !strings.Contains(step.Text, c.want) || c.miss != "" && strings.Contains(step.Text, c.miss) {
			t.Errorf("%s: %+v", name, step)
		}
	}
}

// All who serve a port are named, but for a Service's pods.
func TestOwnerStepNamesAll(t *testing.T) {
	process := port.OtherOwner{Owner: port.Owner{Kind: port.OwnerProcess, Name: "own-b"}}
	pod := port.OtherOwner{Owner: port.Owner{Kind: port.OwnerContainer, Name: "web-0", Namespace: "shop"}}
	for want, p := range map[string]port.Fact{
		"process own-a (7) and process own-b":       {Owner: port.Owner{Kind: port.OwnerProcess, Name: "own-a", ID: "7"}, Others: []port.OtherOwner{process}},
		"process own-a and an unknown process":      {Owner: port.Owner{Kind: port.OwnerProcess, Name: "own-a"}, Others: []port.OtherOwner{{}}},
		"container web-0 of shop and process own-b": {Others: []port.OtherOwner{pod, process}},
		"service web": {Owner: port.Owner{Kind: port.OwnerService, Name: "web"}, Others: []port.OtherOwner{pod}},
		"unknown":     {},
	} {
		if got := (&Publication{Publication: port.Publication{Fact: p}}).ownerStep().Text; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A verdict is about the port: both families of one owner have one, whichever is asked.
func TestVerdictIsOfBothFamilies(t *testing.T) {
	four := func(change ...func(*Publication)) Publication { return pub(port.TCP, "0.0.0.0:8080", change...) }
	six := func(change ...func(*Publication)) Publication { return pub(port.TCP, "[::]:8080", change...) }
	active4, active6 := outcome(port.Active, "127.0.0.1:8080", none), outcome(port.Active, "[::1]:8080", none)
	denied := func(reason port.Reason) func(*Publication) {
		return func(p *Publication) { p.Decision = port.Decision{Reason: reason} }
	}
	other := func(p *Publication) { p.Owner.ID = "812" }
	for name, c := range map[string]struct {
		list    []Publication
		verdict port.Verdict
		chains  []port.Verdict
		summary string
	}{
		"both": {[]Publication{four(active4, dialed(Answers)), six(active6, dialed(Answers))},
			port.VerdictActive, nil, "reachable on the host at 127.0.0.1:8080 and [::1]:8080"},
		"a conflict in one": {[]Publication{four(outcome(port.Conflict, "127.0.0.1:8080", inUse("127.0.0.1:8080"))), six(active6, dialed(Answers))},
			port.VerdictPartial, nil, "but not everywhere: 127.0.0.1:8080 is in use"},
		"one is denied": {[]Publication{four(denied(hostRule.Because(port.DeniedByRule))), six(active6, dialed(Answers))},
			port.VerdictPartial, nil, "at [::1]:8080, but not at 0.0.0.0:8080 of the guest: denied by"},
		"one is not served": {[]Publication{four(denied(port.Because(port.Unlistened))), six(active6, dialed(Answers))},
			port.VerdictOneFamily, nil, "the guest serves IPv6 only"},
		"two owners": {[]Publication{four(active4, dialed(Answers)), six(other, active6, dialed(Answers))},
			port.VerdictActive, []port.Verdict{port.VerdictActive, port.VerdictOneFamily}, "reachable on the host at 127.0.0.1:8080"},
	} {
		r := Evaluate(Facts{Query: Query{Port: 8080}, Now: since, Publications: c.list})
		if r.Verdict != c.verdict || !strings.Contains(r.Summary, c.summary) {
			t.Errorf("%s: %s: %s, want %s: %s", name, r.Verdict, r.Summary, c.verdict, c.summary)
		}
		for i, chain := range r.Chains {
			want := c.verdict
			if c.chains != nil {
				want = c.chains[i]
			}
			if chain.Verdict != want {
				t.Errorf("%s: %s is %s, want %s", name, chain.Publication, chain.Verdict, want)
			}
		}
	}
}
