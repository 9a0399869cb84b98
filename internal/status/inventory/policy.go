// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// Policy states which ports may be open wider than loopback on which nodes. What no rule
// allows may not. It closes nothing.
type Policy struct{ parts []part }

// part is a list of rules for some nodes.
type part struct {
	nodes rules.Match // of the node's name and labels; all if empty
	rules *rules.Set
	title string // "" for the rules of all nodes
}

// policyDocument is the content of a policy's file.
type policyDocument struct {
	Policies []policyPart `key:"policies" list:"policies (\"- nodes: {labels: {…}}\")"`
	Rules    []auditRule  `key:"rules" list:"rules (\"- action: allow\")"`
}

type policyPart struct {
	Nodes nodeMatch   `key:"nodes"`
	Rules []auditRule `key:"rules" list:"rules (\"- action: allow\")"`
}

// nodeMatch is about the name and the labels of nodes.
type nodeMatch struct {
	Name   string            `key:"name" is:"text"`
	Labels map[string]string `key:"labels"`
}

// Check refuses patterns that match no node: no name and no label of a Node has brackets.
func (m nodeMatch) Check() (key string, err error) {
	const why = "%q matches no node: * is any text and ? one character, and brackets are not for sets: list each in a policy of its own"
	if strings.ContainsAny(m.Name, "[]") {
		return "name", fmt.Errorf(why, m.Name)
	}
	for _, v := range m.Labels {
		if strings.ContainsAny(v, "[]") {
			return "labels", fmt.Errorf(why, v)
		}
	}
	return "", nil
}

// auditRule is a rule without what an inventory does not have or cannot do.
type auditRule struct{ rules.Rule }

// Check returns what of the rule is wrong, or for an audit.
func (r auditRule) Check() (key string, err error) {
	switch {
	case len(r.Match.Labels) > 0:
		return "match", errors.New("labels: an inventory has no labels of owners")
	case r.Match.Guest != "":
		return "match", errors.New("guest: an inventory has nodes")
	case r.HostPort != rules.HostPort{} || r.HostAddress != rules.Asked() || r.OnConflict != 0 || r.ProxyProtocol != 0:
		return "", errors.New("hostPort, hostAddress, onConflict and proxyProtocol: an audit opens nothing")
	}
	return r.Rule.Check()
}

// ParsePolicy reads a policy; name names it in errors. The error joins all mistakes, each
// with its position.
func ParsePolicy(name string, data []byte) (p Policy, err error) {
	root, err := yamltree.Parse(name, data)
	if err != nil {
		return p, err
	}
	if root.IsNull() {
		return p, fmt.Errorf("%s: empty: want rules or policies", name)
	}
	var file policyDocument
	if err := rules.Decoder().Decode(root, &file); err != nil {
		return p, err
	}
	for i, part := range file.Policies {
		match := rules.Match{Name: part.Nodes.Name, Labels: part.Nodes.Labels}
		if err := p.add(match, fmt.Sprintf("policy %d, ", i+1), part.Rules); err != nil {
			return Policy{}, err
		}
	}
	if file.Rules == nil {
		return p, nil
	}
	if err := p.add(rules.Match{}, "", file.Rules); err != nil {
		return Policy{}, err
	}
	return p, nil
}

// add adds the rules for some nodes.
func (p *Policy) add(nodes rules.Match, title string, list []auditRule) error {
	made := make([]rules.Rule, len(list))
	for i, r := range list {
		made[i] = r.Rule
	}
	set, err := rules.New(rules.Asked(), made)
	p.parts = append(p.parts, part{nodes, set, title})
	return err
}

// subject is a node that is judged.
type subject struct {
	node       port.Owner
	unlabelled bool // the labels are not known
}

// matches reports whether a part is for the node, and whether that is sure: where a part
// names labels that are not known, its name can only rule it out.
func (p part) matches(s subject) (on, sure bool) {
	if !s.unlabelled || len(p.nodes.Labels) == 0 {
		return p.nodes.MatchesOwner(s.node), true
	}
	named := p.nodes
	named.Labels = nil
	return named.MatchesOwner(s.node), !named.MatchesOwner(s.node)
}

// decide returns why a port may not be open on a node; "" if it may. It is not sure if that
// hangs on labels that are not known.
func (p Policy) decide(s subject, pub port.Publication) (why string, sure bool) {
	allowed, denied := false, false // by parts that may be for the node
	for _, part := range p.parts {
		on, certain := part.matches(s)
		if !on {
			continue
		}
		title, deny, ok := part.rules.First(pub)
		switch {
		case !ok:
			continue
		case !certain:
			allowed, denied = allowed || !deny, denied || deny
			continue
		case !deny:
			return "", !denied
		case pub.Owner.Kind == port.OwnerUnknown:
			return "denied by " + part.title + title + "; its owner is not known", !allowed
		}
		return "denied by " + part.title + title, !allowed
	}
	return "no rule allows it", !allowed
}

