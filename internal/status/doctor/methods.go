// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/config/privilege"
)

// oldestMajor and oldestMinor are the oldest kernel on which all capabilities have hooks.
const oldestMajor, oldestMinor = 5, 15

// methodOptions returns the options of the kernel's configuration that a method needs.
func methodOptions(method string) []string {
	switch method {
	case "fentry":
		return []string{"CONFIG_DEBUG_INFO_BTF", "CONFIG_BPF_JIT", "CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS"}
	case "kprobe":
		return []string{"CONFIG_KPROBES", "CONFIG_KPROBE_EVENTS", "CONFIG_BPF_EVENTS"}
	case "tp_btf":
		return []string{"CONFIG_DEBUG_INFO_BTF", "CONFIG_BPF_EVENTS"}
	case "tracepoint":
		return []string{"CONFIG_FTRACE_SYSCALLS", "CONFIG_BPF_EVENTS"}
	case "cgroup":
		return []string{"CONFIG_CGROUP_BPF"}
	case "iter":
		return []string{"CONFIG_DEBUG_INFO_BTF"}
	}
	return nil
}

// bpfOption is what each method needs.
const bpfOption = "CONFIG_BPF_SYSCALL"

// KernelOptions returns the names of the options that Kernel.Config should have.
func KernelOptions() []string {
	all := []string{bpfOption}
	for _, m := range []string{"fentry", "kprobe", "tp_btf", "tracepoint", "cgroup", "iter"} {
		all = append(all, methodOptions(m)...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// lacks returns the options of those methods that are known not to be set.
func (k Kernel) lacks(methods []string) (missing []string) {
	if k.Config == nil {
		return nil
	}
	needed := []string{bpfOption}
	for _, m := range methods {
		needed = append(needed, methodOptions(m)...)
	}
	for _, o := range needed {
		if k.Config[o] == "" && !slices.Contains(missing, o) {
			missing = append(missing, o)
		}
	}
	return missing
}

// old reports whether the release is below what is supported.
func (k Kernel) old() bool {
	var major, minor int
	if _, err := fmt.Sscanf(k.Release, "%d.%d", &major, &minor); err != nil {
		return false
	}
	return major < oldestMajor || major == oldestMajor && minor < oldestMinor
}

// useOldest is the remedy where a kernel lacks what only newer ones have.
var useOldest = fmt.Sprintf("use Linux %d.%d or later", oldestMajor, oldestMinor)

// cause explains why better methods failed, and what to change; "" if nothing explains it.
func (j *judge) cause(h Hook) (why, remedy string) {
	if h.Error == "" {
		return "", ""
	}
	if why, remedy = j.denied(h); why != "" {
		return why, remedy
	}
	k := j.f.Kernel
	missing := k.lacks(h.Failed)
	verdict := ""
	if h.Verdict != "" {
		verdict = " (" + h.Verdict + ")"
	}
	switch {
	case h.Hang:
		return "Linux " + k.Release + ", which could hang when the agent's PID namespace (as of a WSL distribution, or a container) ends",
			"use Linux 6.9 or later (on WSL: wsl --update), or start the agent in the PID namespace of the machine"
	case h.Memlock:
		return "the limit of locked memory, which the agent may not raise",
			"start the agent with CAP_SYS_RESOURCE or without that limit (LimitMEMLOCK=infinity, ulimit -l unlimited, docker run --ulimit memlock=-1), or " + useOldest
	case k.Lockdown == "confidentiality":
		return "kernel lockdown in mode confidentiality, where no hook may read the kernel's memory",
			"boot with lockdown=integrity or without lockdown"
	case k.old():
		return "Linux " + k.Release + ", which is too old" + verdict, useOldest
	case len(missing) > 0:
		names := strings.Join(missing, " and ")
		return "a kernel without " + names + " (" + k.ConfigFile + ")", "use a kernel with " + names
	case !k.BTF:
		return "a kernel without BTF", btfRemedy
	case h.Verdict != "":
		return "the kernel's verifier, which refused a program" + verdict, reportRemedy
	case h.Absent != "":
		return "a kernel without " + h.Absent + ", which better methods attach to",
			"use another build of the kernel, in which it is neither inlined nor renamed, and report its name with the kernel's release"
	case h.Denied:
		return "the system, which denies them to an agent with the capabilities for them",
			"look for a seccomp profile or a security module that denies bpf(2) or perf_event_open(2); some kernels deny so what they do not support"
	}
	return "", ""
}

// reportRemedy is for what only a change of fairlead's programs helps against.
const reportRemedy = "run `fairlead doctor -v`, and report these errors with the kernel's release"

// denied explains which privilege a better method lacked, and how to give it; "" if it
// cannot be that.
func (j *judge) denied(h Hook) (why, remedy string) {
	if !h.Denied {
		return "", ""
	}
	var missing []string
	for _, n := range privilege.Agent() {
		if n.Name == "CAP_BPF" || n.Name == "CAP_PERFMON" {
			if !held(j.f.Agent.StartCapabilities, n) {
				missing = append(missing, n.Name)
			}
		}
	}
	if len(missing) > 0 {
		names := strings.Join(missing, " and ")
		return "the agent was started without " + names, "start the agent with " + names
	}
	const sysAdmin = 21
	if level := j.f.Kernel.Paranoid; level > 2 && j.f.Agent.StartCapabilities&(1<<sysAdmin) == 0 {
		return fmt.Sprintf("kernel.perf_event_paranoid=%d and an agent without CAP_SYS_ADMIN", level),
			"run sysctl kernel.perf_event_paranoid=2, or start the agent with CAP_SYS_ADMIN, which it drops when its hooks are attached"
	}
	return "", ""
}

// memlockHint is added by the BPF library to each EPERM. It does not apply: where there is
// such a limit, the agent raised it, or says that it could not (Hook.Memlock).
const memlockHint = " (MEMLOCK may be too low, consider rlimit.RemoveMemlock)"

// hook judges how one capability is observed.
func (j *judge) hook(h Hook) {
	detail, state := h.Method, OK
	if h.Lost != "" {
		detail += ": " + h.Lost
	}
	better := strings.ReplaceAll(h.Error, memlockHint, "")
	why, do := j.cause(h)
	remedy := ""
	if (h.Method == "poll" || h.Method == "none") && j.f.Agent.Observer != "poll" {
		state, remedy = Warning, reportRemedy
		switch {
		case why != "":
			detail, remedy = detail+", due to "+why, do
		case better != "":
			detail += " (better ones failed: " + better + ")"
		}
	}
	more := "better methods failed: " + better
	switch {
	case state != OK || why == "":
	case h.Lost != "": // something is missed, and this would change it
		detail += ", due to " + why + ": " + do
	default:
		more += "; due to " + why + ": " + do
	}
	j.add("observer", h.Capability, state, detail, remedy)
	if better != "" {
		j.more(more)
	}
}
