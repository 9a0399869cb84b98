// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// judge collects checks.
type judge struct {
	f      Facts
	checks []Check
}

func (j *judge) add(area, name string, state State, detail, remedy string) {
	if state == OK {
		remedy = ""
	}
	j.checks = append(j.checks, Check{Area: area, Name: name, State: state, Detail: detail, Remedy: remedy})
}

// more adds details to the last check.
func (j *judge) more(text string) { j.checks[len(j.checks)-1].More = text }

// Evaluate judges the facts. It is pure.
func Evaluate(f Facts) Report {
	j := &judge{f: f}
	j.agent()
	j.config()
	j.caps()
	j.kernel()
	j.observer()
	j.selfTest()
	j.sources()
	if j.f.Agent != nil {
		j.unpublished(j.f.Agent.Unpublished, "fairlead ls")
		j.labels(j.f.Agent.Labels)
	}
	j.nat()
	j.link()
	j.inventory()
	j.policy()
	j.wsl()
	j.limits()
	j.clock()
	return j.report(f.Version)
}

func (j *judge) report(version string) Report {
	r := Report{State: OK, Version: version, Checks: j.checks}
	rank := []State{OK, Warning, Failing}
	for _, c := range r.Checks {
		if slices.Index(rank, c.State) > slices.Index(rank, r.State) {
			r.State = c.State
		}
	}
	return r
}

func (j *judge) agent() {
	a := j.f.Agent
	if a != nil && a.Running {
		j.add("agent", "running", OK, fmt.Sprintf("version %s, pid %d, watches %s, %s", a.Version, a.PID, a.NetNS, plural(a.Publications, "publication")), "")
		if a.Version != j.f.Version {
			j.add("agent", "version", Warning, fmt.Sprintf("the agent runs version %s, this is %s", a.Version, j.f.Version), "restart the agent")
		}
		j.container(a)
		return
	}
	if j.f.Denied {
		j.add("agent", "running", Warning, j.f.AgentError, "run `fairlead doctor` as root: only root may ask the agent, and few checks work without it")
		return
	}
	j.add("agent", "running", Warning, j.f.AgentError, "start `fairlead agent` or its unit; the other checks are what it would find. If this is the host: `fairlead doctor --host`")
	if j.f.LookError != "" {
		j.add("agent", "look", Failing, j.f.LookError, "fix this, or run as root")
	}
}

// container checks what an agent in a container may lack of its machine.
func (j *judge) container(a *Agent) {
	if a.PID == 1 { // it is no machine's init
		j.add("agent", "processes", Warning, "the agent is in a pid namespace of its own: ports of processes outside of containers have no owner",
			"set hostPID: true in the pod, or docker run --pid=host")
	}
	live := func(s Source) bool {
		return s.State == "live" && slices.Contains([]string{"containerd", "docker", "podman"}, s.Name) && s.Lack == port.LackNothing
	}
	if a.InCluster && !slices.ContainsFunc(a.Sources, live) {
		j.add("agent", "engine", Warning, "the agent reaches no container engine: ports of pods have no owner",
			"mount the directory of containerd's socket, /run/containerd, into the pod")
	}
}

func (j *judge) config() {
	c := j.f.Config
	switch {
	case c.Error != "":
		j.add("config", "file", Failing, c.Error, "correct it: `"+c.check("")+"` lists the mistakes; a running agent keeps the previous configuration")
		return
	case c.File == "":
		j.add("config", "file", OK, "none: defaults", "")
	default:
		j.add("config", "file", OK, fmt.Sprintf("%s, %s", c.File, plural(c.Rules, "rule")), "")
	}
	if a := j.f.Agent; a != nil && len(a.Waiting) > 0 {
		j.add("config", "restart", Warning, "changed since the agent started, and not yet in effect: "+strings.Join(a.Waiting, ", "), "restart the agent")
	}
	switch {
	case c.TokenFile == "":
		j.add("config", "token", OK, "none: unix peers are authenticated by their user", "")
	case c.TokenError == "":
		j.add("config", "token", OK, c.TokenFile+", readable by its owner only", "")
	case c.TokenHeld:
		j.add("config", "token", Warning, c.TokenFile+" is readable by root only, as it should be; it was not checked", "run `fairlead doctor` as root")
	case c.NeedsToken:
		j.add("config", "token", Failing, c.TokenError, "start the agent once, which creates it, and copy it to the host")
	default:
		j.add("config", "token", Warning, c.TokenError, "start the agent once, which creates it")
	}
}

