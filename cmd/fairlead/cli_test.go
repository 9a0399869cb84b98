// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// guest is a provider with one port in each of two states. It explains 8080 as
// reachable, every other port as not.
type guest struct{ empty bool }

const longReason = `127.0.0.1:5432 is in use by "postgres" (pid 811)`

func (g guest) List() status.List {
	l := status.List{Publications: []status.Publication{}, Sources: []status.Source{}}
	for n, state := range map[uint16]port.State{8080: port.Active, 5432: port.Conflict} {
		p := status.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}}, State: state}
		if state == port.Conflict {
			p.Reason = longReason
		}
		if !g.empty {
			l.Publications = append(l.Publications, p)
		}
	}
	return l
}

func (guest) Sources() []status.Source { return []status.Source{} }

func (guest) Changes(ctx context.Context, _ func(status.Delta) error) error {
	<-ctx.Done()
	return ctx.Err()
}

func (guest) Explain(_ context.Context, q explain.Query) (explain.Report, error) {
	f := explain.Facts{Query: q}
	if q.Port == 8080 {
		f.Publications = []explain.Publication{{
			Publication: port.Publication{
				Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8080}, Decision: port.Decision{Allow: true}},
				Dial: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")},
			},
			Outcomes: []port.SinkOutcome{{Sink: "hostlink", Outcome: port.Outcome{State: port.Active}}},
		}}
	}
	return explain.Evaluate(f), nil
}

// serve serves g on a control socket that the commands use.
func serve(t *testing.T, g guest) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c")
	l, err := status.ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	s := status.NewServer(status.Options{Provider: g, Explainer: g, Logger: slog.New(slog.DiscardHandler)})
	go func() { done <- s.Serve(ctx, l, true) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	t.Setenv("FAIRLEAD_CLIENT_CONTROL", path)
	t.Setenv("COLUMNS", "")
}

func TestExplainExitStatusIsTheAnswer(t *testing.T) {
	serve(t, guest{})
	for args, want := range map[string]int{"8080": exitOK, "8080 -o json": exitOK, "1234": exitError, "1234 -o json": exitError, "x": exitUsage} {
		out, stderr, code := execute(t, append([]string{"explain"}, strings.Fields(args)...)...)
		if code != want || code != exitUsage && (stderr != "" || out == "") {
			t.Errorf("explain %s: exit %d, want %d; %q, %q", args, code, want, out, stderr)
		}
	}
}

func TestLsInPipeTruncatesNothing(t *testing.T) {
	serve(t, guest{})
	if out, _, code := execute(t, "ls"); code != exitOK || !strings.Contains(out, longReason) {
		t.Errorf("exit %d:\n%s", code, out)
	}
	t.Setenv("COLUMNS", "80")
	if out, _, code := execute(t, "ls"); code != exitOK || strings.Contains(out, longReason) || !strings.Contains(out, "…") {
		t.Errorf("in 80 columns: exit %d:\n%s", code, out)
	}
}

func TestLsWithoutPortsSaysSo(t *testing.T) {
	serve(t, guest{})
	if out, _, _ := execute(t, "ls", "--filter", "nginx"); out != "No ports match the filter.\n" {
		t.Errorf("%q", out)
	}
	serve(t, guest{empty: true})
	if out, _, _ := execute(t, "ls"); out != "No ports.\n" {
		t.Errorf("%q", out)
	}
}

