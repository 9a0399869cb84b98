// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/output"
)

// policyFile is a file that can be read, or cannot.
type policyFile struct {
	text string
	err  error
}

func (f *policyFile) read(string) ([]byte, error) { return []byte(f.text), f.err }

func (f *policyFile) compliance(log *output.Buffer) *Compliance {
	return NewCompliance("policy.yaml", f.read, slog.New(slog.NewTextHandler(log, nil)))
}

// What cannot be read is named, and is never a node without violations: what was read last
// stays in effect.
func TestComplianceKeepsThePolicy(t *testing.T) {
	file := &policyFile{err: fs.ErrNotExist}
	log := new(output.Buffer)
	c := file.compliance(log)
	judged := func(node Labels, r Report, known bool, violations int, says string) {
		t.Helper()
		v := c.Judge("n", node, r)
		if v.Known != known || len(v.Violations) != violations || (v.Error == nil) != !strings.Contains(says, "cannot be judged") || !strings.Contains(v.String(), says) {
			t.Errorf("known %v, %d violations, %q; want %v, %d, %q", v.Known, len(v.Violations), v, known, violations, says)
		}
		if c := v.Condition(); c.True != (v.Error == nil && violations == 0) || c.Message != v.String() {
			t.Errorf("condition %+v of %q", c, v)
		}
	}
	r := Report{Conditions: []Condition{{Type: ConditionReady, True: true}}, Ports: []Port{tcp("0.0.0.0", 22, "sshd"), tcp("0.0.0.0", 80, "web"), tcp("127.0.0.1", 5432, "db")}}
	edge := Labels{Known: true, Labels: map[string]string{"role": "edge"}}
	away := Labels{Known: true, Labels: edge.Labels, Err: errors.New("away")}
	judged(edge, r, false, 0, "cannot be judged as it is now: file does not exist")

	file.text, file.err = "rules: [{match: {ports: 22}, action: allow}]", nil
	c.Load()
	judged(Labels{}, r, true, 1, "violations of policy.yaml: 1: tcp 0.0.0.0:80 web: no rule allows it") // needs no labels
	judged(away, r, true, 1, "violations of policy.yaml: 1")
	for _, broken := range []policyFile{{"rules: {}", nil}, {"", fs.ErrNotExist}, {"", nil}} {
		*file = broken
		c.Load()
		judged(edge, r, true, 1, "cannot be judged")
	}
	if list := lines(log); len(list) != 4 || !strings.Contains(list[3], "keptPrevious=true") {
		t.Errorf("log %q, want a line for each file that was broken", list)
	}

	*file = policyFile{"policies: [{nodes: {labels: {role: edge}}, rules: [{match: {ports: 80}, action: allow}]}]\nrules: [{match: {ports: 22}, action: allow}]", nil}
	c.Load()
	judged(Labels{}, r, false, 0, "cannot be judged as it is now: the node's labels are not read yet")
	judged(Labels{Err: errors.New("forbidden")}, r, false, 0, "cannot be judged as it is now: the node's labels cannot be read: forbidden")
	judged(away, r, true, 0, "by what was read last, no port violates policy.yaml; it cannot be judged as it is now: the node's labels cannot be read: away")
	judged(edge, r, true, 0, "no port violates policy.yaml")
	judged(Labels{Known: true}, r, true, 1, "tcp 0.0.0.0:80 web")
	judged(edge, Report{Ports: r.Ports, Conditions: r.Conditions, Starting: true}, false, 0, "cannot be judged as it is now: ports may be missing")
	judged(edge, Report{Ports: r.Ports, Conditions: []Condition{{Type: ConditionReady}}}, true, 0, "cannot be judged as it is now: ports may be missing")

	for i := range 9 {
		r.Ports = append(r.Ports, tcp("0.0.0.0", 9000+i, "x\x1b[2J"))
	}
	judged(edge, r, true, 9, "and 6 more")
	if s := c.Judge("n", edge, r).String(); strings.Contains(s, "\x1b") {
		t.Errorf("%q has characters for a terminal", s)
	}
}