func (j *judge) caps() {
	if j.f.Denied { // this process's say nothing about the agent
		return
	}
	running := j.f.Agent != nil && j.f.Agent.Running
	var missing []string
	state := OK
	for _, n := range privilege.Agent() {
		// An agent that runs has dropped what only attaching needs; the observer's checks show
		// what it attached.
		if n.Lost == "" || running && n.Attach || held(j.f.Caps.Effective, n) {
			continue
		}
		if running && j.f.Agent.ListsOnly && n.Name == "CAP_NET_BIND_SERVICE" { // it opens no port
			continue
		}
		missing = append(missing, fmt.Sprintf("%s (%s)", n.Name, n.Lost))
		switch {
		case n.Name == "CAP_NET_ADMIN":
			state = Failing
		case state == OK:
			state = Warning
		}
	}
	switch {
	case len(missing) > 0:
		j.add("privileges", "capabilities", state, j.f.Caps.Whose+" lacks "+strings.Join(missing, ", "), "run as root, or give the unit or the container these capabilities")
	case running && j.f.Agent.Unconfined != "":
		j.add("privileges", "capabilities", Warning, j.f.Caps.Whose+" keeps capabilities that it does not need: "+j.f.Agent.Unconfined,
			"remove --keep-privileges, or use a build of a release")
	default:
		j.add("privileges", "capabilities", OK, j.f.Caps.Whose+" has all it needs", "")
	}
}

// held reports whether a mask has what is needed. CAP_SYS_ADMIN includes the two that were
// split off it.
func held(mask uint64, n privilege.Need) bool {
	const sysAdmin, perfmon = 21, 38
	return mask&(1<<n.Bit) != 0 || n.Bit >= perfmon && mask&(1<<sysAdmin) != 0
}

const btfRemedy = "use a kernel with CONFIG_DEBUG_INFO_BTF (distributions' since 2021 and WSL's have it)"

func (j *judge) kernel() {
	k := j.f.Kernel
	j.add("kernel", "release", OK, k.Release, "")
	if k.BTF {
		j.add("kernel", "btf", OK, "/sys/kernel/btf/vmlinux", "")
	} else {
		j.add("kernel", "btf", Warning, "no /sys/kernel/btf/vmlinux: no kernel events, only polling",
			btfRemedy)
	}
	if k.Diag == "" {
		j.add("kernel", "sock_diag", OK, "sockets can be dumped", "")
	} else {
		j.add("kernel", "sock_diag", Failing, k.Diag, "load the modules tcp_diag and udp_diag, or use a kernel with CONFIG_INET_DIAG and CONFIG_INET_UDP_DIAG")
	}
	for _, m := range k.Modules {
		switch {
		case m.Loaded:
			j.add("kernel", m.Name, OK, "present", "")
		case m.Error != "":
			j.add("kernel", m.Name, Warning, "unknown: "+m.Error, "run as root; in a container, check its seccomp profile")
		default:
			j.add("kernel", m.Name, Warning, "not present: "+m.For, "run modprobe "+m.Name+" if you need it")
		}
	}
}

func (j *judge) observer() {
	a := j.f.Agent
	if a == nil {
		return
	}
	for _, h := range a.Hooks {
		j.hook(h)
	}
	if a.DumpFailures > 0 || a.Drift > 0 {
		j.add("observer", "audits", Warning, fmt.Sprintf("%s failed, %s corrected", plural(a.DumpFailures, "dump"), plural(a.Drift, "socket")),
			"read the agent's log; a few after a suspend are harmless")
	} else if a.Running {
		j.add("observer", "audits", OK, fmt.Sprintf("no corrections; %d events lost and recovered", a.Drops), "")
	}
}

func (j *judge) sources() {
	if j.f.Agent == nil {
		return
	}
	for _, s := range j.f.Agent.Sources {
		area := "source"
		switch s.State {
		case "live":
			switch s.Lack {
			case port.LackSettings:
				j.add(area, s.Name, Warning, s.Method, unusableRemedy)
			case port.LackEngine:
				what, why, _ := strings.Cut(s.Method, ": ")
				j.add(area, s.Name, OK, what, "")
				j.more(why)
			default:
				j.add(area, s.Name, OK, s.Method, "")
			}
		case "starting":
			j.add(area, s.Name, Warning, strings.TrimSpace("starting "+s.Error), "ask again in a moment")
		case "disabled":
			j.add(area, s.Name, Warning, "disabled "+s.Error, "add it to source: in the agent's configuration")
		default:
			detail := s.State + ": " + s.Error
			if !s.Since.IsZero() {
				detail += ", since " + s.Since.UTC().Format(time.RFC3339)
			}
			remedy := sourceRemedies[port.Family(s.Name)]
			if s.Lack == port.LackSettings {
				remedy = unusableRemedy
			}
			j.add(area, s.Name, Failing, detail, remedy)
		}
		for _, w := range s.Warnings[:min(warningsShown, len(s.Warnings))] {
			j.add(area, s.Name, Warning, w, "correct it in the engine; everything else works")
		}
	}
}