func TestJSONHasASchemaVersion(t *testing.T) {
	serve(t, guest{})
	file := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(file, []byte("holdDown: 1s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"ls", "explain 8080", "config check " + file, "explain --rules 80 --config " + file} {
		out, stderr, _ := execute(t, append(strings.Fields(args), "-o", "json")...)
		var v struct {
			SchemaVersion int `json:"schemaVersion"`
		}
		if err := json.Unmarshal([]byte(out), &v); err != nil || v.SchemaVersion != status.SchemaVersion {
			t.Errorf("%s: %v, %+v: %q, %q", args, err, v, out, stderr)
		}
	}
}

func TestUsageErrors(t *testing.T) {
	for args, want := range map[string]string{
		"agent --sink foo":                    `fairlead: --sink "foo": want hostlink, listener, gvproxy, vtunnel, none or auto (see ` + "`fairlead agent --help`)\n",
		"host --grace soon":                   `fairlead: --grace "soon": want a duration such as "150ms", 0s to 1h0m0s (see ` + "`fairlead host --help`)\n",
		"ls -o yaml":                          `fairlead: --output "yaml": want table, wide or json` + "\n",
		"forward add 0":                       `fairlead: port "0": want 1 to 65535, optionally followed by /tcp or /udp` + "\n",
		"forward add 80 --to 0":               "fairlead: --to 0: want a port from 1 to 65535\n",
		"forward add 80 --bind x":             `fairlead: --bind "x": want loopback, all or an address of the host` + "\n",
		"forward add 80 --on-conflict x":      `fairlead: --on-conflict "x": want wait, next or any` + "\n",
		"deny":                                "fairlead: deny: want a port, --owner NAME or --all (see `fairlead deny --help`)\n",
		"deny 80 81":                          "fairlead: deny: want a port, --owner NAME or --all (see `fairlead deny --help`)\n",
		"deny 80 --all":                       "fairlead: deny: want a port, --owner NAME or --all (see `fairlead deny --help`)\n",
		"expose web:80":                       "fairlead: expose: want a port; web:80/tcp is for `fairlead forward add` and rm, `fairlead deny` and allow\n",
		"expose 80 --for 0s":                  "fairlead: --for 0s: want a duration such as 2h, 1s to 168h0m0s\n",
		"expose 80 --for 169h":                "fairlead: --for 169h0m0s: want a duration such as 2h, 1s to 168h0m0s\n",
		"expose 80 --end --bind all":          "fairlead: --end takes neither --for nor --bind\n",
		"expose 80 --bind x":                  `fairlead: --bind "x": want loopback, all or an address of the host` + "\n",
		"ls --names -a":                       "fairlead: --all: not with --names\n",
		"explain 80 --guest dev":              "fairlead: --guest: only with --rules\n",
		"explain --rules 80 --no-dial":        "fairlead: --no-dial: not with --rules\n",
		"open 53/udp":                         "fairlead: 53/udp: a browser opens TCP ports\n",
		"watch --exec cat x":                  "fairlead: watch takes no argument, got \"x\"\n",
		"watch -- x":                          "fairlead: watch takes no argument, got \"x\"\n",
		"help nosuch":                         `fairlead: unknown command "nosuch" (see ` + "`fairlead --help`)\n",
		"config loglevel set debgu":           `fairlead: log level "debgu": want debug, info, warn or error (did you mean "debug"?)` + "\n",
		"config loglevel set debug --for 0s":  "fairlead: --for 0s: want 1s to 24h0m0s\n",
		"config loglevel set debug --for -1m": "fairlead: --for -1m0s: want 1s to 24h0m0s\n",
		"config loglevel set debug --component nat --for 25h": "fairlead: --for 25h0m0s: want 1s to 24h0m0s\n",
		"config loglevel set debug --component=":              `fairlead: --component "": want one of ` + strings.Join(loglevel.Components(), ", ") + "\n",
		"config loglevel set debug --component nta":           `fairlead: --component "nta": want one of ` + strings.Join(loglevel.Components(), ", ") + ` (did you mean "nat"?)` + "\n",
		"config loglevel get -o yaml":                         `fairlead: --output "yaml": want text or json` + "\n",
		"host install -- -x=1":                                "fairlead: for `fairlead host`: unknown shorthand flag: 'x' in -x=1\n",
		"host install -- --config x.yaml":                     `fairlead: for ` + "`fairlead host`" + `: --config "x.yaml": want an absolute path, as it will start in another directory` + "\n",
		"agent install -- --control c.sock":                   `fairlead: for ` + "`fairlead agent`" + `: --control "c.sock": want an absolute path, as it will start in another directory` + "\n",
		"agent install -- -x=1":                               "fairlead: for `fairlead agent`: unknown shorthand flag: 'x' in -x=1\n",
		"forward add 127.0.0.1:8080":                          "fairlead: \"127.0.0.1:8080\": want `fairlead forward add 8080/tcp`\n",
		"forward add localhost:53/udp --guest dev":            "fairlead: \"localhost:53/udp\": want `fairlead forward add 53/udp --guest dev`\n",
		"forward add [::1]:8080 --to 9000":                    "fairlead: \"[::1]:8080\": want `fairlead forward add 8080/tcp --to 9000`\n",
		"forward add 192.0.2.1:8080:80":                       "fairlead: \"192.0.2.1:8080:80\": want `fairlead forward add 80/tcp --to 8080 --bind 192.0.2.1`\n",
		"forward add localhost:8080:80":                       "fairlead: \"localhost:8080:80\": want `fairlead forward add 80/tcp --to 8080`\n",
		"forward add 8080:80 --to 81":                         "fairlead: \"8080:80\": --to 81 is another host port\n",
		"forward rm 8080:80":                                  "fairlead: \"8080:80\": want the guest's port: `fairlead forward rm 80/tcp`\n",
		"deny 8080:80":                                        "fairlead: \"8080:80\": want the guest's port: `fairlead deny 80/tcp`\n",
		"allow 127.0.0.1:80":                                  "fairlead: \"127.0.0.1:80\": want `fairlead allow 80/tcp`\n",
		"expose 8080:80":                                      "fairlead: \"8080:80\": want the guest's port: `fairlead expose 80/tcp --for 1h0m0s`\n",
		"explain --rules 127.0.0.1:80":                        "fairlead: \"127.0.0.1:80\": 127.0.0.1 is a port or an address, and no name: want CONTAINER:PORT, PROJECT/SERVICE:PORT, NAMESPACE/POD:PORT or svc/NAMESPACE/NAME:PORT, with /udp for UDP\n",
		"explain 8080:80":                                     "fairlead: port \"8080:80\": want 1 to 65535, optionally followed by /tcp or /udp\n",
		"deny localhost:80":                                   "fairlead: \"localhost:80\": want `fairlead deny 80/tcp`\n",
		"agent install --sink": "fairlead: unknown flag: --sink: put flags of `fairlead agent` after --, as in `fairlead agent install -- --log-level debug`" +
			" (see `fairlead agent install --help`)\n",
		"agent install x":           "fairlead: for `fairlead agent`: \"x\": want flags only\n",
		"explain":                   "fairlead: explain takes one argument, a port such as 8080 or 53/udp (see `fairlead explain --help`)\n",
		"ls -q -o json":             "fairlead: --quiet: want no --output with it\n",
		"ls x":                      "fairlead: ls takes no argument, got \"x\"\n",
		"completion foo":            "fairlead: unknown command \"foo\" for \"fairlead completion\" (see `fairlead completion --help`)\n",
		"completion bsh":            "fairlead: unknown command \"bsh\" for \"fairlead completion\": did you mean \"bash\"? (see `fairlead completion --help`)\n",
		"doctor --host --self-test": "fairlead: --self-test is of the guest: want no --host with it\n",
		"completion bash x":         "fairlead: completion bash takes no argument, got \"x\"\n",
	} {
		if _, stderr, code := execute(t, strings.Fields(args)...); code != exitUsage || stderr != want {
			t.Errorf("%s: exit %d\n got %swant %s", args, code, stderr, want)
		}
	}
}

// Help is for people: no Go types or quoting, and an example where it helps.
func TestHelp(t *testing.T) {
	for args, want := range map[string][]string{
		"--help":              {"Run:", "See the ports:", "Configure and diagnose:", "Exit status: 0"},
		"help explain":        {"Examples:", "Exit status: 0 if it is reachable"},
		"ls --help":           {"output format: table, wide or json", "AGE is how long", "Examples:"},
		"explain --help":      {"--label KEY=VALUE"},
		"config check --help": {"--host ", "check a file of the host peer"},
	} {
		out, _, code := execute(t, strings.Fields(args)...)
		if code != exitOK || strings.Contains(out, "stringToString") || strings.Contains(out, `["`) {
			t.Errorf("%s: exit %d\n%s", args, code, out)
		}
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s lacks %q:\n%s", args, w, out)
			}
		}
	}
}