// Where the Node cannot be read, which may be absent, only what hangs on its labels is not judged.
func TestComplianceByNameWithoutTheNode(t *testing.T) {
	const (
		byName  = "{nodes: {name: n}, rules: [{match: {ports: 22}, action: allow}, {match: {ports: 25}, action: deny}]}"
		byLabel = "{nodes: {labels: {role: edge}}, rules: [{match: {ports: 80}, action: allow}, {match: {ports: 81}, action: deny}]}"
		other   = "{nodes: {name: other, labels: {role: edge}}, rules: [{match: {ports: 1-9999}, action: allow}]}"
	)
	for _, c := range []struct {
		policy     string
		ports      []int
		known      bool
		violations string
		fails      bool
	}{
		{byName, []int{22}, true, "[]", false},
		{byName, []int{22, 25, 80}, true, "[25 80]", false},
		{byName + "," + byLabel, []int{22}, true, "[]", false},
		{byName + "," + byLabel, []int{22, 25}, true, "[25]", false},
		{byLabel, []int{81}, true, "[81]", false}, // whether that denies it or nothing allows it
		{byName + "," + byLabel, []int{22, 80}, false, "[]", true},
		{byName + "," + byLabel, []int{25, 80}, true, "[25]", true}, // at least
		{other, []int{22}, true, "[22]", false},
	} {
		file := &policyFile{text: "policies: [" + c.policy + "]"}
		r := Report{Conditions: []Condition{{Type: ConditionReady, True: true}}}
		for _, p := range c.ports {
			r.Ports = append(r.Ports, tcp("0.0.0.0", p, "x"))
		}
		gone := Labels{Err: errors.New("not found")}
		v := file.compliance(new(output.Buffer)).Judge("n", gone, r)
		found := []uint16{}
		for _, p := range v.Violations {
			found = append(found, p.Port)
		}
		if v.Known != c.known || fmt.Sprint(found) != c.violations || errors.Is(v.Error, gone.Err) != c.fails {
			t.Errorf("%s of %v: known %v, violations %v, error %v; want %+v", c.policy, c.ports, v.Known, found, v.Error, c)
		}
	}
}

// The labels are those of the Node, and stay when it cannot be read any more.
func TestLabelsOfTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI("n")
		a.refuse["get nodes"] = 403
		g := startAgent(t, a, "n", nil, tcp("0.0.0.0", 22, "sshd"))
		if l := g.Labels(); l.Known || l.Err != nil {
			t.Errorf("before the first look: %+v", l)
		}
		labels := func(known bool, zone, fails string) {
			t.Helper()
			l := g.Labels()
			if l.Known != known || l.Labels["zone"] != zone || (l.Err != nil) != (fails != "") || l.Err != nil && !strings.Contains(l.Err.Error(), fails) {
				t.Errorf("labels %+v, want known %v, zone %q, error %q", l, known, zone, fails)
			}
		}
		pass(interval + time.Second)
		labels(false, "", "verb get of nodes is missing")
		set := func(zone string, code int) {
			a.set(func() {
				n := *a.nodes["n"]
				n.Labels = map[string]string{"zone": zone}
				a.nodes["n"] = &n
				a.refuse["get nodes"] = code
			})
		}
		set("a", 0)
		pass(2 * time.Minute)
		labels(true, "a", "")
		set("b", 0)
		pass(RenewEvery)
		labels(true, "b", "")
		set("c", 403)
		pass(RenewEvery)
		labels(true, "b", "verb get of nodes is missing")
		set("c", 0)
		pass(time.Minute + time.Second)
		labels(true, "c", "")
	})
}

