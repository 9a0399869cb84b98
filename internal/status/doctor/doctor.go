// SPDX-License-Identifier: Apache-2.0

// Package doctor decides whether the guest has what fairlead needs, and what to do
// about what is missing. It is pure: package gather collects the facts.
package doctor

import (
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// State is the state of a check.
type State string

// The states.
const (
	OK      State = "ok"
	Warning State = "warning" // works, with something lost
	Failing State = "failing" // does not work
)

// Check is the result of one check.
type Check struct {
	Area   string `json:"area"` // "kernel", "observer", ...
	Name   string `json:"name"`
	State  State  `json:"state"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy"` // empty if it is ok
	// More is detail for who wants it, as the errors of methods that are not needed.
	More string `json:"more,omitempty"`
}

// Report is all checks; its state is the worst of them. Its JSON form is stable.
type Report struct {
	State   State   `json:"state"`
	Version string  `json:"version"`
	Checks  []Check `json:"checks"`
}

// Agent is what an agent knows about itself: a running one, or one whose sources were
// run for a moment.
type Agent struct {
	Running      bool             `json:"running"`
	Version      string           `json:"version"`
	PID          int              `json:"pid"`
	NetNS        string           `json:"netns"`
	InCluster    bool             `json:"inCluster,omitempty"` // it runs in a pod
	Observer     string           `json:"observer"`            // the configured mode
	ListsOnly    bool             `json:"listsOnly,omitempty"` // it publishes nothing
	ConfigFile   string           `json:"configFile"`
	Waiting      []string         `json:"waitingForRestart,omitempty"` // keys of the file that changed, and need it
	Settings     []config.Setting `json:"settings"`
	Own          []uint64         `json:"ownSockets"` // cookies of sockets of the agent itself, which it does not publish
	Hooks        []Hook           `json:"hooks"`
	Sources      []Source         `json:"sources"`
	Unread       []explain.Unread `json:"unsupportedRules"` // NAT rules, the first ones
	UnreadCount  int              `json:"unsupportedRuleCount"`
	Link         *Link            `json:"link,omitempty"`
	Drops        uint64           `json:"drops"`
	Drift        uint64           `json:"drift"`
	DumpFailures uint64           `json:"dumpFailures"`
	Publications int              `json:"publications"`
	Unpublished  map[string]int   `json:"unpublished,omitempty"` // of these, how many are not published, by reason

	Labels []string `json:"labelWarnings,omitempty"` // labels of containers and Services without effect, sorted

	// Inventory is nil unless the agent writes one to the Kubernetes API.
	Inventory *Inventory `json:"inventory,omitempty"`
	// StartCapabilities is the mask of capabilities that the agent was started with: those
	// that attaching hooks needs are dropped later.
	StartCapabilities uint64 `json:"startCapabilities"`
	// Unconfined is why the agent keeps capabilities that it does not need, "" if it does not.
	Unconfined string `json:"unconfined,omitempty"`
}

// SelfTest is whether the kernel's events of sockets and NAT rules arrived that an agent
// made for that, and whether an agent that starts now has the rows of the one that runs.
type SelfTest struct {
	Error    string         // why not all was tried
	Steps    []SelfTestStep // in their order
	Compared *Comparison    // nil if no agent runs
}

// Comparison is of a running agent and one that started beside it, which only observes.
type Comparison struct {
	Rows        int      // of the running agent
	Differences []string // that remained, as of status.Differences
	Error       string   // why nothing was compared
}

// SelfTestStep is one thing that was done, and the event of it.
type SelfTestStep struct {
	Name         string // "tcp open"
	Method       string // by which the event is observed
	Microseconds int64
	Error        string // why none arrived
	Remedy       string
}

// Hook is how one capability is observed.
type Hook struct {
	Capability string `json:"capability"`
	Method     string `json:"method"`
	Lost       string `json:"limitation"` // what this method does not see
	Error      string `json:"error"`      // why better methods failed
	// Failed are the names of these methods, best first.
	Failed []string `json:"failed,omitempty"`
	// Denied says that the kernel denied a better method for lack of privileges, which
	// some kernels also do for what they do not support.
	Denied bool `json:"denied,omitempty"`
	// Absent is what a better method attaches to and the kernel does not have.
	Absent string `json:"absent,omitempty"`
	// Verdict is what the verifier stated of a better method's program that it refused.
	Verdict string `json:"verdict,omitempty"`
	// Memlock says that the limit of locked memory, which counts before Linux 5.11, could not
	// be raised.
	Memlock bool `json:"memlock,omitempty"`
	// Hang says that a better method could hang the kernel when the agent's PID namespace ends,
	// as before Linux 6.9.
	Hang bool `json:"hang,omitempty"`
}

// Source is the state of one source.
type Source struct {
	Name   string    `json:"name"`
	State  string    `json:"state"`
	Method string    `json:"method"`
	Lack   port.Lack `json:"lack,omitempty"`
	Error  string    `json:"error"`
	Since  time.Time `json:"since"`
	// Warnings name entries that the source had to ignore.
	Warnings []string `json:"warnings"`
}

// Link is the connection to the host.
type Link struct {
	Endpoints []string         `json:"endpoints"`
	Connected bool             `json:"connected"`
	Sessions  uint64           `json:"sessions"`          // since the start
	Rivals    []string         `json:"rivals,omitempty"`  // two hosts that take the agent from each other
	Refused   *explain.Refusal `json:"refused,omitempty"` // the last host that was refused, if none is connected
	Removed   []string         `json:"removed,omitempty"` // sockets that were removed while the agent listens on them
}

// Inventory is what became of the node's inventory in the Kubernetes API.
type Inventory struct {
	Node    string    `json:"node"`
	Error   string    `json:"error,omitempty"`   // why it is not as it should be
	Written time.Time `json:"written,omitzero"`  // by this agent, for the last time
	Omitted int       `json:"omitted,omitempty"` // ports that its list has no room for
	Policy  *Policy   `json:"policy,omitempty"`  // nil without one
}

// Policy is what a policy says of the node.
type Policy struct {
	File       string `json:"file"`
	Judged     bool   `json:"judged"`     // by policy, labels and ports as they are now
	Violations int    `json:"violations"` // by those that could be read last
	Says       string `json:"says"`       // the verdict in a sentence
}

// Facts is what is judged.
type Facts struct {
	Version    string
	Now        time.Time
	Agent      *Agent // nil if even running the sources failed
	AgentError string // why no agent answers; "" if one does
	Denied     bool   // one has the control socket, but this user may not ask it
	// Tried is the self-test that was asked of doctor itself, nil if it was not.
	Tried     *SelfTest
	LookError string // why the sources could not be run

	Config Config
	Kernel Kernel
	Limits Limits
	WSL    *WSL // nil outside WSL
	Clock  Clock
	Caps   Caps
}

// Config is the agent's configuration.
type Config struct {
	File       string // "" if there is none; of one that is refused, only if it is not the usual one
	Error      string // why it is refused
	Rules      int
	TokenFile  string
	TokenError string // "" if it is there and private
	TokenHeld  bool   // this user may not read it
	NeedsToken bool
}

// check is the command that lists the mistakes of the file.
func (c Config) check(flags string) string {
	command := "fairlead config check" + flags
	switch {
	case c.File == "":
		return command
	case strings.Contains(c.File, " "):
		return command + ` "` + c.File + `"`
	}
	return command + " " + c.File
}

// Kernel is what the kernel has.
type Kernel struct {
	Release string
	BTF     bool
	Modules []Module
	Diag    string // why sockets cannot be dumped, "" if they can
	// Paranoid is sysctl kernel.perf_event_paranoid, 0 if there is none.
	Paranoid int

	// Config has those of KernelOptions that are set in the kernel's configuration, as "y"
	// or "m", by name. It is nil if the configuration is not known.
	Config     map[string]string
	ConfigFile string // where it was read
	// Lockdown is the mode of lockdown: none, integrity or confidentiality; "" if unknown.
	Lockdown string
}

// Module is a part of the kernel that a feature needs.
type Module struct {
	Name   string
	Loaded bool
	For    string // what does not work without it
	Error  string // why its presence is unknown
}

// Limits of the process.
type Limits struct {
	Files     uint64 // RLIMIT_NOFILE, soft
	OpenFiles int    // of the agent, -1 if unknown
}

// WSL is the Windows Subsystem for Linux that this guest runs in.
type WSL struct {
	Version    int    // 1 or 2
	Networking string // "nat", "mirrored", "none", "virtioproxy", "consomme", or "" if unknown
	Error      string // why the mode is unknown
}

// Clock is the wall clock.
type Clock struct {
	Source       string // tsc, hyperv_clocksource_tsc_page, ...
	Synchronised bool
	Built        time.Time // when this program was built; zero if unknown
}

// Caps are the capabilities of the agent, or else of this process.
type Caps struct {
	Effective uint64 // the mask of capabilities(7)
	Whose     string // "the agent (pid 811)" or "this process"
}
