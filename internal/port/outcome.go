// SPDX-License-Identifier: Apache-2.0

package port

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// State is what became of a publication at one sink. Better states compare higher.
type State uint8

// The states, worst first, so that the best outcome is the maximum.
const (
	Denied   State = iota + 1 // a rule forbids it
	Failed                    // an error; it is tried again
	Conflict                  // somebody else holds the host address
	Pending                   // asked for, not yet answered
	Active                    // reachable
)

var states = [...]string{"", "denied", "failed", "conflict", "pending", "active"}

// String returns the state's name in JSON and in tables.
func (s State) String() string {
	if int(s) < len(states) {
		return states[s]
	}
	return fmt.Sprintf("state-%d", uint8(s))
}

// NoneByState returns counts by state that are all 0.
func NoneByState() map[State]int {
	return map[State]int{Denied: 0, Failed: 0, Conflict: 0, Pending: 0, Active: 0}
}

// AppendText implements encoding.TextAppender.
func (s State) AppendText(b []byte) ([]byte, error) { return append(b, s.String()...), nil }

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *State) UnmarshalText(b []byte) error {
	i := slices.Index(states[:], string(b))
	if i < 1 {
		return fmt.Errorf("state %q: want one of %q", b, states[1:])
	}
	*s = State(i)
	return nil
}

// Outcome is what a sink made of one publication at one host address. A
// publication that asks for several host addresses has several outcomes.
type Outcome struct {
	HostAddress netip.AddrPort `json:"hostAddress"`     // where it is, or would be, reachable; zero if nowhere
	Reason      Reason         `json:"reason,omitzero"` // of an active one, what is to be known of it
	Since       time.Time      `json:"-"`               // when this state began
	State       State          `json:"state"`
}

// Equal reports whether both are the same; Since does not count.
func (o Outcome) Equal(p Outcome) bool {
	return o.State == p.State && o.HostAddress == p.HostAddress && o.Reason == p.Reason
}

// Outcomes is what a sink reports after a Sync: for each key in it, all its
// outcomes, which replace the earlier ones. Other keys keep theirs.
type Outcomes map[Key][]Outcome

// SinkOutcome is an outcome with the sink that returned it.
type SinkOutcome struct {
	Sink string
	Outcome
}

// Equal reports whether both are the same; Since does not count.
func (o SinkOutcome) Equal(p SinkOutcome) bool { return o.Sink == p.Sink && o.Outcome.Equal(p.Outcome) }

// Answer is a host's word on a port: what became of it there. A guest decodes an Answer and
// nothing else.
type Answer struct {
	Key
	Outcomes List[Outcome] `json:"outcomes"` // at most MaxOutcomes
}
