// SPDX-License-Identifier: Apache-2.0

// Package privilege drops the capabilities that a process does not need. One table
// says which are needed, for what, and until when.
package privilege

// Need is a capability of capabilities(7) that a program keeps.
type Need struct {
	Bit  uint   // number of the capability
	Name string // "CAP_NET_ADMIN"
	Why  string // what it is for
	Lost string // what does not work without it
	// Attach says that it is needed only until all hooks are attached.
	Attach bool
}

// Unit reports whether the unit of systemd gives the capability: the others only help
// where the kernel is old or has no other hooks.
func (n Need) Unit() bool { return n.Bit != sysAdmin && n.Bit != sysResource }

// The numbers, from include/uapi/linux/capability.h.
const (
	dacOverride    = 1
	dacReadSearch  = 2
	kill           = 5
	setgid         = 6
	setuid         = 7
	netBindService = 10
	netAdmin       = 12
	sysPtrace      = 19
	sysAdmin       = 21
	sysResource    = 24
	perfmon        = 38
	bpf            = 39
)

// Agent returns what the guest agent needs as root.
func Agent() []Need {
	return []Need{
		{
			Bit: netAdmin, Name: "CAP_NET_ADMIN", Lost: "no NAT rules",
			Why: "read NAT rules; attach hooks to cgroups; exempt placeholders of the listener sink from NAT",
		},
		{
			Bit: netBindService, Name: "CAP_NET_BIND_SERVICE", Lost: "no listeners below port 1024",
			Why: "listen on vsock port 1023; open ports below 1024 with the listener sink",
		},
		{
			Bit: sysPtrace, Name: "CAP_SYS_PTRACE", Lost: "cannot name other users' processes",
			Why: "read which process has a socket, and its executable, in /proc",
		},
		{
			Bit: dacReadSearch, Name: "CAP_DAC_READ_SEARCH", Lost: "cannot name other users' processes, nor find a cgroup by its id",
			Why: "list the descriptors of other users' processes; open a cgroup by its id",
		},
		{
			Bit: bpf, Name: "CAP_BPF", Lost: "no kernel events, only polling", Attach: true,
			Why: "load BPF programs; before Linux 5.19 also use their maps, so it is kept there",
		},
		{
			Bit: perfmon, Name: "CAP_PERFMON", Lost: "no kernel events, only polling", Attach: true,
			Why: "load BPF programs that read the kernel's memory",
		},
		{
			Bit: sysAdmin, Name: "CAP_SYS_ADMIN", Attach: true,
			Why: "attach kprobes and classic tracepoints where kernel.perf_event_paranoid is above 2, and to functions of modules; find tracepoints where tracefs is not mounted",
		},
		{
			Bit: sysResource, Name: "CAP_SYS_RESOURCE", Attach: true,
			Why: "raise the limit of locked memory, which BPF maps count against before Linux 5.11",
		},
	}
}

// UserSockets returns what an agent needs that follows engines of other users.
func UserSockets() Need {
	return Need{
		Bit: dacOverride, Name: "CAP_DAC_OVERRIDE", Lost: "cannot connect to engines of other users",
		Why: "connect to engines' sockets that belong to other users; kept only with the source `users`, or if one is configured",
	}
}

// Runner returns what the helper of fairlead-run keeps: to become the users of programs, and
// to send them signals.
func Runner() Set { return 1<<setuid | 1<<setgid | 1<<kill }

// RunServer returns what the rest of fairlead-run keeps: to read whose process asks, in /proc.
func RunServer() Set { return 1 << sysPtrace }

// Maps returns what the use of BPF maps needs where MapsNeedCapability.
func Maps() Set { return 1 << bpf }

// Host returns what a host peer keeps if it has it: nothing is needed for ports from 1024 on.
func Host() []Need {
	return []Need{{
		Bit: netBindService, Name: "CAP_NET_BIND_SERVICE", Lost: "no ports below 1024",
		Why: "open ports below 1024, if the host peer was given this capability or runs as root",
	}}
}

// Set is a set of capabilities: bit n is capability n.
type Set uint64

// SetOf returns the set of all needs, or only of those that remain after all hooks are attached.
func SetOf(needs []Need, attached bool) (s Set) {
	for _, n := range needs {
		if !attached || !n.Attach {
			s |= 1 << n.Bit
		}
	}
	return s
}

// Has reports whether the set has a capability.
func (s Set) Has(bit uint) bool { return s&(1<<bit) != 0 }
