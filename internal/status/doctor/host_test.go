// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func healthyHost() HostFacts {
	return HostFacts{
		OS: "windows", Version: "v1.2.0", Now: now, Running: "v1.2.0", Pair: "run `fairlead host pair`", Ports: 3,
		Config: Config{File: "host.yaml", TokenFile: "token"},
		Guests: []Guest{{Endpoint: "hvsock://wsl:1023", Name: "vm", Version: "v1.2.0", Connected: true}},
		Relay:  &Relay{File: ".wslconfig"}, Reserved: []string{"49152-49251"},
	}
}

func TestHealthyHost(t *testing.T) {
	r := EvaluateHost(healthyHost())
	for _, c := range r.Checks {
		if c.State != OK || c.Remedy != "" {
			t.Errorf("%+v", c)
		}
	}
	if r.State != OK {
		t.Errorf("state %s", r.State)
	}
}

func TestEachFaultOfAHostHasItsRemedy(t *testing.T) {
	lost := func(reason string) func(*HostFacts) {
		return func(f *HostFacts) { f.Guests[0].Connected, f.Guests[0].Error = false, reason }
	}
	refused := func(endpoint, code string, remote bool) func(*HostFacts) {
		return func(f *HostFacts) {
			f.Guests[0] = Guest{Endpoint: endpoint, Name: "vm", Error: "why", Code: code, Remote: remote}
		}
	}
	const vsock, unix = "vsock://3:1023", "unix:///run/s"
	for _, tt := range []struct {
		name           string
		spoil          func(*HostFacts)
		want           State
		check          string
		detail, remedy string
	}{
		{"not running", func(f *HostFacts) { f.Running, f.HostError, f.Guests = "", "nothing answers", nil }, Failing, "host running", "nothing answers", "fairlead host install"},
		{"old process", func(f *HostFacts) { f.Running, f.Guests[0].Version = "v1.1.0", "v1.1.0" }, Warning, "host running", "v1.1.0 runs, this is v1.2.0", "restart"},
		{"bad file", func(f *HostFacts) { f.Config.Error = "host.yaml:1:1: unknown key" }, Failing, "config file", "host.yaml:1:1", "config check --host"},
		{"bad file of its own", func(f *HostFacts) { f.Config = Config{File: `C:\x\h.yaml`, Error: "h.yaml:1:1: unknown key"} }, Failing, "config file", "h.yaml:1:1", "`fairlead config check --host C:\\x\\h.yaml`"},
		{"no token", func(f *HostFacts) { f.Config.TokenError = "no such file" }, Failing, "config token", "no such file", "host pair"},
		{"guest with a name", func(f *HostFacts) {
			f.Guests[0] = Guest{Endpoint: vsock, Label: "dev", Name: "vm", Error: "why", Code: "proof", Remote: true}
		}, Failing, "guest link", "dev at vsock://3:1023", "fairlead host pair --guest dev"},
		{"guest away", lost("connection refused"), Failing, "guest link", "vm at hvsock://wsl:1023 is not connected: connection refused", "start the guest"},
		{"misleading text", lost("refused by the peer (other): \"(token)\""), Failing, "guest link", "(token)", "start the guest"},
		{"refused by token", refused(vsock, "proof", true), Failing, "guest link", "why", "host pair"},
		{"refused by token on a unix socket", refused(unix, "token", false), Failing, "guest link", "why", "or neither"},
		{"token file", refused(vsock, "token-file", false), Failing, "guest link", "why", "chmod 600"},
		{"refused by user", refused(unix, "uid", true), Failing, "guest link", "why", "--allow-uids"},
		{"agent of another user", refused(unix, "uid", false), Failing, "guest link", "why", "run the agent as root"},
		{"socket of another user", refused(unix, "permission", false), Failing, "guest link", "why", "--allow-uids"},
		{"another host", refused(unix, "replaced", true), Failing, "guest link", "why", "other host"},
		{"one network namespace", refused(unix, "network", false), Failing, "guest link", "why", "another network namespace"},
		{"old agent", func(f *HostFacts) { f.Guests[0].Version = "v1.1.9" }, Warning, "guest version", "v1.1.9", "update the agent"},
		{"conflict", func(f *HostFacts) { f.Conflicts = []Conflict{{"80/tcp", "in use by nginx", port.InUseBy}} }, Warning, "ports conflict", "80/tcp: in use by nginx", "hostPort"},
		{"conflict with fairlead's own names", func(f *HostFacts) {
			f.Conflicts = []Conflict{{"80/tcp", "127.0.0.1:80 is held by this host's names", port.HeldBy}}
		}, Warning, "ports conflict", "80/tcp", "free that address"},
		{"failed", func(f *HostFacts) { f.Failed = []Conflict{{"80/tcp", "permission denied", port.SystemFailed}} }, Failing, "ports failed", "80/tcp: permission denied", "retries"},
		{"relay has ports", func(f *HostFacts) {
			f.Conflicts = []Conflict{{"80/tcp", "in use", port.InUseByRelay}, {"81/tcp", "in use", port.InUseByRelay}}
		}, Failing, "ports wslrelay", "2 ports", "localhostForwarding=false"},
		{"ports of the guest that it does not publish", func(f *HostFacts) {
			f.Unpublished = map[string]int{"denied by rule 1 (no-debug)": 2, "bound, not listening": 3, "a": 1, "b": 1, "c": 1}
		}, OK, "ports unpublished", "8 ports not published: 3 bound, not listening, 2 denied by rule 1 (no-debug), 1 a, 2 for other reasons; `fairlead ls -a` lists them", ""},
		{"relay on", func(f *HostFacts) { f.Relay.Forward = true }, Warning, "wsl relay", ".wslconfig", "wsl --shutdown"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := healthyHost()
			tt.spoil(&f)
			r := EvaluateHost(f)
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

func TestMismatchNamesTheOlder(t *testing.T) {
	for _, c := range []struct{ agent, host, want string }{
		{"v1.0.0", "v1.0.0", ""}, {"", "v1.0.0", ""},
		{"v1.0.0", "v1.1.0", "update the agent"}, {"v1.10.0", "v1.9.3", "update fairlead on the host"},
		{"v1.0.0-rc1", "v1.0.0", "the older"}, {"devel", "v1.0.0", "the older"}, {"v2.0.0+x", "v1.0.0", "on the host"},
	} {
		got := Mismatch(c.agent, c.host)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("agent %s, host %s: %q, want %q", c.agent, c.host, got, c.want)
		}
	}
}