// An agent that judges itself and an audit of what it wrote come to the same.
func TestComplianceAgreesWithAudit(t *testing.T) {
	for seed := range uint64(300) {
		g := generator{rand.New(rand.NewPCG(seed, 19))}
		text, labels := g.policy(), g.labels()
		policy, err := ParsePolicy("policy.yaml", []byte(text))
		if err != nil {
			t.Fatalf("seed %d: %v in\n%s", seed, err, text)
		}
		r := Report{Conditions: []Condition{{Type: ConditionReady, True: g.IntN(8) > 0}}}
		for range g.IntN(60) {
			r.Ports = append(r.Ports, g.port())
		}
		slices.SortFunc(r.Ports, func(p, q Port) int { return p.Compare(q.Key) })
		r.Ports = slices.CompactFunc(r.Ports, func(p, q Port) bool { return p.Key == q.Key })
		audit := policy.Audit(map[string]map[string]string{"n": labels}, []NodeInventory{objectOf(t, "n", r)}, noon)
		v := (&policyFile{text: text}).compliance(new(output.Buffer)).Judge("n", Labels{Known: true, Labels: labels}, r)
		if (audit.Nodes[0].Error == "") != (v.Error == nil) {
			t.Errorf("seed %d: the audit says %q, the agent %v", seed, audit.Nodes[0].Error, v.Error)
		}
		got, want := []string{}, []string{}
		for _, p := range v.Violations {
			got = append(got, fmt.Sprint(p.Key, p.Owner, p.Reason))
		}
		for _, p := range audit.Violations {
			want = append(want, fmt.Sprint(p.Key, p.Owner, p.Reason))
		}
		if d := cmp.Diff(want, got); !v.Known || d != "" {
			t.Errorf("seed %d: known %v, audit and agent differ:\n%s\n%s", seed, v.Known, d, text)
		}
	}
}

// generator makes ports and policies that meet each other often.
type generator struct{ *rand.Rand }

func (g generator) one(of ...string) string { return of[g.IntN(len(of))] }

func (g generator) labels() map[string]string {
	return map[string]string{"role": g.one("edge", "inner"), "zone": g.one("a", "b", "c")}
}

func (g generator) port() Port {
	owner := port.Owner{
		Kind: port.OwnerKind(g.IntN(4)), Name: g.one("web", "sshd", "", "\xff\xfe", strings.Repeat("ä", 200)), Namespace: g.one("", "shop", "kube-system"), ID: "0123456789abcdef",
	}
	return Port{
		Key: port.Key{
			Protocol: []port.Protocol{port.TCP, port.UDP}[g.IntN(2)], Port: uint16(20 + g.IntN(8)),
			Address: netip.MustParseAddr(g.one("0.0.0.0", "::", "127.0.0.1", "10.1.2.3", "fd00::1", "192.168.0.9")),
		},
		State: port.State(1 + g.IntN(5)), Withheld: g.IntN(6) == 0, Owner: OwnerOf(owner),
		Sources: []string{g.one("socket", "nat")}, Since: noon,
	}
}

func (g generator) policy() string {
	var b strings.Builder
	if g.IntN(2) == 0 {
		b.WriteString("policies:\n")
		for range 1 + g.IntN(3) {
			nodes := g.one("name: n", "name: other", "labels: {role: edge}", "labels: {role: edge, zone: a}", `labels: {zone: "?"}`, `labels: {zone: "*"}`)
			fmt.Fprintf(&b, "  - nodes: {%s}\n    rules: %s\n", nodes, g.rules())
		}
	}
	fmt.Fprintf(&b, "rules: %s\n", g.rules())
	return b.String()
}

func (g generator) rules() string {
	var list []string
	for range g.IntN(4) {
		match := []string{}
		for _, of := range [][]string{
			{"ports: 22", "ports: 20-23", "ports: [21, 25-26]"}, {"protocol: tcp", "protocol: udp"}, {"address: 10.0.0.0/8", "address: 0.0.0.0", `address: "::"`},
			{"owner: process", "owner: container"}, {"name: web", `name: "s*"`}, {"namespace: shop", `namespace: "kube-*"`}, {"source: nat"},
		} {
			if g.IntN(4) == 0 {
				match = append(match, g.one(of...))
			}
		}
		if len(match) == 0 {
			match = append(match, "ports: 20-22")
		}
		list = append(list, fmt.Sprintf("{match: {%s}, action: %s}", strings.Join(match, ", "), g.one("allow", "deny")))
	}
	return "[" + strings.Join(list, ", ") + "]"
}
