// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Socket is one socket that serves a port, or could. There may be many, so small fields
// are side by side.
type Socket struct {
	// Cookie identifies the socket for the life of the kernel (SO_COOKIE).
	Cookie uint64

	// Address is the local address, unmapped, without a zone; Device has the
	// interface of a link-local address.
	Address netip.Addr
	Port    uint16 // 1 to 65535

	Protocol port.Protocol

	// V6Only says that a :: socket does not serve IPv4 (IPV6_V6ONLY). It is
	// false for all other addresses.
	V6Only bool

	// Listening is true for TCP in LISTEN and for UDP that is bound and has no
	// peer. It is false for TCP that is bound only.
	Listening bool

	// Sought is true after /proc was searched for the process, and did not have it, or had
	// again the one that was known (Observer.SearchOwner). Where it cannot be read in full,
	// that is after three searches.
	Sought bool

	UID    uint32 // the socket's owner
	Inode  uint32 // of the socket, as in /proc/PID/fd
	Device uint32 // interface index that the socket is bound to, or 0
	NetNS  uint32 // inode of the network namespace

	// PID is the owner, as the package comment says, in the agent's pid namespace; 0 if unknown
	// or not visible there. Comm is the name of its first thread, up to 15 bytes as the
	// process chose them: data to be quoted.
	PID  uint32
	Comm string

	// PIDSeen is CLOCK_MONOTONIC in nanoseconds when PID was that process, 0 if
	// PID is. A process that has the number now and started later is another one.
	PIDSeen int64

	CgroupID uint64 // inode of the socket's cgroup2 directory, 0 if unknown

	// ProcessCgroup is the cgroup of PID in the hierarchies of cgroup v1, at PIDSeen.
	ProcessCgroup cgroup.V1

	// Observed is CLOCK_MONOTONIC in nanoseconds at the event, 0 from a dump.
	Observed int64
}

// Event is a socket that appeared or changed, or, if Gone, one that no longer
// serves. A gone socket is as it was last reported, except for Observed.
type Event struct {
	Gone   bool
	Socket Socket
}

// Handler receives what the observer sees. Its methods are called one at a time
// and must not block: while one runs, no event is read.
type Handler interface {
	// Methods receives how each capability is observed, once, before the first
	// Replace. The slice must not be changed.
	Methods([]kernel.Method)
	// Replace receives the complete set, after the first dump and after a loss.
	// The handler may keep the slice.
	Replace([]Socket)
	// Apply receives changes in the order in which they happened. The slice is
	// valid only during the call.
	Apply([]Event)
	// Stale is called when a dump failed: the reported state may be outdated until
	// the next Replace.
	Stale(error)
}

// Capabilities, as kernel.Method names them.
const (
	TCPListen  = "tcp-listen"  // TCP sockets that listen
	TCPBind    = "tcp-bind"    // TCP sockets that are bound and do not listen
	UDPBind    = "udp-bind"    // UDP sockets that are bound
	UDPConnect = "udp-connect" // bound UDP sockets that get a peer, or lose it
	Device     = "device"      // sockets that are bound to an interface later than to a port
	OwnerName  = "owner-name"  // processes that have sockets and get another name
	UDPDump    = "udp-dump"    // distinguishing servers from clients in a dump
)

// Names of methods beside those of package kernel.
const (
	MethodPoll  = "poll"
	MethodAudit = "audit"     // udp-connect, device and owner-name only: found by a background look
	MethodDiag  = "sock_diag" // udp-dump only
)

// Mode chooses between events and polling.
type Mode uint8

// The modes.
const (
	Auto Mode = iota // events where the kernel allows them, else polling
	BPF              // events, or Run fails
	Poll             // polling, no BPF at all
)

var modes = [...]string{"auto", "bpf", "poll"}

// String returns "auto", "bpf" or "poll".
func (m Mode) String() string {
	if int(m) < len(modes) {
		return modes[m]
	}
	return fmt.Sprintf("mode-%d", uint8(m))
}

