// SPDX-License-Identifier: Apache-2.0

package port

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// RuleKind is what kind of rule decides about a publication.
type RuleKind uint8

// The kinds of rules.
const (
	NoRule         RuleKind = iota
	RuleConfigured          // of the configuration
	RuleForward             // added at run time by a request of this kind, as the next ones
	RuleAllow
	RuleDeny
	RuleExpose
	RuleLabel    // labels of the owner
	RuleDefault  // what is done without a rule
	RuleUDP      // the default for the UDP ports of a guest's own network
	RuleEngine   // the default for the ports by which engines talk to themselves
	RuleWithheld // the default for what all origins withhold
)

var ruleKinds = [...]string{"", "rule", "forward", "allow", "deny", "expose", "label", "default", "udp", "engine", "withheld"}

// Runtime reports whether it is a rule that was added at run time.
func (k RuleKind) Runtime() bool { return k >= RuleForward && k <= RuleExpose }

// String returns the kind's name on the link.
func (k RuleKind) String() string { return ruleKinds[min(k, RuleWithheld)] }

// AppendText implements encoding.TextAppender.
func (k RuleKind) AppendText(b []byte) ([]byte, error) { return append(b, k.String()...), nil }

// MarshalText implements encoding.TextMarshaler.
func (k RuleKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (k *RuleKind) UnmarshalText(b []byte) error {
	i := slices.Index(ruleKinds[:], string(b))
	if i < 0 {
		return fmt.Errorf("kind of rule %q: want one of %q", b, ruleKinds[1:])
	}
	*k = RuleKind(i)
	return nil
}

// RuleRef names the rule that decides. The zero value is none. It is comparable.
type RuleRef struct {
	Kind   RuleKind `json:"kind"`
	OnHost bool     `json:"onHost,omitzero"` // one of a host's rules
	Number uint32   `json:"number,omitzero"` // its place in its list, from 1

	// Name is that in the configuration, what a request selects ("8080/tcp", "all"), or what
	// labels ask for: "label fairlead.expose: no". It is empty of a label of an owner who is not
	// known yet.
	Name string `json:"name,omitempty"`
}

// String returns for example "rule 3 (no-debug)", "host runtime rule 1 (deny all)" or "default",
// and "" for none.
func (r RuleRef) String() string {
	text := ""
	switch r.Kind {
	case NoRule:
		return ""
	case RuleConfigured:
		text = "rule " + strconv.FormatUint(uint64(r.Number), 10)
		if r.Name != "" {
			text += " (" + r.Name + ")"
		}
	case RuleForward, RuleAllow, RuleDeny, RuleExpose:
		text = fmt.Sprintf("runtime rule %d (%s)", r.Number, strings.TrimSpace(r.Kind.String()+" "+r.Name))
	case RuleLabel:
		text = r.Name
		if text == "" {
			text = "a label of its owner"
		}
	case RuleDefault:
		text = "default"
	case RuleUDP:
		text = "default: udp well-known"
	case RuleEngine:
		text = "default: engine's own ports"
	case RuleWithheld:
		text = "default: withheld"
	}
	if r.OnHost {
		return "host " + text
	}
	return text
}

// Here returns the rule as one of a host or of a guest.
func (r RuleRef) Here(onHost bool) RuleRef {
	r.OnHost = onHost
	return r
}
