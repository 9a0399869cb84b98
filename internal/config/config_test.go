// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	iofs "io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// sample is a value for each field that is not its default, as it stands in a
// file and as a flag or a variable has it.
type sample struct{ key, yaml, text string }

func commonSamples() []sample {
	return []sample{
		{"linkToken", "/t", "/t"},
		{"control", "/c.sock", "/c.sock"},
		{"metricsAddr", "127.0.0.1:9464", "127.0.0.1:9464"},
		{"webAddr", "127.0.0.1:7420", "127.0.0.1:7420"},
		{"logLevel", "debug", "debug"},
		{"logFormat", "json", "json"},
		{"keepPrivileges", "yes", "true"},
		{"rulesFile", "", ""}, // a file of its own, see TestRulesFile
		{"forwardsFile", "/none/forwards.json", "/none/forwards.json"},
	}
}

func agentSamples() []sample {
	return append([]sample{
		{"link", "[vsock://:700, unix:///l]", "vsock://:700,unix:///l"},
		{"linkPin", strings.Repeat("a1", 32), strings.Repeat("a1", 32)},
		{"linkCert", "/c.pem", "/c.pem"},
		{"linkKey", "/k.pem", "/k.pem"},
		{"allowCIDs", "[2, 3]", "2,3"},
		{"allowUIDs", "1000", "1000"},
		{"source", "socket", "socket"},
		{"sink", "[hostlink, 'gvproxy=http://10.0.0.1:80', 'vtunnel=unix:///v']", "hostlink,gvproxy=http://10.0.0.1:80,vtunnel=unix:///v"},
		{"observer", "poll", "poll"},
		{"pollInterval", "250ms", "250ms"},
		{"eventBuffer", "1024", "1024"},
		{"auditInterval", "0", "0s"},
		{"holdDown", "0", "0s"},
		{"expose", "all", "all"},
		{"labels", "yes", "true"},
		{"nat.maxPorts", "20000", "20000"},
		{"docker.hosts", "['unix:///d.sock', 'tcp://127.0.0.1:2375']", "unix:///d.sock,tcp://127.0.0.1:2375"},
		{"podman.hosts", "['unix:///p.sock']", "unix:///p.sock"},
		{"containerd.sockets", "[/c1, /c2]", "/c1,/c2"},
		{"containerd.namespaces", "[default, k8s.io]", "default,k8s.io"},
		{"kube.kubeconfigs", "[/k1, /k2]", "/k1,/k2"},
		{"kube.context", "there", "there"},
		{"kube.namespaces", "shop", "shop"},
		{"kube.selector", "'app in (a, b)'", "app in (a, b)"},
		{"cluster.inventory", "true", "true"},
		{"cluster.nodeName", "worker-1.example", "worker-1.example"},
		{"cluster.interval", "30s", "30s"},
		{"cluster.policy", "", ""}, // wants cluster.inventory, see TestPolicyFile
		{"engineGrace", "0", "0s"},
		{"listener.settle", "2s", "2s"},
		{"listener.udp", "yes", "true"},
		{"publish.socket", "/p.sock", "/p.sock"},
		{"publish.ports", "3", "3"},
		{"publish.connections", "4", "4"},
		{"publish.requests", "5", "5"},
		{"bridgeLoopback", "yes", "true"},
		{"reportUnpublished", "no", "false"},
	}, commonSamples()...)
}

func hostSamples() []sample {
	return append([]sample{
		{"connect", "dev=vsock://3:700", "dev=vsock://3:700"},
		{"bind", "192.168.1.5", "192.168.1.5"},
		{"grace", "0", "0s"},
		{"logFile", "/var/log/f", "/var/log/f"},
		{"limits.listeners", "10", "10"},
		{"limits.flows", "11", "11"},
		{"limits.udpFlows", "12", "12"},
		{"limits.udpIdle", "13s", "13s"},
		{"names.http", "127.0.0.1:80", "127.0.0.1:80"},
		{"names.tls", "127.0.0.1:443", "127.0.0.1:443"},
		{"names.domain", "VM.Test.", "vm.test"},
		{"listen", "", ""}, // this and the next want each other, see TestServing
		{"guest", "", ""},
		{"cert", "", ""},
		{"key", "", ""},
		{"caBundle", "", ""},
		{"clientCA", "", ""},
	}, commonSamples()...)
}