// warningsShown is how many warnings of one source are listed.
const warningsShown = 10

// unusableRemedy is for a file that others can change. The error names the command.
const unusableRemedy = "if you trust the file, run the named chmod or chown as root, and wait a minute; where permission is denied, run the agent as root"

var sourceRemedies = map[string]string{
	"socket":     "run the agent as root; see kernel sock_diag",
	"nat":        "run the agent as root; see kernel nf_tables",
	"docker":     "start Docker, or name its socket in DOCKER_HOST",
	"podman":     "enable podman.socket, or name another socket in podman.hosts",
	"containerd": "start containerd",
	"users":      "restart the user's engine, or leave users out of the configuration's sources; where permission is denied, the agent needs CAP_DAC_OVERRIDE",
	"kube":       "start the cluster, or name its file in KUBECONFIG; an expired certificate must be renewed",
}

func (j *judge) nat() {
	a := j.f.Agent
	if a == nil || !slices.ContainsFunc(a.Sources, func(s Source) bool { return s.Name == "nat" && s.State == "live" }) {
		return
	}
	if a.UnreadCount == 0 {
		j.add("nat", "rules", OK, "all rules are supported", "")
		return
	}
	j.add("nat", "rules", Warning, unsupported(a.UnreadCount),
		"rewrite what should be published in a supported form (`fairlead explain PORT` shows the rule)")
	for _, u := range a.Unread {
		j.add("nat", "rule", Warning, unread(u), "")
	}
}

// labels lists labels of containers and Services without effect.
func (j *judge) labels(texts []string) {
	for _, t := range texts[:min(warningsShown, len(texts))] {
		j.add("ports", "label", Warning, t, "correct the label, or have a rule of the configuration open what it asks for")
	}
	if n := len(texts) - warningsShown; n > 0 {
		j.add("ports", "label", Warning, fmt.Sprintf("%d more labels without effect", n), "`fairlead ls -o json` has them all as warnings")
	}
}

// reasonsShown is how many reasons are listed for which ports are not published.
const reasonsShown = 3

// unpublished counts by reason the ports that are not published; list is the command that
// shows them.
func (j *judge) unpublished(reasons map[string]int, list string) {
	if len(reasons) == 0 {
		return
	}
	sorted := slices.SortedFunc(maps.Keys(reasons), func(a, b string) int {
		return cmp.Or(cmp.Compare(reasons[b], reasons[a]), strings.Compare(a, b))
	})
	all, shown := 0, 0
	var texts []string
	for i, reason := range sorted {
		n := reasons[reason]
		all += n
		if i < reasonsShown {
			shown += n
			texts = append(texts, fmt.Sprintf("%d %s", n, reason))
		}
	}
	if all > shown {
		texts = append(texts, fmt.Sprintf("%d for other reasons", all-shown))
	}
	j.add("ports", "unpublished", OK, fmt.Sprintf("%s not published: %s; `%s` lists them", plural(all, "port"), strings.Join(texts, ", "), list), "")
}

