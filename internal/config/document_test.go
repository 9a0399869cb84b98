// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

const documentFile = "../../docs/config.md"

const documentIntro = `# Configuration

<!-- Generated from internal/config by "make docs": do not edit. -->

For anyone who writes ` + "`" + `agent.yaml` + "`" + ` or ` + "`" + `host.yaml` + "`" + `. Each setting is a key of that file, a flag, and a variable: ` + "`" + `FAIRLEAD_` + "`" + ` and the flag's name, as
` + "`" + `FAIRLEAD_HOLD_DOWN` + "`" + ` for ` + "`" + `--hold-down` + "`" + `. A flag takes precedence over the variable, and that over the file. The agent reads
` + "`" + `/etc/fairlead/agent.yaml` + "`" + `, the host peer ` + "`" + `host.yaml` + "`" + ` in its user's directory; ` + "`" + `--config` + "`" + ` or ` + "`" + `FAIRLEAD_CONFIG` + "`" + ` names another file.

| the host peer's | Linux, root | Linux, other users | Windows | macOS |
|---|---|---|---|---|
| configuration | ` + "`" + `/etc/fairlead` + "`" + ` | ` + "`" + `$XDG_CONFIG_HOME/fairlead` + "`" + ` or ` + "`" + `~/.config/fairlead` + "`" + ` | ` + "`" + `%AppData%\fairlead` + "`" + ` | ` + "`" + `~/Library/Application Support/fairlead` + "`" + ` |
| token, what was added at run time | ` + "`" + `/var/lib/fairlead` + "`" + ` | ` + "`" + `$XDG_STATE_HOME/fairlead` + "`" + ` or ` + "`" + `~/.local/state/fairlead` + "`" + ` | the same | the same |
| control socket | ` + "`" + `/run/fairlead` + "`" + ` | ` + "`" + `$XDG_RUNTIME_DIR/fairlead` + "`" + ` | the same | the same |

Below are the defaults of root on Linux. A key with a dot is in a mapping: ` + "`" + `docker.hosts` + "`" + ` is ` + "`" + `docker: {hosts: …}` + "`" + `. A list may be one
value; in flags and variables commas separate its values.

Rules, ` + "`" + `expose` + "`" + `, ` + "`" + `labels` + "`" + `, ` + "`" + `bind` + "`" + ` and ` + "`" + `publish.allow` + "`" + ` change while fairlead runs: files are read again when they change, and on SIGHUP. Other
settings need a restart, which log and ` + "`" + `doctor` + "`" + ` say. A file with a mistake is refused, and the previous configuration remains.
[config.schema.json](config.schema.json) is for editors.

## Example

` + "`" + `` + "`" + `` + "`" + `yaml
# yaml-language-server: $schema=config.schema.json
link: vsock://:1023        # listen for the host on vsock
expose: loopback           # never wider than the host's loopback
source: [socket, nat, docker]
rules:
  - name: no-debug         # the first matching rule decides
    match: {ports: 9229}
    action: deny
  - match: {owner: container, labels: {public: "yes"}}
    action: allow
    hostAddress: all
` + "`" + `` + "`" + `` + "`" + `

## The client's address

A server in the guest sees the agent as its client. By this rule the agent sends the
[PROXY protocol](https://www.haproxy.org/download/2.9/doc/proxy-protocol.txt), version 2, before the client's first byte:

` + "`" + `` + "`" + `` + "`" + `yaml
rules:
  - match: {protocol: tcp, ports: 25}
    action: allow
    proxyProtocol: v2
` + "`" + `` + "`" + `` + "`" + `

The server must expect the header on each connection (nginx: ` + "`" + `listen 25 proxy_protocol` + "`" + `), also from within the guest, where there is none.
It has the client's address on the host and the address that it connected to. Only the host peer knows clients: through the relay of WSL,
gvproxy or wsl-proxy there is no header, or one without addresses (` + "`" + `UNSPEC` + "`" + `), of which ` + "`" + `explain` + "`" + ` warns.

## Several guests

` + "`" + `` + "`" + `` + "`" + `yaml
# host.yaml
connect:
  - dev=vsock://3:1023
  - build=vsock://4:1023
  - lab=unix:///run/user/1000/fairlead/lab.sock
` + "`" + `` + "`" + `` + "`" + `

With ` + "`" + `linkToken` + "`" + ` one token is for all guests; [otherwise](linux-vm.md#several-guests) each has its own.
`

// document returns docs/config.md.
func document() string {
	agent, host := DefaultAgent(), defaultHost(systemDirs())
	agents, hosts := documented(agent.fields()), documented(host.fields())
	var b strings.Builder
	b.WriteString(documentIntro)
	fmt.Fprint(&b, "\n## Agent\n\n", tableOf(agents.without(hosts)))
	fmt.Fprint(&b, "\n## Host peer\n\n", tableOf(hosts.without(agents)))
	fmt.Fprint(&b, "\n## Both\n\nWhere defaults differ the host peer's is the second one.\n\n", tableOf(agents.with(hosts)))
	writeRules(&b)
	return b.String()
}