// subject is a configuration under test, whichever it is.
type subject struct {
	name    string
	samples []sample
	load    func(path string, fs *pflag.FlagSet, env map[string]string) (texts map[string]string, err error)
	flags   func(*pflag.FlagSet)
	fields  []field
}

func lookup(env map[string]string) func(string) (string, bool) {
	return func(k string) (string, bool) { v, ok := env[k]; return v, ok }
}

func texts(fields []field) map[string]string {
	m := map[string]string{}
	for _, f := range fields {
		m[f.Key] = f.text()
	}
	return m
}

func subjects() []subject {
	agent, host := DefaultAgent(), DefaultHost()
	return []subject{
		{"agent", agentSamples(), func(path string, fs *pflag.FlagSet, env map[string]string) (map[string]string, error) {
			c, err := LoadAgent(path, fs, lookup(env))
			return texts(c.fields()), err
		}, func(fs *pflag.FlagSet) { new(Agent).Flags(fs) }, agent.fields()},
		{"host", hostSamples(), func(path string, fs *pflag.FlagSet, env map[string]string) (map[string]string, error) {
			c, err := LoadHost(path, fs, lookup(env))
			return texts(c.fields()), err
		}, func(fs *pflag.FlagSet) { new(Host).Flags(fs) }, host.fields()},
	}
}