// Every command that takes arguments or flags shows how it is used.
func TestEveryCommandHasAnExample(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			walk(sub)
		}
		c.InitDefaultHelpFlag()
		flags := 0
		c.LocalFlags().VisitAll(func(*pflag.Flag) { flags++ })
		takes := flags > 1 || strings.Contains(c.Use, " ")
		if takes && !c.Hidden && c.Runnable() && !c.HasSubCommands() && c.Example == "" {
			t.Errorf("%s has no example", c.CommandPath())
		}
		for line := range strings.Lines(c.Example) {
			if words := strings.Fields(line); len(words) == 0 || !strings.HasPrefix(strings.TrimSpace(line), c.CommandPath()) && c.HasParent() {
				t.Errorf("an example of %s is %q", c.CommandPath(), line)
			}
		}
	}
	walk(newRoot())
}

func TestConfigCheckListsAllMistakes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	for _, tt := range []struct {
		yaml           string
		code           int
		stdout, stderr string
	}{
		{"holdDwon: 1s\nobserver: x\n", exitError, "", "fairlead: F:1:1: unknown key \"holdDwon\" (did you mean \"holdDown\"?)\nfairlead: F:2:11: observer: \"x\": want auto, bpf or poll\n"},
		{"rules: [{action: deny}, {name: web, action: allow, match: {ports: 80}}]\n", exitOK, "F: ok, 2 rules\n",
			"F: warning: rule 2 (web) never decides: rule 1 matches everything that it matches\n"},
		{"holdDown: 1s\n", exitOK, "F: ok, 0 rules\n", ""},
	} {
		if err := os.WriteFile(file, []byte(tt.yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		out, stderr, code := execute(t, "config", "check", file)
		if out, stderr = strings.ReplaceAll(out, file, "F"), strings.ReplaceAll(stderr, file, "F"); code != tt.code || out != tt.stdout || stderr != tt.stderr {
			t.Errorf("%q: exit %d\n%s%s", tt.yaml, code, out, stderr)
		}
	}
	if err := os.WriteFile(file, []byte("grace: 1s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := execute(t, "config", "check", file); code != exitError || !strings.Contains(stderr, "use --host") {
		t.Errorf("a file of the host: exit %d, %s", code, stderr)
	}
}

// The variable of the agent and host peer does not redirect commands.
func TestDaemonsVariableIsNotTheClients(t *testing.T) {
	serve(t, guest{})
	t.Setenv("FAIRLEAD_CONTROL", t.TempDir()+"/none")
	if _, stderr, code := execute(t, "ls"); code != exitOK {
		t.Errorf("exit %d, %q", code, stderr)
	}
}

// A socket that was named is never replaced by defaults.
func TestConfigShowOfNamedSocket(t *testing.T) {
	for _, args := range [][]string{{}, {"--host"}} {
		none := t.TempDir() + "/none"
		_, stderr, code := execute(t, append([]string{"config", "show", "--control", none}, args...)...)
		if code != exitError || !strings.Contains(stderr, none) {
			t.Errorf("%q: exit %d, %q", args, code, stderr)
		}
	}
}

func TestLsForScripts(t *testing.T) {
	serve(t, guest{})
	if out, _, code := execute(t, "ls", "--no-headers"); code != exitOK || strings.Contains(out, "PORT") || out == "" {
		t.Errorf("exit %d, %q", code, out)
	}
	var b strings.Builder
	at := netip.MustParseAddrPort("127.0.0.1:80")
	row := status.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP}}, HostAddresses: []netip.AddrPort{at}}
	lost := row
	lost.Lost, lost.HostAddresses = true, []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:81")}
	if err := writeAddresses(&b, status.List{Publications: []status.Publication{row, row, lost, {}}}); err != nil || b.String() != "127.0.0.1:80\n" {
		t.Errorf("%q, %v", b.String(), err)
	}
}