// writeRules writes the keys of a rule and of its match, as the schema describes them.
func writeRules(b *strings.Builder) {
	b.WriteString("\n## Rules\n\nThe first rule that matches decides; [rules](rules.md) says what holds without one.\n\n" +
		"| key | values | meaning |\n|---|---|---|\n")
	rule := ruleSchema()["properties"].(object)
	match := rule["match"].(object)["properties"].(object)
	for _, k := range slices.Sorted(maps.Keys(rule)) {
		writeKey(b, k, rule[k].(object))
	}
	for _, k := range slices.Sorted(maps.Keys(match)) {
		writeKey(b, "match."+k, match[k].(object))
	}
}

func writeKey(b *strings.Builder, key string, schema object) {
	words, _ := schema["enum"].([]string)
	if list, ok := schema["anyOf"].([]object); ok {
		words, _ = list[0]["enum"].([]string)
	}
	var values []string
	for _, w := range words {
		if w == strings.ToLower(w) {
			values = append(values, "`"+w+"`")
		}
	}
	fmt.Fprintf(b, "| `%s` | %s | %s |\n", key, strings.Join(values, ", "), schema["description"])
}

// setting is a row of the document.
type setting struct{ key, flag, def, meaning string }

type rows []setting

func documented(fields []field) (all rows) {
	for _, f := range fields {
		all = append(all, setting{f.Key, f.flag, defaultOf(f), strings.ReplaceAll(f.usage, "|", `\|`)})
	}
	return all
}

// in returns the setting of the same key and meaning among others.
func (s setting) in(others rows) (setting, bool) {
	i := slices.IndexFunc(others, func(o setting) bool { return o.key == s.key && o.meaning == s.meaning })
	if i < 0 {
		return setting{}, false
	}
	return others[i], true
}

// without returns the settings that others do not have.
func (r rows) without(others rows) (own rows) {
	for _, s := range r {
		if _, ok := s.in(others); !ok {
			own = append(own, s)
		}
	}
	return own
}

// with returns the settings that others have as well, with both defaults where these differ.
func (r rows) with(others rows) (both rows) {
	for _, s := range r {
		if o, ok := s.in(others); ok {
			if o.def != s.def {
				s.def += ", " + o.def
			}
			both = append(both, s)
		}
	}
	return both
}

func tableOf(r rows) string {
	table := "| key | flag | default | meaning |\n|---|---|---|---|\n"
	for _, s := range r {
		table += fmt.Sprintf("| `%s` | `--%s` | %s | %s |\n", s.key, s.flag, s.def, s.meaning)
	}
	return table
}

// defaultOf returns a setting's default as code, if it has one.
func defaultOf(f field) string {
	def := strings.Join(f.Texts(), ", ")
	if def == "" {
		return ""
	}
	return "`" + def + "`"
}

func TestDocumentIsUpToDate(t *testing.T) {
	want := document()
	if *update {
		if err := os.WriteFile(documentFile, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(documentFile)
	if err != nil || string(got) != want {
		t.Errorf("docs/config.md is out of date (%v): run make docs", err)
	}
}

// The example in the documentation is accepted.
func TestDocumentedExample(t *testing.T) {
	_, rest, _ := strings.Cut(documentIntro, "## Example\n\n```yaml\n")
	example, _, _ := strings.Cut(rest, "```")
	c, err := LoadAgent(write(t, t.TempDir()+"/agent.yaml", example), nil, nil)
	if err != nil || c.Rules.Len() != 2 {
		t.Errorf("%v, %v", c.Rules, err)
	}
}

func TestDocumentedGuests(t *testing.T) {
	_, rest, _ := strings.Cut(documentIntro, "## Several guests")
	_, rest, _ = strings.Cut(rest, "```yaml\n")
	example, _, _ := strings.Cut(rest, "```")
	c, err := LoadHost(write(t, t.TempDir()+"/host.yaml", example), nil, nil)
	if err != nil || len(c.Connect) != 3 || c.Connect[1].Name != "build" {
		t.Errorf("%v, %v", c.Connect, err)
	}
}

// Each key of a rule says what it means, here and in editors, and the loader takes it.
func TestDocumentedRules(t *testing.T) {
	rule := ruleSchema()["properties"].(object)
	match := rule["match"].(object)["properties"].(object)
	for _, properties := range []object{rule, match} {
		for k, v := range properties {
			if d, _ := v.(object)["description"].(string); d == "" {
				t.Errorf("%s has no description", k)
			}
		}
	}
	_, rest, _ := strings.Cut(documentIntro, "## The client's address")
	_, rest, _ = strings.Cut(rest, "```yaml\n")
	example, _, _ := strings.Cut(rest, "```")
	c, err := LoadAgent(write(t, t.TempDir()+"/agent.yaml", example), nil, nil)
	if err != nil || c.Rules.Len() != 1 {
		t.Errorf("%v, %v", c.Rules, err)
	}
}