func write(t testing.TB, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// yamlFile writes a file with one key, which may be dotted.
func yamlFile(t testing.TB, key, value string) string {
	t.Helper()
	outer, inner, nested := strings.Cut(key, ".")
	text := outer + ": " + value
	if nested {
		text = outer + ":\n  " + inner + ": " + value
	}
	return write(t, filepath.Join(t.TempDir(), "c.yaml"), text+"\n")
}

// Every field can be set by file, environment and flag, and by all at once the
// flag wins, then the environment, then the file.
func TestPrecedence(t *testing.T) {
	for _, s := range subjects() {
		if len(s.samples) != len(s.fields) {
			t.Errorf("%s: %d samples for %d fields", s.name, len(s.samples), len(s.fields))
		}
		defaults := texts(s.fields)
		for _, sample := range s.samples {
			i := slices.IndexFunc(s.fields, func(f field) bool { return f.Key == sample.key })
			if i < 0 {
				t.Fatalf("%s has no field %s", s.name, sample.key)
			}
			if sample.text == "" {
				continue
			}
			f := s.fields[i]
			standard := defaults[f.Key]
			if standard == sample.text {
				t.Fatalf("%s: the sample is the default", f.Key)
			}
			path := yamlFile(t, sample.key, sample.yaml)
			empty := write(t, filepath.Join(t.TempDir(), "empty.yaml"), "")
			// What stands lower has the default, so that it would show if it won.
			low := yamlFile(t, sample.key, quoteList(f, standard))
			flags := func(value string) *pflag.FlagSet {
				fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
				s.flags(fs)
				if value != "" {
					if err := fs.Parse([]string{"--" + f.flag + "=" + value}); err != nil {
						t.Fatal(err)
					}
				}
				return fs
			}
			for name, tt := range map[string]struct {
				path string
				fs   *pflag.FlagSet
				env  map[string]string
				want string
			}{
				"default":      {empty, flags(""), nil, standard},
				"file":         {path, flags(""), nil, sample.text},
				"environment":  {low, flags(""), map[string]string{f.env(): sample.text}, sample.text},
				"flag":         {low, flags(sample.text), map[string]string{f.env(): standard}, sample.text},
				"env, no file": {empty, nil, map[string]string{f.env(): sample.text}, sample.text},
			} {
				got, err := s.load(tt.path, tt.fs, tt.env)
				if err != nil {
					t.Errorf("%s %s by %s: %v", s.name, f.Key, name, err)
				} else if got[f.Key] != tt.want {
					t.Errorf("%s %s by %s: %q, want %q", s.name, f.Key, name, got[f.Key], tt.want)
				}
				for key, text := range got {
					if key != f.Key && text != defaults[key] {
						t.Errorf("%s %s by %s changes %s to %q", s.name, f.Key, name, key, text)
					}
				}
			}
		}
	}
}

func quoteList(f field, text string) string {
	if !f.IsList() {
		return "'" + text + "'"
	}
	if text == "" {
		return "[]"
	}
	return "['" + strings.ReplaceAll(text, ",", "', '") + "']"
}

func TestDefaults(t *testing.T) {
	want := map[string]string{
		"link": "unix:///run/fairlead/link.sock", "linkToken": "/var/lib/fairlead/token", "allowCIDs": "2", "allowUIDs": "",
		"source": "socket,nat,docker,podman,containerd,kube,users", "sink": "hostlink", "observer": "auto", "pollInterval": "1s", "auditInterval": "1m0s", "eventBuffer": "2048", "holdDown": "150ms",
		"control": "/run/fairlead/control.sock", "metricsAddr": "", "webAddr": "", "logLevel": "info", "logFormat": "text",
		"expose": "loopback", "labels": "false", "rulesFile": "", "forwardsFile": "/var/lib/fairlead/forwards.json", "keepPrivileges": "false", "engineGrace": "30s",
		"nat.maxPorts": "4096", "listener.settle": "750ms", "listener.udp": "false", "bridgeLoopback": "false", "reportUnpublished": "true",
		"publish.socket": "/run/fairlead/publish.sock", "publish.ports": "8", "publish.connections": "256", "publish.requests": "10",
		"docker.hosts": "", "podman.hosts": "", "containerd.sockets": "", "containerd.namespaces": "",
		"linkPin": "", "linkCert": "", "linkKey": "",
		"kube.kubeconfigs": "", "kube.context": "", "kube.namespaces": "", "kube.selector": "",
		"cluster.inventory": "false", "cluster.nodeName": "", "cluster.interval": "10s", "cluster.policy": "",
	}
	c, err := LoadAgent(write(t, filepath.Join(t.TempDir(), "c.yaml"), ""), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := texts(c.fields()); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if c.Rules == nil || DefaultAgent().Rules == nil || DefaultHost().Rules == nil {
		t.Error("no rules")
	}
}

func TestAgentTypes(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "c.yaml"), `
link: [vsock://:700, "vsock://2:701", unix:///run/l.sock]
allowCIDs: [2]
allowUIDs: [0, 1000]
sink: [hostlink, vtunnel=tcp://127.0.0.1:3040]
holdDown: 0
logLevel: warn
`)
	c, err := LoadAgent(path, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := []Endpoint{{Network: "vsock", Port: 700, Listen: true}, {Network: "vsock", CID: 2, Port: 701},
		{Network: "unix", Path: "/run/l.sock"}}; !slices.Equal(c.Link, want) {
		t.Errorf("link %+v", c.Link)
	}
	if want := []Sink{{Name: "hostlink"}, {"vtunnel", "tcp://127.0.0.1:3040"}}; !slices.Equal(c.Sinks, want) {
		t.Errorf("sinks %+v", c.Sinks)
	}
	if c.HoldDown != 0 || c.PollInterval != time.Second || c.LogLevel != slog.LevelWarn || !slices.Equal(c.AllowUIDs, []uint32{0, 1000}) {
		t.Errorf("%+v", c)
	}
}

// A flag that is repeated adds; its first use replaces the default.
func TestRepeatedFlag(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	new(Agent).Flags(fs)
	if err := fs.Parse([]string{"--sink=listener", "--sink=hostlink,gvproxy"}); err != nil {
		t.Fatal(err)
	}
	empty := write(t, filepath.Join(t.TempDir(), "c.yaml"), "")
	for range 2 { // a reload reads the same flags again
		c, err := LoadAgent(empty, fs, nil)
		if err != nil || !slices.Equal(c.Sinks, []Sink{{Name: "listener"}, {Name: "hostlink"}, {Name: "gvproxy"}}) {
			t.Fatalf("%v, %v", c.Sinks, err)
		}
	}
}

// The agent calls it --expose; so may the host.
func TestHostExposesByEitherName(t *testing.T) {
	empty := write(t, filepath.Join(t.TempDir(), "c.yaml"), "")
	for _, flag := range []string{"--bind=all", "--expose=all"} {
		fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
		new(Host).Flags(fs)
		if err := fs.Parse([]string{flag}); err != nil {
			t.Fatal(err)
		}
		if c, err := LoadHost(empty, fs, nil); err != nil || c.Bind != rules.All() {
			t.Errorf("%s: %v, %v", flag, c.Bind, err)
		}
	}
}

func TestDefaultConnect(t *testing.T) {
	defaults := map[string]string{"windows": "hvsock://wsl:1023"}
	if runtime.GOOS == "linux" { // elsewhere the path is the user's
		defaults["linux"] = "unix:///run/fairlead/link.sock"
	}
	for goos, want := range defaults {
		e := defaultConnect(goos, systemDirs())
		if e.String() != want {
			t.Errorf("on %s %s, want %s", goos, e, want)
		}
		if again, err := ParseEndpoint(e.String()); err != nil || again != e {
			t.Errorf("%s is read back as %v, %v", e, again, err)
		}
	}
}

func TestMachineByID(t *testing.T) {
	e, err := ParseEndpoint("hvsock://{E0E16197-DD56-4A10-9195-5EE7A155A838}:7")
	if err != nil || e.String() != "hvsock://e0e16197-dd56-4a10-9195-5ee7a155a838:7" {
		t.Errorf("%s, %v", e, err)
	}
	for _, s := range []string{
		"hvsock://Ubuntu:7", "hvsock://wsl", "hvsock://wsl:0", "hvsock://{e0e16197-dd56-4a10-9195-5ee7a155a838:7",
		"hvsock://e0e16197-dd56-4a10-9195-5ee7a155a83:7", "hvsock://e0e16197dd564a1091955ee7a155a838:7",
	} {
		if e, err := ParseEndpoint(s); err == nil {
			t.Errorf("%s is %s", s, e)
		}
	}
}

func TestErrors(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	write(t, "bad-rules.yaml", "rules:\n- action: alow\n")
	for _, tt := range []struct {
		name, yaml string
		env        map[string]string
		want       string
	}{
		{name: "misspelt", yaml: "holdown: 1s",
			want: `c.yaml:1:1: unknown key "holdown" (did you mean "holdDown"?)`},
		{name: "not a mapping", yaml: "- a", want: `c.yaml:1:1: a list: want a mapping (key: value)`},
		{name: "list for one", yaml: "observer: [bpf]", want: `c.yaml:1:11: observer: a list: want one value`},
		{name: "no value", yaml: "link:\n", want: `c.yaml:1:1: link: no value: give one, or leave the key out`},
		{name: "in a list", yaml: "link:\n- unix:///a\n- tcp://b", want: `c.yaml:3:3: link[1]: "tcp://b": want unix:///PATH, vsock://:PORT, vsock://2:PORT or wss://SERVER[:PORT][/NAME]`},
		{name: "empty list", yaml: "link: []", want: `c.yaml:1:7: link: an empty list: want at least one endpoint`},
		{name: "relative", yaml: "link: unix://a", want: `c.yaml:1:7: link: "unix://a": want an absolute path, unix:///PATH`},
		{name: "vsock port", yaml: "link: vsock://:1024", want: `c.yaml:1:7: link: "vsock://:1024": want a port below 1024, which only root can listen at`},
		{name: "vsock any", yaml: "link: vsock://:4294967295", want: `c.yaml:1:7: link: "vsock://:4294967295": want unix:///PATH, vsock://:PORT, vsock://2:PORT or wss://SERVER[:PORT][/NAME]`},
		{name: "hvsock", yaml: "link: hvsock://wsl:700", want: `c.yaml:1:7: link: "hvsock://wsl:700": is for a Windows host to dial: want vsock://:PORT`},
		{name: "vsock cid", yaml: "link: vsock://3:700", want: `c.yaml:1:7: link: "vsock://3:700": an agent dials only the host, want vsock://2:PORT (or vsock://:PORT to listen)`},
		{name: "vsock token", yaml: "link: vsock://:700\nlinkToken: ''", want: `c.yaml:2:12: linkToken: "": want a file, "vsock://:700" needs a token`},
		{name: "cid", yaml: "allowCIDs: [-1]", want: `c.yaml:1:13: allowCIDs[0]: "-1": want a whole number from 0 to 4294967294`},
		{name: "sink", yaml: "sink: gvproxi", want: `c.yaml:1:7: sink: "gvproxi": want hostlink, listener, gvproxy, vtunnel, none or auto (did you mean "gvproxy"?)`},
		{name: "sink URL", yaml: "sink: vtunnel=http://x", want: `c.yaml:1:7: sink: "vtunnel=http://x": want vtunnel=tcp://HOST:PORT or vtunnel=unix:///PATH`},
		{name: "sink without URL", yaml: "sink: hostlink=http://x", want: `c.yaml:1:7: sink: "hostlink=http://x": hostlink takes no URL`},
		{name: "sink twice", yaml: "sink: [hostlink, hostlink]", want: `c.yaml:1:7: sink: "hostlink": given twice, want each sink once`},
		{name: "none is alone", yaml: "sink: [hostlink, none]", want: `c.yaml:1:7: sink: "none": cannot be combined with other sinks`},
		{name: "auto is alone", yaml: "sink: [auto, listener]", want: `c.yaml:1:7: sink: "auto": cannot be combined with other sinks`},
		{name: "listener UDP", yaml: "listener: {udp: maybe}", want: `c.yaml:1:17: listener.udp: "maybe": want true or false`},
		{name: "no sink", yaml: "sink: []", want: `c.yaml:1:7: sink: an empty list: want at least one sink`},
		{name: "observer", yaml: "observer: bfp", want: `c.yaml:1:11: observer: "bfp": want auto, bpf or poll (did you mean "bpf"?)`},
		{name: "duration", yaml: "holdDown: 150", want: `c.yaml:1:11: holdDown: "150": want a duration such as "150ms", 0s to 1m0s`},
		{name: "negative", yaml: "holdDown: -1s", want: `c.yaml:1:11: holdDown: "-1s": want a duration such as "150ms", 0s to 1m0s`},
		{name: "poll", yaml: "pollInterval: 0", want: `c.yaml:1:15: pollInterval: "0": want a duration such as "150ms", 10ms to 1h0m0s`},
		{name: "audit", yaml: "auditInterval: 1s", want: `c.yaml:1:16: auditInterval: "1s": want a duration such as "150ms", 0 (off), or 10s to 24h0m0s`},
		{name: "event buffer", yaml: "eventBuffer: 65", want: `c.yaml:1:14: eventBuffer: "65": want a power of two from 64 to 1048576`},
		{name: "event buffer too small", yaml: "eventBuffer: 32", want: `c.yaml:1:14: eventBuffer: "32": want a power of two from 64 to 1048576`},
		{name: "control", yaml: "control: ''", want: `c.yaml:1:10: control: "": want a path`},
		{name: "abstract", yaml: "control: '@x'", want: `c.yaml:1:10: control: "@x": want the path of a file, not an abstract socket`},
		{name: "page open to others", yaml: "webAddr: 0.0.0.0:7420", want: `c.yaml:1:10: webAddr: "0.0.0.0:7420": want a loopback address such as "127.0.0.1:7420", or "" for none`},
		{name: "metrics", yaml: "metricsAddr: 9464", want: `c.yaml:1:14: metricsAddr: "9464": want HOST:PORT such as "127.0.0.1:9464", or "" for none`},
		{name: "level", yaml: "logLevel: trace", want: `c.yaml:1:11: logLevel: "trace": want debug, info, warn or error`},
		{name: "format", yaml: "logFormat: jsn", want: `c.yaml:1:12: logFormat: "jsn": want text or json (did you mean "json"?)`},
		{name: "expose", yaml: "expose: 10.0.0.1", want: `c.yaml:1:9: expose: "10.0.0.1": want loopback or all`},
		{name: "rule", yaml: "rules:\n- action: allow\n  match: {ports: 0}", want: `c.yaml:3:18: rules[0].match.ports: "0": want a port (8080) or a range (8000-8999), from 1 to 65535`},
		{name: "rules file", yaml: "rulesFile: bad-rules.yaml", want: `bad-rules.yaml:2:11: rules[0].action: "alow": want allow or deny (did you mean "allow"?)`},
		{name: "ports of a NAT rule", yaml: "nat: {maxPorts: 65536}", want: `c.yaml:1:17: nat.maxPorts: "65536": want a whole number from 1 to 65535`},
		{name: "environment", env: map[string]string{"FAIRLEAD_HOLD_DOWN": "2m"}, want: `FAIRLEAD_HOLD_DOWN: holdDown: "2m": want a duration such as "150ms", 0s to 1m0s`},
		{name: "environment list", env: map[string]string{"FAIRLEAD_SINK": "hostlink, hostlink"}, want: `FAIRLEAD_SINK: sink: "hostlink": given twice, want each sink once`},
		{name: "empty environment", env: map[string]string{"FAIRLEAD_LINK": ""}, want: `FAIRLEAD_LINK: link: an empty list: want at least one endpoint`},
	} {
		_, err := LoadAgent(write(t, "c.yaml", tt.yaml), nil, lookup(tt.env))
		if err == nil || err.Error() != tt.want {
			t.Errorf("%s:\n got %v\nwant %s", tt.name, err, tt.want)
		}
	}
	for _, tt := range []struct{ yaml, want string }{
		{"connect: [a=vsock://3:7, a=vsock://4:7]", `c.yaml:1:10: connect: "a": given twice, want each guest once`},
		{"connect: a/b=vsock://3:7", `c.yaml:1:10: connect: "a/b": want a name of up to 63 letters, digits, dots, dashes and underscores`},
		{"connect: foo", `c.yaml:1:10: connect: "foo": want unix:///PATH, vsock://CID:PORT or hvsock://wsl:PORT`},
		{"connect: dev=vsock://", `c.yaml:1:10: connect: "vsock://": want unix:///PATH, vsock://CID:PORT or hvsock://wsl:PORT`},
		{"connect: dev=vsock://:5", `c.yaml:1:10: connect: "dev=vsock://:5": a host cannot listen for its guests there: let the agent listen, and connect to vsock://CID:PORT`},
		{"connect: []", `c.yaml:1:10: connect: an empty list: want at least one endpoint`},
		{"bind: wide", `c.yaml:1:7: bind: "wide": want asked, loopback, all or an address of the host`},
		{"limits: 5", `c.yaml:1:9: limits: "5": want a mapping (key: value)`},
		{"limits:\n  flow: 5", `c.yaml:2:3: limits: unknown key "flow" (did you mean "flows"?)`},
		{"limits: {flows: 0}", `c.yaml:1:17: limits.flows: "0": want a whole number from 1 to 1048576`},
		{"{connect: 'vsock://3:7', linkToken: ''}", `c.yaml:1:37: linkToken: "": want a file, "vsock://3:7" needs a token`},
	} {
		_, err := LoadHost(write(t, "c.yaml", tt.yaml), nil, nil)
		if err == nil || err.Error() != tt.want {
			t.Errorf("%s:\n got %v\nwant %s", tt.yaml, err, tt.want)
		}
	}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	new(Agent).Flags(fs)
	err := fs.Parse([]string{"--observer=pol"})
	if want := `invalid argument "pol" for "--observer" flag: "pol": want auto, bpf or poll (did you mean "poll"?)`; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// The default file may be absent; one that is named may not.
func TestMissingFile(t *testing.T) {
	gone := filepath.Join(t.TempDir(), "gone.yaml")
	var c Agent
	l := newLoader(&c, &c.Common, c.fields(), nil, nil)
	if err := l.load("", gone); err != nil {
		t.Errorf("default: %v", err)
	}
	for name, tt := range map[string]struct {
		path, says string
		env        map[string]string
	}{
		"named":                    {path: gone, says: "read configuration: "},
		"named by the environment": {env: map[string]string{"FAIRLEAD_CONFIG": gone}, says: "read configuration: "},
		"rules file":               {path: yamlFile(t, "rulesFile", gone), says: "c.yaml:1:12: rulesFile: "},
	} {
		_, err := LoadAgent(tt.path, nil, lookup(tt.env))
		if !errors.Is(err, iofs.ErrNotExist) || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), gone) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The rules that were added at run time decide after those of the configuration. A mistake
// in them is an error with its position, so that what is denied there does not open.
// Others read the file that a program names, from directories of their own.
func TestFileIsAbsolute(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	if err := os.WriteFile("host.yaml", []byte("logLevel: debug\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := LoadHost("host.yaml", nil, nil)
	if want := filepath.Join(dir, "host.yaml"); err != nil || c.File() != want {
		t.Errorf("%q, %v; want %q", c.File(), err, want)
	}
}

func TestForwardsFile(t *testing.T) {
	added := filepath.Join(t.TempDir(), "forwards.json")
	path := yamlFile(t, "forwardsFile", added)
	if cfg, err := LoadAgent(path, nil, nil); err != nil || cfg.Rules.Len() != 0 {
		t.Fatalf("absent: %+v, %v", cfg.Rules, err)
	}
	write(t, added, `{"requests":[{"op":"deny","protocol":"tcp","port":80}]}`)
	cfg, err := LoadAgent(path, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	d := cfg.Rules.Decide(port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}}})
	if d.Rule.String() != "runtime rule 1 (deny 80/tcp)" {
		t.Errorf("%+v", d)
	}
	host := write(t, filepath.Join(t.TempDir(), "host.yaml"), "connect: dev=unix:///link\nforwardsFile: "+added+"\n")
	write(t, added, `{"requests":[{"op":"deny","all":true,"guest":"dev"}]}`)
	if _, err := LoadAgent(path, nil, nil); err == nil || !strings.Contains(err.Error(), "an agent has no guests") {
		t.Errorf("a guest in an agent's request: %v", err)
	}
	if _, err := LoadHost(host, nil, nil); err != nil {
		t.Error(err)
	}
	write(t, added, `{"requests":[{"op":"dney","all":true}]}`)
	if _, err := LoadAgent(path, nil, nil); err == nil || !strings.Contains(err.Error(), added+`: requests[0]: unknown operation "dney"`) {
		t.Errorf("mistake: %v", err)
	}
}

func TestRulesFile(t *testing.T) {
	dir := t.TempDir()
	more := write(t, filepath.Join(dir, "more.yaml"), "expose: all\nrules: [{name: second, action: deny, match: {ports: 80-81}}]")
	text := "rulesFile: " + more + "\nrules: [{name: first, action: allow, match: {ports: 80}}]\n"
	path := write(t, filepath.Join(dir, "c.yaml"), text)
	load := func(env map[string]string) Agent {
		t.Helper()
		c, err := LoadAgent(path, nil, lookup(env))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	decide := func(c Agent, n uint16) string {
		d := c.Rules.Decide(port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}}})
		if !d.Allow {
			return d.Reason.String()
		}
		return d.Host[0].String() + " " + d.Rule.String()
	}
	for n, want := range map[uint16]string{80: "0.0.0.0:80 rule 1 (first)", 81: "denied by rule 2 (second)", 82: "0.0.0.0:82 default"} {
		if got := decide(load(nil), n); got != want {
			t.Errorf("port %d: %s, want %s", n, got, want)
		}
	}
	if c := load(map[string]string{"FAIRLEAD_EXPOSE": "loopback"}); decide(c, 82) != "127.0.0.1:82 default" || c.Expose != rules.Loopback() {
		t.Error("what the rules file exposes wins over the environment")
	}
	write(t, path, text+"expose: loopback\n")
	if got := decide(load(nil), 82); got != "127.0.0.1:82 default" {
		t.Errorf("what the rules file exposes wins over the configuration: %s", got)
	}
}

