// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/explain"
)

var update = flag.Bool("update", false, "write the golden file")

var now = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// healthy is a guest without problems.
func healthy() Facts {
	return Facts{
		Version: "v1", Now: now,
		Agent: &Agent{
			Running: true, Version: "v1", PID: 811, NetNS: "net:[7]", Observer: "auto", Publications: 12,
			Hooks:   []Hook{{Capability: "tcp-listen", Method: "fentry"}, {Capability: "udp-bind", Method: "cgroup", Error: "fentry: no trampoline"}},
			Sources: []Source{{Name: "socket", State: "live", Method: "fentry"}, {Name: "nat", State: "live", Method: "nftables events"}},
			Link:    &Link{Endpoints: []string{"vsock://:1023"}, Connected: true, Sessions: 3},
		},
		Config: Config{File: "/etc/fairlead/agent.yaml", Rules: 2, TokenFile: "/var/lib/fairlead/token", NeedsToken: true},
		Kernel: Kernel{Release: "6.12.0-microsoft-standard-WSL2", BTF: true, Modules: []Module{{Name: "nf_tables", Loaded: true}}},
		Limits: Limits{Files: 65536, OpenFiles: 40},
		WSL:    &WSL{Version: 2, Networking: "nat"},
		Clock:  Clock{Source: "tsc", Synchronised: true, Built: now.Add(-time.Hour)},
		Caps:   Caps{Effective: 1<<41 - 1, Whose: "the agent (pid 811)"},
	}
}

func TestHealthyGuest(t *testing.T) {
	r := Evaluate(healthy())
	for _, c := range r.Checks {
		if c.State != OK || c.Remedy != "" {
			t.Errorf("%+v", c)
		}
	}
	if r.State != OK {
		t.Errorf("state %s", r.State)
	}
}

// A pod that has all that an agent needs is as healthy as a machine.
func TestHealthyPod(t *testing.T) {
	f := healthy()
	f.Agent.InCluster, f.Agent.ListsOnly = true, true
	f.Caps.Effective &^= 1 << 10 // CAP_NET_BIND_SERVICE
	f.Agent.Sources = append(f.Agent.Sources, Source{Name: "containerd", State: "live", Method: "events of /run/containerd/containerd.sock"})
	if r := Evaluate(f); r.State != OK {
		t.Errorf("state %s: %+v", r.State, r.Checks)
	}
}

