// SPDX-License-Identifier: Apache-2.0

// Package firewall says what the firewall of this system does with connections of other
// machines to a port, as far as it can be read, and which command changes that. It changes
// nothing.
package firewall

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// Report is what the firewall does.
type Report struct {
	Text    string // one human-readable line
	Command string // for a shell: lets connections in, or shows what decides; empty if none is needed
	Refuses bool   // surely, some of them; else it lets them in, or that is not known
}

// Firewall is that of this system as it was when it was read. It is safe for concurrent use.
type Firewall struct {
	text  string
	judge func(slot port.Slot, v6 bool, lasts time.Duration) Report
}

// Read reads the firewall of this system, for at most some seconds. What cannot be read is
// said by what it returns.
func Read(ctx context.Context) Firewall { return readSystem(ctx) }

// String says in one line what the firewall is and does by default.
func (f Firewall) String() string { return f.text }

// Check returns what the firewall does with packets of other machines to an address. Lasts
// is for how long the address is open, 0 for without an end.
func (f Firewall) Check(protocol port.Protocol, at netip.AddrPort, lasts time.Duration) Report {
	return f.judge(port.Slot{Protocol: protocol, Port: at.Port()}, at.Addr().Is6(), lasts)
}

// CheckAll is Check for several addresses in one report: a firewall may tell families and
// ports apart.
func (f Firewall) CheckAll(protocol port.Protocol, at []netip.AddrPort, lasts time.Duration) Report {
	type judged struct {
		port uint16
		v6   bool
	}
	seen := make(map[judged]bool)
	var all Report
	var texts, commands, labelled []string
	for _, a := range at {
		k := judged{a.Port(), a.Addr().Is6()}
		if seen[k] {
			continue
		}
		seen[k] = true
		r := f.Check(protocol, a, lasts)
		all.Refuses = all.Refuses || r.Refuses
		labelled = append(labelled, a.String()+": "+r.Text)
		if !slices.Contains(texts, r.Text) {
			texts = append(texts, r.Text)
		}
		if r.Command != "" && !slices.Contains(commands, r.Command) {
			commands = append(commands, r.Command)
		}
	}
	if len(texts) > 1 {
		texts = labelled
	}
	all.Text, all.Command = strings.Join(texts, "; "), strings.Join(commands, " && ")
	return all
}