// A policy that is missing or broken is for the agent to report: the rest of the
// configuration is in effect.
func TestPolicyFile(t *testing.T) {
	dir := t.TempDir()
	policy := filepath.Join(dir, "policy.yaml")
	path := write(t, filepath.Join(dir, "c.yaml"), "cluster: {inventory: true, policy: "+policy+"}\n")
	for _, text := range []string{"", "rules: {}", "rules: []"} {
		if text != "" {
			write(t, policy, text)
		}
		c, err := LoadAgent(path, nil, nil)
		if err != nil || c.Cluster.Policy != policy || c.File() != path {
			t.Errorf("policy %q: %+v, file %s, %v", text, c.Cluster, c.File(), err)
		}
	}
	write(t, path, "cluster: {policy: "+policy+"}\n")
	if _, err := LoadAgent(path, nil, nil); err == nil || !strings.Contains(err.Error(), "c.yaml:1:19: cluster.policy: ") || !strings.Contains(err.Error(), "cluster.inventory") {
		t.Errorf("without an inventory: %v", err)
	}
}

func FuzzEndpoint(f *testing.F) {
	for _, s := range []string{"unix:///a", "vsock://2:1", "vsock://:1023", "hvsock://wsl:1", "vsock://", "unix://"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseEndpoint(s)
		if err != nil {
			return
		}
		if again, err := ParseEndpoint(e.String()); err != nil || again != e {
			t.Fatalf("%q: %+v, read again as %+v, %v", s, e, again, err)
		}
	})
}