func TestEachFaultHasItsRemedy(t *testing.T) {
	for _, tt := range []struct {
		name           string
		spoil          func(*Facts)
		want           State
		check          string // area and name
		detail, remedy string
	}{
		{"ports that are not published", func(f *Facts) { f.Agent.Unpublished = map[string]int{"bound, not listening": 1} }, OK, "ports unpublished", "1 port not published: 1 bound, not listening; `fairlead ls` lists them", ""},
		{"a label without effect", func(f *Facts) { f.Agent.Labels = []string{`container "web": label fairlead.expose: "all": wider`} }, Warning, "ports label", `container "web": label fairlead.expose: "all": wider`, "correct the label"},
		{"no agent, perhaps on the host", func(f *Facts) { f.Agent.Running, f.AgentError = false, "nothing answers" }, Warning, "agent running", "nothing answers", "`fairlead doctor --host`"},
		{"no agent", func(f *Facts) { f.Agent.Running, f.AgentError = false, "nothing answers" }, Warning, "agent running", "nothing answers", "start `fairlead agent`"},
		{"no agent, no look", func(f *Facts) { f.Agent, f.AgentError, f.LookError = nil, "nothing answers", "not permitted" }, Failing, "agent look", "not permitted", "root"},
		{"another version", func(f *Facts) { f.Agent.Version = "v0" }, Warning, "agent version", "v0", "restart"},
		{"pid namespace of its own", func(f *Facts) { f.Agent.PID = 1 }, Warning, "agent processes", "have no owner", "hostPID"},
		{"pod without engine", func(f *Facts) {
			f.Agent.InCluster = true
			f.Agent.Sources = append(f.Agent.Sources, Source{Name: "containerd", State: "live", Lack: port.LackEngine, Method: "no socket: /run/containerd/containerd.sock"})
		}, Warning, "agent engine", "ports of pods have no owner", "/run/containerd"},
		{"bad file", func(f *Facts) { f.Config.Error = "agent.yaml:1:1: unknown key" }, Failing, "config file", "agent.yaml:1:1", "config check"},
		{"bad file of its own", func(f *Facts) { f.Config = Config{File: "/x y/a.yaml", Error: "a.yaml:1:1: unknown key"} }, Failing, "config file", "a.yaml:1:1", "`fairlead config check \"/x y/a.yaml\"`"},
		{"settings that wait for a restart", func(f *Facts) { f.Agent.Waiting = []string{"logLevel", "publish.allow"} }, Warning, "config restart", "not yet in effect: logLevel, publish.allow", "restart the agent"},
		{"no token", func(f *Facts) { f.Config.TokenError = "no such file" }, Failing, "config token", "no such file", "start the agent once"},
		{"no token needed", func(f *Facts) { f.Config.TokenError, f.Config.NeedsToken = "no such file", false }, Warning, "config token", "no such file", "start the agent once"},
		{"no BPF", func(f *Facts) { f.Agent.Running, f.Caps.Effective = false, 1<<12|1<<19 }, Warning, "privileges capabilities", "CAP_BPF (no kernel events", "root"},
		{"dropped BPF", func(f *Facts) { f.Caps.Effective = 1<<12 | 1<<19 | 1<<10 }, Warning, "privileges capabilities", "lacks CAP_DAC_READ_SEARCH (", "root"},
		{"kept privileges", func(f *Facts) { f.Agent.Unconfined = "--keep-privileges is set" }, Warning, "privileges capabilities", "does not need: --keep-privileges", "remove"},
		{"no perf events", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "legacy-tables", Method: "poll", Error: "EACCES", Denied: true}
			f.Agent.StartCapabilities, f.Kernel.Paranoid = 1<<38|1<<39, 3
		}, Warning, "observer legacy-tables", "kernel.perf_event_paranoid=3 and an agent without CAP_SYS_ADMIN", "sysctl kernel.perf_event_paranoid=2"},
		{"started without BPF", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "EPERM", Denied: true}
			f.Agent.StartCapabilities = 1 << 39
		}, Warning, "observer tcp-listen", "without CAP_PERFMON", "with CAP_PERFMON"},
		{"no privilege", func(f *Facts) { f.Caps.Effective = 0 }, Failing, "privileges capabilities", "CAP_NET_ADMIN (no NAT rules)", "root"},
		{"policy violated", func(f *Facts) {
			f.Agent.Inventory = &Inventory{Node: "n", Policy: &Policy{File: "/p.yaml", Judged: true, Violations: 2, Says: "violations of /p.yaml: 2: tcp 0.0.0.0:22 sshd: no rule allows it"}}
		}, Warning, "cluster policy", "violations of /p.yaml: 2: tcp 0.0.0.0:22", "fairlead ls --cluster --violations --node n"},
		{"policy not judged", func(f *Facts) {
			f.Agent.Inventory = &Inventory{Node: "n", Policy: &Policy{File: "/p.yaml", Says: "it cannot be judged as it is now: no such file"}}
		}, Warning, "cluster policy", "/p.yaml: it cannot be judged as it is now: no such file", "mend the file"},
		{"policy kept", func(f *Facts) {
			f.Agent.Inventory = &Inventory{Node: "n", Policy: &Policy{File: "/p.yaml", Judged: true, Says: "no port violates /p.yaml"}}
		}, OK, "cluster policy", "no port violates /p.yaml", ""},
		{"no BTF", func(f *Facts) { f.Kernel.BTF = false }, Warning, "kernel btf", "only polling", "CONFIG_DEBUG_INFO_BTF"},
		{"no diag", func(f *Facts) { f.Kernel.Diag = "no such file" }, Failing, "kernel sock_diag", "no such file", "CONFIG_INET_DIAG"},
		{"no module", func(f *Facts) { f.Kernel.Modules = []Module{{Name: "vsock", For: "no link over vsock"}} }, Warning, "kernel vsock", "no link over vsock", "modprobe vsock"},
		{"module not known", func(f *Facts) { f.Kernel.Modules = []Module{{Name: "nf_tables", Error: "EPERM"}} }, Warning, "kernel nf_tables", "unknown: EPERM", "root"},
		{"module denied", func(f *Facts) {
			f.Kernel.Modules = []Module{{Name: "vsock", Error: "a seccomp filter denies socket(AF_VSOCK)"}}
		}, Warning, "kernel vsock", "a seccomp filter denies", "seccomp profile"},
		{"polling", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Lost: "late", Error: "no idea"}
		}, Warning, "observer tcp-listen", "late (better ones failed: no idea)", "report these errors"},
		{"polling on an old kernel", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "fentry: unknown func x#46", Failed: []string{"fentry"}}
			f.Kernel.Release = "5.10.0-46-cloud-amd64"
		}, Warning, "observer tcp-listen", "poll, due to Linux 5.10.0-46-cloud-amd64", "Linux 5.15 or later"},
		{"polling on an old kernel, with the verifier's reason", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "EINVAL", Verdict: "unknown func x#46"}
			f.Kernel.Release = "5.10.0-46-cloud-amd64"
		}, Warning, "observer tcp-listen", "too old (unknown func x#46)", "Linux 5.15 or later"},
		{"polling with a limit of locked memory", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "EPERM", Memlock: true}
			f.Kernel.Release = "5.10.0-46-cloud-amd64"
		}, Warning, "observer tcp-listen", "due to the limit of locked memory", "LimitMEMLOCK=infinity"},
		{"in a PID namespace whose end could hang the kernel", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Lost: "late", Error: "no kprobes", Hang: true}
			f.Kernel.Release = "6.6.87.2-microsoft-standard-WSL2"
		}, Warning, "observer tcp-listen", "late, due to Linux 6.6.87.2-microsoft-standard-WSL2, which could hang", "wsl --update"},
		{"a lesser method in such a namespace", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "udp-bind", Method: "cgroup", Lost: "tunnels late", Error: "no fentry", Hang: true}
			f.Kernel.Release = "6.6.87.2-microsoft-standard-WSL2"
		}, OK, "observer udp-bind", "cgroup: tunnels late, due to Linux 6.6.87.2-microsoft-standard-WSL2, which could hang when the agent's PID namespace (as of a WSL distribution, or a container) ends: use Linux 6.9 or later (on WSL: wsl --update)", ""},
		{"refused by the verifier", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "EINVAL", Verdict: "R1 is invalid", Absent: "inet_hash"}
		}, Warning, "observer tcp-listen", "verifier, which refused a program (R1 is invalid)", "report these errors"},
		{"function not in the kernel", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "ENOENT", Absent: "inet_hash"}
		}, Warning, "observer tcp-listen", "a kernel without inet_hash", "another build of the kernel"},
		{"denied to an agent that may", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "EPERM", Denied: true}
			f.Agent.StartCapabilities = 1<<41 - 1
		}, Warning, "observer tcp-listen", "denies them to an agent with the capabilities", "seccomp profile"},
		{"polling without options", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "EINVAL", Failed: []string{"kprobe"}}
			f.Kernel.Config = map[string]string{"CONFIG_BPF_SYSCALL": "y", "CONFIG_BPF_EVENTS": "y", "CONFIG_KPROBE_EVENTS": "m"}
			f.Kernel.ConfigFile = "/proc/config.gz"
		}, Warning, "observer tcp-listen", "a kernel without CONFIG_KPROBES (/proc/config.gz)", "use a kernel with CONFIG_KPROBES"},
		{"polling in lockdown", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "fentry: EPERM", Denied: true}
			f.Agent.StartCapabilities, f.Kernel.Lockdown = 1<<41-1, "confidentiality"
		}, Warning, "observer tcp-listen", "lockdown in mode confidentiality", "lockdown=integrity"},
		{"polling without BTF", func(f *Facts) {
			f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "poll", Error: "fentry: not supported"}
			f.Kernel.BTF = false
		}, Warning, "observer tcp-listen", "a kernel without BTF", "CONFIG_DEBUG_INFO_BTF"},
		{"self-test passed", func(f *Facts) {
			f.Tried = &SelfTest{Steps: []SelfTestStep{{Name: "NAT rule add", Method: "nfnetlink", Microseconds: 1501}}}
		}, OK, "self-test NAT rule add", "by nfnetlink, after 1.501ms", ""},
		{"self-test without events", func(f *Facts) {
			f.Tried = &SelfTest{Steps: []SelfTestStep{{Name: "tcp close", Method: "fentry", Error: "none within 20s", Remedy: "report"}}}
		}, Failing, "self-test tcp close", "no event by fentry: none within 20s", "report"},
		{"self-test refused", func(f *Facts) {
			f.Tried = &SelfTest{Steps: []SelfTestStep{{Name: "NAT rule add", Error: "EPERM", Remedy: "give rights"}}}
		}, Failing, "self-test NAT rule add", "no event: EPERM", "give rights"},
		{"self-test not as root", func(f *Facts) { f.Tried = &SelfTest{Error: "make a network namespace: EPERM"} }, Failing, "self-test start", "EPERM", "as root"},
		{"self-test of nothing", func(f *Facts) { f.Tried = &SelfTest{} }, OK, "self-test start", "nothing tried", ""},
		{"fresh agent alike", func(f *Facts) {
			f.Tried = &SelfTest{Steps: []SelfTestStep{{Name: "tcp open", Method: "fentry"}}, Compared: &Comparison{Rows: 7}}
		}, OK, "self-test fresh agent", "the same 7 publications", ""},
		{"fresh agent differs", func(f *Facts) {
			f.Tried = &SelfTest{Compared: &Comparison{Rows: 7, Differences: []string{"80/tcp 0.0.0.0: owner a, of a fresh agent b"}}}
		}, Failing, "self-test fresh agent", "80/tcp 0.0.0.0: owner a, of a fresh agent b", "report"},
		{"fresh agent not compared", func(f *Facts) {
			f.Tried = &SelfTest{Compared: &Comparison{Error: "source docker is stale"}}
		}, Warning, "self-test fresh agent", "not compared with the one that runs: source docker is stale", "correct that"},
		{"drift", func(f *Facts) { f.Agent.Drift = 3 }, Warning, "observer audits", "3 sockets", "log"},
		{"stale", func(f *Facts) { f.Agent.Sources[1] = Source{Name: "nat", State: "stale", Error: "EPERM", Since: now} }, Failing, "source nat", "EPERM, since 2026-11-21T12:00:00Z", "root"},
		{"refused kubeconfig", func(f *Facts) {
			f.Agent.Sources[1] = Source{Name: "kube", State: "stale", Lack: port.LackSettings, Error: "no usable kubeconfig: /k has mode 0666: chmod go-w /k"}
		}, Failing, "source kube", "chmod go-w /k", "as root"},
		{"second cluster down", func(f *Facts) {
			f.Agent.Sources[1] = Source{Name: "kube:k3s", State: "stale", Error: "connection refused"}
		}, Failing, "source kube:k3s", "connection refused", "start the cluster"},
		{"forgotten kubeconfig", func(f *Facts) {
			f.Agent.Sources[1] = Source{Name: "kube", State: "live", Lack: port.LackSettings, Method: "no usable kubeconfig: /k has mode 0666: chmod go-w /k"}
		}, Warning, "source kube", "chmod go-w /k", "as root"},
		{"starting", func(f *Facts) { f.Agent.Sources[1].State = "starting" }, Warning, "source nat", "starting", "ask again"},
		{"warned", func(f *Facts) { f.Agent.Sources[0].Warnings = []string{"container a: port 0"} }, Warning, "source socket", "container a: port 0", "engine"},
		{"NAT", func(f *Facts) {
			f.Agent.UnreadCount, f.Agent.Unread = 1, []explain.Unread{{Where: "ip nat pre", Rule: "meta mark 7", Reason: "meta mark"}}
		}, Warning, "nat rules", "1 rule is", "supported form"},
		{"no host ever", func(f *Facts) { f.Agent.Link = &Link{Endpoints: []string{"vsock://:1023"}} }, Warning, "link host", "yet", "start `fairlead host"},
		{"first host refused", func(f *Facts) {
			f.Agent.Link = &Link{Endpoints: []string{"vsock://:1023"}, Refused: &explain.Refusal{At: now.Add(-4 * time.Second), Code: "token", Reason: "differs"}}
		}, Failing, "link host", "yet at vsock://:1023; a host was refused 4s ago", "host pair"},
		{"socket removed", func(f *Facts) { f.Agent.Link.Removed = []string{"/run/fairlead/link.sock"} }, Failing, "link socket", "link.sock was removed", "restart the agent"},
		{"two hosts", func(f *Facts) { f.Agent.Link.Rivals = []string{"desk", "laptop"} }, Warning, "link hosts", `"desk" "laptop"`, "one of them"},
		{"host gone", func(f *Facts) { f.Agent.Link.Connected = false }, Failing, "link host", "no host is connected", "fairlead host"},
		{"host refused", func(f *Facts) {
			f.Agent.Link.Connected, f.Agent.Link.Refused = false, &explain.Refusal{At: now.Add(-4 * time.Second), Code: "uid", Reason: "uid 7"}
		}, Failing, "link host", "a host was refused 4s ago: uid 7", "--allow-uids"},
		{"WSL 1", func(f *Facts) { f.WSL = &WSL{Version: 1} }, Failing, "wsl version", "WSL 1", "--set-version"},
		{"mirrored", func(f *Facts) { f.WSL.Networking = "mirrored" }, OK, "wsl networking", "mirrored: Windows shows the ports of this guest's sockets by itself", ""},
		{"no network", func(f *Facts) { f.WSL.Networking, f.Agent.Link.Endpoints = "none", []string{"unix:///l"} }, Warning, "wsl networking", "none", "--link vsock://:1023"},
		{"a mode of a newer WSL", func(f *Facts) { f.WSL.Networking = "later" }, Warning, "wsl networking", "later", "nat"},
		{"unknown WSL mode", func(f *Facts) { f.WSL = &WSL{Version: 2, Error: "wslinfo: not found"} }, Warning, "wsl networking", "wslinfo", "wsl --update"},
		{"few files", func(f *Facts) { f.Limits.Files = 1024 }, Warning, "limits files", "1024", "LimitNOFILE"},
		{"files used up", func(f *Facts) { f.Limits = Limits{Files: 1024, OpenFiles: 1000} }, Failing, "limits files", "1000 in use", "LimitNOFILE"},
		{"clock adrift", func(f *Facts) { f.Clock.Synchronised = false }, Warning, "clock wall", "not synchronised", "chrony"},
		{"clock in the past", func(f *Facts) { f.Now = now.Add(-24 * time.Hour) }, Failing, "clock wall", "before this program was built", "hwclock"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := healthy()
			tt.spoil(&f)
			r := Evaluate(f)
			if r.State != tt.want {
				t.Errorf("state %s, want %s", r.State, tt.want)
			}
			for _, c := range r.Checks {
				if c.Area+" "+c.Name == tt.check && c.State == tt.want {
					if !strings.Contains(c.Detail, tt.detail) || !strings.Contains(c.Remedy, tt.remedy) {
						t.Errorf("%+v", c)
					}
					return
				}
			}
			t.Errorf("no check %q that is %s in %+v", tt.check, tt.want, r.Checks)
		})
	}
}

