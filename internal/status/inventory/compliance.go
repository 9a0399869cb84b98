// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// Compliance judges the ports of an agent's own node by a policy in a file, as an audit of
// its inventory does.
type Compliance struct {
	file string
	read func(path string) ([]byte, error)
	log  *slog.Logger

	mu     sync.Mutex
	policy *Policy // as the file last had one without mistakes; nil if it never had
	err    error   // why that is not what the file has now
}

// NewCompliance reads the policy. One with mistakes is no error here: each verdict says so.
func NewCompliance(file string, read func(path string) ([]byte, error), log *slog.Logger) *Compliance {
	c := &Compliance{file: file, read: read, log: log}
	c.Load()
	return c
}

// Load reads the policy again. If that fails the one before stays in effect.
func (c *Compliance) Load() {
	policy, err := c.parse()
	c.mu.Lock()
	had := c.policy != nil
	if c.err = err; err == nil {
		c.policy = &policy
	}
	c.mu.Unlock()
	if err != nil {
		c.log.Error("the policy of this node cannot be read", "file", c.file, "keptPrevious", had, "err", err)
	}
}

func (c *Compliance) parse() (Policy, error) {
	text, err := c.read(c.file)
	if err != nil {
		return Policy{}, err
	}
	return ParsePolicy(c.file, text)
}

// Verdict is what a policy says of a node.
type Verdict struct {
	File string
	// Known says that Violations are those of some policy, labels and ports of this node: the
	// last that could be read. Before the labels could be read there may be more violations.
	Known      bool
	Violations []status.Publication // ports that may not be open, with the reasons
	// Error is why that is not, or may not be, all: nil if policy, labels and ports are what
	// they are now.
	Error error
}

// Judge judges what the agent of a node reports. Unlike an audit it has the ports that the
// object's list omits, too. Labels that could never be read matter only to ports whose
// judgement hangs on them.
func (c *Compliance) Judge(name string, node Labels, r Report) Verdict {
	c.mu.Lock()
	policy, err := c.policy, c.err
	c.mu.Unlock()
	v := Verdict{File: c.file, Error: err}
	if policy == nil {
		return v
	}
	found, unsure := policy.violations(subject{port.Owner{Name: name, Labels: node.Labels}, !node.Known}, r.Ports)
	if policy.needsLabels(name) && (node.Known || unsure > 0) {
		v.Error = errors.Join(v.Error, node.unread())
	}
	if r.Starting || !slices.ContainsFunc(r.Conditions, func(c Condition) bool { return c.Type == ConditionReady && c.True }) {
		v.Error = errors.Join(v.Error, errors.New("ports may be missing: not all sources are live"))
	}
	// Some violations are worth an alert, but none is not known before all ports are judged.
	if v.Known = !r.Starting && (unsure == 0 || len(found) > 0); v.Known {
		v.Violations = found
	}
	return v
}

// unread returns why the labels are not known as they are now.
func (l Labels) unread() error {
	switch {
	case l.Err != nil:
		return fmt.Errorf("the node's labels cannot be read: %w", l.Err)
	case !l.Known:
		return errors.New("the node's labels are not read yet")
	}
	return nil
}

// namedViolations is how many violations a verdict names.
const namedViolations = 3

// String says in a sentence what is wrong, or that nothing is.
func (v Verdict) String() string {
	var parts []string
	switch {
	case v.Known && v.Error != nil:
		parts = append(parts, "by what was read last, "+v.count())
	case v.Known:
		parts = append(parts, v.count())
	}
	if v.Error != nil {
		parts = append(parts, "it cannot be judged as it is now: "+strings.ReplaceAll(v.Error.Error(), "\n", "; "))
	}
	return strings.Join(parts, "; ")
}

func (v Verdict) count() string {
	if len(v.Violations) == 0 {
		return "no port violates " + v.File
	}
	var named []string
	for _, p := range v.Violations[:min(len(v.Violations), namedViolations)] {
		named = append(named, strings.TrimSpace(fmt.Sprintf("%v %s", p.Key, status.Quote(p.Owner.Name)))+": "+p.Reason)
	}
	more := ""
	if n := len(v.Violations) - len(named); n > 0 {
		more = fmt.Sprintf(", and %d more", n)
	}
	return fmt.Sprintf("violations of %s: %d: %s%s", v.File, len(v.Violations), strings.Join(named, ", "), more)
}

// Condition is the verdict in the object.
func (v Verdict) Condition() Condition {
	c := Condition{Type: ConditionCompliant, Message: v.String()}
	switch {
	case v.Error != nil:
		c.Reason = "NotJudged"
	case len(v.Violations) > 0:
		c.Reason = "Violations"
	default:
		c.True, c.Reason = true, "NoViolations"
	}
	return c
}