// ParseMode is the inverse of String.
func ParseMode(s string) (Mode, error) {
	if i := slices.Index(modes[:], s); i >= 0 {
		return Mode(i), nil
	}
	return 0, fmt.Errorf("observer mode %q: want one of %q", s, modes)
}

// Options configure an Observer. The zero value is useful.
type Options struct {
	Mode Mode

	// Interval between dumps of what is polled. Default 1 s, at least 10 ms.
	Interval time.Duration

	// Audit is the time between background dumps of what is observed by
	// events, at least 10 s; negative for none. Default 60 s to 10 minutes, so that
	// audits take at most 1/30,000 of the time, and each tenth has the TCP sockets that are
	// bound and do not listen, which cost most. It is also that between looks whether owners
	// have their sockets; each tenth searches all processes. In any case the start, and each loss of
	// events, is followed by one audit of all after a second.
	Audit time.Duration

	// Methods limits the methods that are tried, by name; polling remains the last
	// resort. Empty means all.
	Methods []string

	// RingBytes is the size of the ring buffer: a power of two, at least
	// 64 KiB. It counts as the agent's memory. Default 2 MiB, some 21,000 events:
	// those of 10,000 listeners, also if none of them is read before the last.
	RingBytes int

	// Types, if not nil, is shared with others that load programs. Its owner calls
	// Forget when all have started.
	Types *kernel.Types

	// Attached, if not nil, is notified after hooks were attached, or could not be.
	Attached schedule.Signal

	// Logger receives methods, losses, failures and their end. Default: none.
	Logger *slog.Logger

	pacedAudit bool // Audit was not set
}

func (o *Options) setDefaults() {
	if o.Interval == 0 {
		o.Interval = time.Second
	}
	if o.Audit == 0 {
		o.Audit, o.pacedAudit = time.Minute, true
	}
	if o.RingBytes == 0 {
		o.RingBytes = 2 << 20
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

func (o *Options) validate() error {
	var errs []error
	if int(o.Mode) >= len(modes) {
		errs = append(errs, fmt.Errorf("mode %d: want one of %q", o.Mode, modes))
	}
	if o.Interval < 10*time.Millisecond {
		errs = append(errs, fmt.Errorf("interval %v: want at least 10ms", o.Interval))
	}
	if o.Audit >= 0 && o.Audit < 10*time.Second {
		errs = append(errs, fmt.Errorf("audit %v: want at least 10s", o.Audit))
	}
	if o.RingBytes < 64<<10 || o.RingBytes > 1<<30 || o.RingBytes&(o.RingBytes-1) != 0 {
		errs = append(errs, fmt.Errorf("ring bytes %d: want a power of two from 64 KiB to 1 GiB", o.RingBytes))
	}
	known := []string{kernel.MethodFentry, kernel.MethodKprobe, kernel.MethodTPBTF, kernel.MethodCgroup, MethodPoll}
	for _, r := range o.Methods {
		if !slices.Contains(known, r) {
			errs = append(errs, fmt.Errorf("method %q: want one of %q", r, known))
		}
	}
	return errors.Join(errs...)
}

// Stats counts what an Observer did since it was made.
type Stats struct {
	Events       uint64        `metric:"observer_events_total" help:"Kernel events read."`
	Drops        uint64        `metric:"observer_drops_total" help:"Kernel events lost; each loss forces a dump."`
	Skipped      uint64        `metric:"observer_skipped_total" help:"The part of observer_drops_total lost because the hook was already running on that CPU. The rest found the ring buffer full."`
	Malformed    uint64        `metric:"observer_malformed_total" help:"Kernel events that could not be decoded; each forces a dump."`
	Resyncs      uint64        `metric:"observer_resyncs_total" help:"Dumps forced by a loss."`
	Drift        uint64        `metric:"observer_drift_total" help:"Sockets that a background dump had to correct."`
	Dumps        uint64        `metric:"observer_dumps_total" label:"result=ok" help:"Socket dumps."`
	DumpFailures uint64        `metric:"observer_dumps_total" label:"result=failed"`
	DumpTime     time.Duration `metric:"observer_dump_seconds_total" help:"Time spent in socket dumps."`
	Sockets      int           `metric:"observer_sockets" help:"Currently known sockets."`
}