// A configuration of the host is tested as one, and of which guest it must be said where that
// matters. A file that is neither says why.
func TestRulesTestTakesAFileOfTheHost(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"host.yaml":  "connect: [dev=vsock://3:1, build=vsock://4:1]\nrules: [{match: {guest: dev, ports: 80}, action: deny}]\n",
		"agent.yaml": "rules: [{match: {ports: 80}, action: deny}]\n",
		"typo.yaml":  "holdDwon: 1s\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		file, args, out, stderr string
		code                    int
	}{
		{"host.yaml", "80 --guest dev", "tcp 0.0.0.0:80 of guest dev: denied by host rule 1", "", exitOK},
		{"host.yaml", "80 --guest build", "tcp 0.0.0.0:80 of guest build: allowed on the host at 127.0.0.1:80 (host default)", "", exitOK},
		{"host.yaml", "81", "tcp 0.0.0.0:81: allowed on the host at 127.0.0.1:81 (host default)", "", exitOK},
		{"host.yaml", "80", "", "give one with --guest: dev or build", exitError},
		{"host.yaml", "80 --guest x", "", "no such guest: want dev or build", exitError},
		{"agent.yaml", "80", "tcp 0.0.0.0:80: denied by rule 1", "", exitOK},
		{"typo.yaml", "80", "", `unknown key "holdDwon"`, exitError},
	} {
		args := append([]string{"explain", "--rules", "--config", filepath.Join(dir, tt.file)}, strings.Fields(tt.args)...)
		out, stderr, code := execute(t, args...)
		if code != tt.code || !strings.Contains(out, tt.out) || !strings.Contains(stderr, tt.stderr) || (tt.stderr == "") != (stderr == "") {
			t.Errorf("%s %s: exit %d: %s%s", tt.file, tt.args, code, out, stderr)
		}
	}
}

// Where nobody runs, the rules are those of the one configuration that is there.
func TestRulesTestOfNobodyWhoRuns(t *testing.T) {
	dir := t.TempDir()
	agent, host := filepath.Join(dir, "agent.yaml"), filepath.Join(dir, "host.yaml")
	check := func(goos string, want bool) {
		t.Helper()
		if got := ofHost(goos, agent, host); got != want {
			t.Errorf("%s: host %v", goos, got)
		}
	}
	check("linux", false)
	check("windows", true)
	for _, path := range []string{host, agent} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		check("linux", path == host)
	}
}

// Who forgets the -- before the flags of what is installed is told so.
func TestInstallWithFlagsOfItsOwn(t *testing.T) {
	for _, parent := range []string{"host", "agent"} {
		_, stderr, code := execute(t, parent, "install", "--link-token", "x")
		if want := "put flags of `fairlead " + parent + "` after --, as in `fairlead " + parent + " install -- "; code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("exit %d, %q, want %q", code, stderr, want)
		}
	}
}