func FuzzSink(f *testing.F) {
	for _, s := range []string{"hostlink", "none", "gvproxy=http://a:1", "vtunnel=tcp://a:1", "vtunnel=unix:///a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		k, err := ParseSink(s)
		if err != nil {
			return
		}
		if again, err := ParseSink(k.String()); err != nil || again != k {
			t.Fatalf("%q: %+v, read again as %+v, %v", s, k, again, err)
		}
	})
}

// An interval that is given counts exactly, also where it is the default's.
func TestGivenAuditIntervalIsNoted(t *testing.T) {
	for text, want := range map[string]bool{"": false, "pollInterval: 2s": false, "auditInterval: 1m": true, "auditInterval: 0": true} {
		c, err := LoadAgent(write(t, filepath.Join(t.TempDir(), "c.yaml"), text), nil, nil)
		if err != nil || c.AuditGiven != want {
			t.Errorf("%q: given %v, %v; want %v", text, c.AuditGiven, err, want)
		}
	}
}

// All mistakes of a file are reported, not only the first.
func TestAllMistakesAreReported(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "c.yaml"), `
holdDwon: 1s
observer: guess
dockerHost: unix:///run/docker.sock
rules:
- action: permit
- match: {ports: 80x}
  action: deny
`)
	_, err := LoadAgent(path, nil, nil)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		`:2:1: unknown key "holdDwon" (did you mean "holdDown"?)`,
		`:3:11: observer: "guess": want auto, bpf or poll`,
		`:4:1: unknown key "dockerHost": want "hosts" in the mapping "docker"`,
		`:6:11: rules[0].action: "permit": want allow or deny`,
		`:7:18: rules[1].match.ports: "80x"`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %s in\n%v", want, err)
		}
	}
}

