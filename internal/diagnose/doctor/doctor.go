// SPDX-License-Identifier: Apache-2.0

// Package doctor says whether the guest has what fairlead needs, what fairlead
// made of it, and what to do about what is missing. Judging is pure; gathering
// only looks, and works without a running agent.
package doctor

import (
	"time"

	"github.com/fairlead/fairlead/internal/diagnose/explain"
)

// State is how well something is.
type State string

// The states.
const (
	OK      State = "ok"
	Warning State = "warning" // works, with something lost
	Failing State = "failing" // does not work
)

// Check is one thing that was looked at.
type Check struct {
	Area   string `json:"area"` // "kernel", "observer", ...
	Name   string `json:"name"`
	State  State  `json:"state"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy"` // empty if it is ok
}

// Report is all checks; its state is the worst of them. Its JSON form is stable.
type Report struct {
	State   State   `json:"state"`
	Version string  `json:"version"`
	Checks  []Check `json:"checks"`
}

// Agent is what only an agent knows: one that runs, or one whose sources were
// started for a moment to look.
type Agent struct {
	Running      bool             `json:"running"`
	Version      string           `json:"version"`
	PID          int              `json:"pid"`
	NetNS        string           `json:"netns"`
	Observer     string           `json:"observer"` // the mode that is configured
	ConfigFile   string           `json:"configFile"`
	TokenFile    string           `json:"tokenFile"`
	Hooks        []Hook           `json:"hooks"`
	Sources      []Source         `json:"sources"`
	Unread       []explain.Unread `json:"notUnderstood"` // NAT rules, some of them
	UnreadCount  int              `json:"notUnderstoodCount"`
	Link         *Link            `json:"link,omitempty"`
	Drops        uint64           `json:"drops"`
	Drift        uint64           `json:"drift"`
	DumpFailures uint64           `json:"dumpFailures"`
	Publications int              `json:"publications"`
}

// Hook is how one capability is observed.
type Hook struct {
	Capability string `json:"capability"`
	Method     string `json:"method"`
	Lost       string `json:"lost"`  // what this method does not see
	Error      string `json:"error"` // why better methods failed
}

// Source is the state of one source.
type Source struct {
	Name   string    `json:"name"`
	State  string    `json:"state"`
	Method string    `json:"method"`
	Error  string    `json:"error"`
	Since  time.Time `json:"since"`
	// Warnings name what the source could not use, while all else goes on.
	Warnings []string `json:"warnings"`
}

// Link is the way to the host.
type Link struct {
	Endpoints []string `json:"endpoints"`
	Connected bool     `json:"connected"`
	Sessions  uint64   `json:"sessions"` // since the start
}

// Facts is all that is judged.
type Facts struct {
	Version    string
	Now        time.Time
	Agent      *Agent // nil if even a look without an agent failed
	AgentError string // why no agent answers; "" if one does
	LookError  string // why the look failed

	Config Config
	Kernel Kernel
	Limits Limits
	WSL    *WSL // nil outside WSL
	Clock  Clock
	Caps   Caps
}

// Config is the agent's configuration.
type Config struct {
	File       string // "" if there is none
	Error      string // why it is refused
	Rules      int
	TokenFile  string
	TokenError string // "" if it is there and private
	NeedsToken bool
}

// Kernel is what the kernel has.
type Kernel struct {
	Release string
	BTF     bool
	Modules []Module
	Diag    string // why sockets cannot be dumped, "" if they can
}

// Module is a part of the kernel that something needs.
type Module struct {
	Name   string
	Loaded bool
	For    string // what is lost without it
	Error  string // why it is not known whether it is there
}

// Limits of the process.
type Limits struct {
	Files     uint64 // RLIMIT_NOFILE, soft
	OpenFiles int    // of the agent, -1 if unknown
}

// WSL is what Windows runs this guest in.
type WSL struct {
	Version    int    // 1 or 2
	Networking string // "nat", "mirrored", "none", "virtioproxy", or "" if unknown
	Error      string // why the mode is unknown
}

// Clock is the wall clock.
type Clock struct {
	Source       string // tsc, hyperv_clocksource_tsc_page, ...
	Synchronised bool
	Built        time.Time // no clock can be before it; zero if unknown
}

// Caps is what the agent, or else this process, may do.
type Caps struct {
	Effective uint64 // the mask of capabilities(7)
	Whose     string // "the agent (pid 811)" or "this process"
}