// A lesser method that loses nothing is no fault, but its reason is known to who asks.
func TestLesserMethodIsExplained(t *testing.T) {
	f := healthy()
	f.Agent.Hooks[0] = Hook{Capability: "tcp-listen", Method: "kprobe", Error: "fentry: not supported", Failed: []string{"fentry"}}
	f.Kernel.ConfigFile, f.Kernel.Config = "/boot/config-6.1", map[string]string{}
	for _, o := range KernelOptions() {
		f.Kernel.Config[o] = "y"
	}
	f.Kernel.Config["CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS"] = ""
	r := Evaluate(f)
	for _, c := range r.Checks {
		if c.Name == "tcp-listen" && (c.State != OK || !strings.Contains(c.More, "due to a kernel without CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS (/boot/config-6.1)")) {
			t.Errorf("%+v", c)
		}
	}
	if r.State != OK {
		t.Errorf("state %s", r.State)
	}
}

// In these modes of WSL's network fairlead works as with NAT.
func TestModesOfWSLThatWork(t *testing.T) {
	for _, mode := range []string{"nat", "virtioproxy", "consomme", "none"} { // none: the host is linked over vsock
		f := healthy()
		f.WSL.Networking = mode
		for _, c := range Evaluate(f).Checks {
			if c.Area == "wsl" && (c.State != OK || c.Remedy != "") {
				t.Errorf("%s: %+v", mode, c)
			}
		}
	}
}

func TestOldKernel(t *testing.T) {
	for release, want := range map[string]bool{
		"5.10.262": true, "5.14.99-x": true, "4.19.0": true, "5.15.90.1-microsoft-standard-WSL2": false, "6.1.0-56-cloud-amd64": false, "unknown": false, "": false,
	} {
		if got := (Kernel{Release: release}).old(); got != want {
			t.Errorf("%q: old %v", release, got)
		}
	}
}

func TestJSON(t *testing.T) {
	f := healthy()
	f.Agent.Link.Connected = false
	var got bytes.Buffer
	enc := json.NewEncoder(&got)
	enc.SetIndent("", "  ")
	if err := enc.Encode(Evaluate(f)); err != nil {
		t.Fatal(err)
	}
	const golden = "testdata/report.golden"
	if *update {
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || !bytes.Equal(got.Bytes(), want) {
		t.Errorf("got\n%s\nwant (%v)\n%s", got.Bytes(), err, want)
	}
}