func TestUnknownVariables(t *testing.T) {
	got := UnknownVariables([]string{"FAIRLEAD_HOLDDOWN=1s", "FAIRLEAD_HOLD_DOWN=1s", "FAIRLEAD_MAX_FLOWS=1", "FAIRLEAD_CONFIG=x", "HOME=/", "FAIRLEAD_SOMETHING_ELSE=1", "FAIRLEAD_SEED=1", "FAIRLEAD_LINQ=1"})
	want := []string{
		`environment variable FAIRLEAD_HOLDDOWN is unknown (did you mean "FAIRLEAD_HOLD_DOWN"?)`,
		`environment variable FAIRLEAD_LINQ is unknown (did you mean "FAIRLEAD_LINK"?)`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// An equals sign in a path names no guest.
func TestGuestText(t *testing.T) {
	for text, name := range map[string]string{
		"unix:///run/a=b": "", "dev=unix:///run/a=b": "dev", "vsock://3:1023": "", "a.b-c_1=hvsock://wsl:1023": "a.b-c_1",
	} {
		g, err := ParseGuest(text)
		if err != nil || g.Name != name || g.String() != text {
			t.Errorf("%q: %+v, %v", text, g, err)
		}
	}
	for _, text := range []string{"=vsock://3:1", "..=vsock://3:1", "-x=vsock://3:1", "a b=vsock://3:1", "dev=", "dev=3:1", strings.Repeat("x", 64) + "=vsock://3:1"} {
		if g, err := ParseGuest(text); err == nil {
			t.Errorf("%q is %+v", text, g)
		}
	}
}

// Each guest with a name has a token of its own, unless one was set for all.
func TestTokenOfEachGuest(t *testing.T) {
	c := DefaultHost()
	c.LinkToken = "/state/token"
	dev, other, local := mustGuest(t, "dev=vsock://3:1"), mustGuest(t, "vsock://4:1"), mustGuest(t, "x=unix:///s")
	for _, given := range []bool{false, true} {
		c.TokenGiven = given
		want := []string{"/state/dev.token", "/state/token", ""}
		if given {
			want = []string{"/state/token", "/state/token", "/state/token"}
		}
		if got := []string{c.TokenFile(dev), c.TokenFile(other), c.TokenFile(local)}; !slices.Equal(got, want) {
			t.Errorf("given %v: %q, want %q", given, got, want)
		}
	}
}

func mustGuest(t *testing.T, text string) Guest {
	t.Helper()
	g, err := ParseGuest(text)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// Where the system does not tell who serves a unix socket, a token must prove it.
func TestUnixLinkOnWindowsNeedsToken(t *testing.T) {
	c := DefaultHost()
	c.Connect = []Guest{mustGuest(t, "unix:///s")}
	for _, tt := range []struct {
		goos  string
		given bool
		key   string
	}{{"windows", false, "linkToken"}, {"windows", true, ""}, {"linux", false, ""}, {"darwin", false, ""}} {
		c.TokenGiven = tt.given
		if key, err := c.validateTokens(tt.goos); key != tt.key || (err != nil) != (tt.key != "") {
			t.Errorf("%s, token given %v: %q, %v", tt.goos, tt.given, key, err)
		}
	}
}