// Audit is the output of "ls --cluster --violations -o json".
type Audit struct {
	// Violations are ports that may not be open; the reason is the rule, or that none allows it.
	Violations []status.Publication `json:"violations"`
	Nodes      []Audited            `json:"nodes"`
	Warnings   []string             `json:"warnings,omitempty"` // why the policy may not say what is meant
}

// Audited is a node that was audited, or could not be.
type Audited struct {
	Name       string   `json:"name"`
	Wide       int      `json:"wide"` // ports that are open wider than loopback
	Violations int      `json:"violations"`
	Error      string   `json:"error,omitempty"`    // why the audit of this node says nothing
	Warnings   []string `json:"warnings,omitempty"` // why it may not say all
}

// Passed reports whether each node was audited and has no violation.
func (a Audit) Passed() bool {
	return len(a.Violations) == 0 && !slices.ContainsFunc(a.Nodes, func(n Audited) bool { return n.Error != "" })
}

// Audit compares the inventories of nodes, given with their labels, to the policy. An
// inventory of a node that is not given is left out.
func (p Policy) Audit(nodes map[string]map[string]string, objects []NodeInventory, now time.Time) Audit {
	a := Audit{Violations: []status.Publication{}, Nodes: []Audited{}}
	byName := make(map[string]*NodeInventory)
	for i := range objects {
		byName[objects[i].Name] = &objects[i]
	}
	for name, labels := range nodes {
		n, found := p.audit(port.Owner{Name: name, Labels: labels}, byName[name], now)
		a.Nodes, a.Violations = append(a.Nodes, n), append(a.Violations, found...)
	}
	slices.SortFunc(a.Nodes, func(m, n Audited) int { return cmp.Compare(m.Name, n.Name) })
	slices.SortStableFunc(a.Violations, func(m, n status.Publication) int { return cmp.Compare(m.Node, n.Node) })
	return a
}

// Idle returns which parts of the policy are for none of all nodes, which are given with their
// labels.
func (p Policy) Idle(nodes map[string]map[string]string) (list []string) {
	for _, part := range p.parts {
		used := part.title == "" // for all nodes
		for name, labels := range nodes {
			used = used || part.nodes.MatchesOwner(port.Owner{Name: name, Labels: labels})
		}
		if !used {
			list = append(list, strings.TrimSuffix(part.title, ", ")+" is for no node: none has the name and the labels of its nodes")
		}
	}
	return list
}

// unreliable returns why a node's list says nothing, or not all; "" if it can be relied on.
func unreliable(o *NodeInventory, source status.Source, now time.Time) string {
	ahead := o.Status.Holder.Renewed.Sub(now)
	switch {
	case source.Error != "":
		return source.Error
	case ahead > HeldFor:
		return fmt.Sprintf("its clock is %s ahead of this one, so that it is not known whether its inventory is out of date", status.Age(ahead))
	case !slices.ContainsFunc(o.Status.Conditions, func(c metav1.Condition) bool {
		return c.Type == ConditionReady && c.Status == metav1.ConditionTrue
	}):
		return "its list may lack ports: its agent does not report that all its sources are live"
	}
	return ""
}

// audit audits one node, whose object may be nil.
func (p Policy) audit(node port.Owner, o *NodeInventory, now time.Time) (Audited, []status.Publication) {
	n := Audited{Name: node.Name}
	if o == nil {
		n.Error = "no inventory: does an agent run there with cluster.inventory?"
		return n, nil
	}
	source := sourceOf(o, now)
	n.Wide, n.Warnings = o.Status.Ports.Wide, source.Warnings
	n.Error = unreliable(o, source, now)
	ports, err := o.Status.Decode()
	if err != nil {
		n.Error = err.Error()
		return n, nil
	}
	wide := slices.DeleteFunc(ports, func(p Port) bool { return !p.Wide() })
	if listed := count(wide).Total; listed != o.Status.Ports.Wide {
		n.Error = fmt.Sprintf("%d ports are open wider than loopback, of which its list has %d", o.Status.Ports.Wide, listed)
	}
	found, _ := p.violations(subject{node: node}, wide)
	n.Violations = len(found)
	return n, found
}

// violations returns which ports may not be open on a node, with the reasons, and how many
// cannot be judged without its labels.
func (p Policy) violations(s subject, ports []Port) (found []status.Publication, unsure int) {
	for _, listed := range ports {
		if !listed.Wide() {
			continue
		}
		switch why, sure := p.decide(s, listed.publication()); {
		case !sure:
			unsure++
		case why != "":
			row := listed.row(s.node.Name)
			row.Reason = why
			found = append(found, row)
		}
	}
	return found, unsure
}

// needsLabels reports whether a part may be for the node of that name, by its labels.
func (p Policy) needsLabels(name string) bool {
	return slices.ContainsFunc(p.parts, func(part part) bool {
		on, sure := part.matches(subject{port.Owner{Name: name}, true})
		return on && !sure
	})
}