// plural returns "1 rule" or "2 rules".
func plural[T int | uint64](n T, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func unsupported(rules int) string {
	if rules == 1 {
		return "1 rule is not supported, so it is not published"
	}
	return fmt.Sprintf("%d rules are not supported, so they are not published", rules)
}

func unread(u explain.Unread) string { return u.Where + ": " + u.Rule + " (" + u.Reason + ")" }

func (j *judge) link() {
	a := j.f.Agent
	if a == nil || a.Link == nil || !a.Running {
		return
	}
	at := strings.Join(a.Link.Endpoints, ", ")
	if r := a.Link.Rivals; len(r) > 0 {
		j.add("link", "hosts", Warning, fmt.Sprintf("the hosts %q take this agent from each other, which resets all flows each time", r),
			"stop fairlead on one of them, or give it another agent: an agent serves one host at a time")
	}
	for _, path := range a.Link.Removed {
		j.add("link", "socket", Failing, path+" was removed; hosts cannot connect any more",
			"restart the agent, and exclude the directory from what cleans it, such as tmpfiles.d")
	}
	if a.Link.Connected {
		j.add("link", "host", OK, fmt.Sprintf("connected at %s, session %d", at, a.Link.Sessions), "")
		return
	}
	detail, state := "no host is connected at "+at, Failing
	if a.Link.Sessions == 0 {
		detail, state = "no host has connected yet at "+at, Warning
	}
	if r := a.Link.Refused; r != nil {
		j.add("link", "host", Failing, detail+"; "+r.Text(j.f.Now), r.Next())
		return
	}
	j.add("link", "host", state, detail, "start `fairlead host --connect …` on the host with a copy of the token, or read its log")
}

func (j *judge) inventory() {
	if j.f.Agent == nil || j.f.Agent.Inventory == nil || !j.f.Agent.Running {
		return
	}
	const area, name = "cluster", "inventory"
	i := j.f.Agent.Inventory
	object := "nodeinventories/" + i.Node
	switch {
	case i.Error != "":
		j.add(area, name, Warning, object+" cannot be written: "+i.Error, "see https://github.com/fairlead/fairlead/blob/main/docs/fleet.md for what the agent needs")
	case i.Omitted > 0:
		j.add(area, name, Warning, fmt.Sprintf("the list of %s omits %s, as it would be too large", object, plural(i.Omitted, "port")), "run `fairlead ls` on the node for all")
	case i.Written.IsZero():
		j.add(area, name, OK, object+" needed no write yet", "")
	default:
		j.add(area, name, OK, object+" is up to date", "")
	}
}

func (j *judge) policy() {
	if j.f.Agent == nil || j.f.Agent.Inventory == nil || j.f.Agent.Inventory.Policy == nil || !j.f.Agent.Running {
		return
	}
	const area, name = "cluster", "policy"
	i := j.f.Agent.Inventory
	switch p := i.Policy; {
	case !p.Judged:
		j.add(area, name, Warning, p.File+": "+p.Says, "mend the file, or see the checks of sources and of the cluster's inventory for what is missing")
	case p.Violations > 0:
		j.add(area, name, Warning, p.Says, fmt.Sprintf("close the ports, or allow them in the policy; `fairlead ls --cluster --violations --node %s -f POLICY` lists all", i.Node))
	default:
		j.add(area, name, OK, p.Says, "")
	}
}

func (j *judge) wsl() {
	w := j.f.WSL
	switch {
	case w == nil:
		return
	case w.Version == 1:
		j.add("wsl", "version", Failing, "WSL 1 has no Linux kernel", "wsl --set-version DISTRIBUTION 2")
		return
	}
	j.add("wsl", "version", OK, "WSL 2", "")
	switch w.Networking {
	case "nat", "virtioproxy", "consomme":
		j.add("wsl", "networking", OK, w.Networking, "")
	case "none":
		if a := j.f.Agent; a != nil && a.Link != nil && slices.ContainsFunc(a.Link.Endpoints, func(e string) bool { return strings.HasPrefix(e, "vsock:") }) {
			j.add("wsl", "networking", OK, "none: Windows is reached over vsock alone", "")
			return
		}
		j.add("wsl", "networking", Warning, "none: Windows sees no listener of this guest", "link a host peer on Windows: fairlead agent --link vsock://:1023")
	case "mirrored":
		j.add("wsl", "networking", OK, "mirrored: Windows shows the ports of this guest's sockets by itself; the listener sink adds those that are only NAT rules", "")
	case "":
		j.add("wsl", "networking", Warning, "unknown: "+w.Error, "update WSL: wsl --update")
	default:
		j.add("wsl", "networking", Warning, w.Networking, "use networkingMode=nat in .wslconfig")
	}
}

// fewFiles is enough descriptors for a thousand flows, which take two each.
const fewFiles = 4096

func (j *judge) limits() {
	l := j.f.Limits
	detail := fmt.Sprintf("%d file descriptors", l.Files)
	if l.OpenFiles >= 0 {
		detail += fmt.Sprintf(", %d in use", l.OpenFiles)
	}
	switch {
	case l.OpenFiles >= 0 && uint64(l.OpenFiles)*10 > l.Files*9:
		j.add("limits", "files", Failing, detail, "raise LimitNOFILE of the agent's unit")
	case l.Files < fewFiles:
		j.add("limits", "files", Warning, detail+": each TCP flow needs two", "raise LimitNOFILE of the agent's unit to 65536")
	default:
		j.add("limits", "files", OK, detail, "")
	}
}

func (j *judge) clock() {
	c := j.f.Clock
	detail := j.f.Now.UTC().Format(time.RFC3339)
	if c.Source != "" {
		detail += ", clock source " + c.Source
	}
	switch {
	case !c.Built.IsZero() && j.f.Now.Before(c.Built):
		j.add("clock", "wall", Failing, detail+": before this program was built", "set the clock (hwclock -s); certificates are refused until then")
	case !c.Synchronised:
		j.add("clock", "wall", Warning, detail+", not synchronised", "run chrony or systemd-timesyncd; the clock of a suspended VM lags behind")
	default:
		j.add("clock", "wall", OK, detail+", synchronised", "")
	}
}
