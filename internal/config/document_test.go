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

Each setting is a flag, an environment variable and a key of a YAML file. A flag takes
precedence over the environment, and that over the file. The agent reads
` + "`/etc/fairlead/agent.yaml`" + `, the host peer ` + "`host.yaml`" + ` in its user's directory; ` + "`--config`" + ` or ` + "`FAIRLEAD_CONFIG`" + ` names
another file.

| the host peer's | Linux, root | Linux, other users | Windows | macOS |
|---|---|---|---|---|
| configuration | ` + "`/etc/fairlead` | `$XDG_CONFIG_HOME/fairlead` or `~/.config/fairlead` | `%AppData%\\fairlead` | `~/Library/Application Support/fairlead`" + ` |
| token, forwards | ` + "`/var/lib/fairlead` | `$XDG_STATE_HOME/fairlead` or `~/.local/state/fairlead`" + ` | the same | the same |
| control socket | ` + "`/run/fairlead` | `$XDG_RUNTIME_DIR/fairlead`" + ` | the same | the same |

Below, the defaults are those of root on Linux.

A key with a dot is in a mapping: ` + "`docker.hosts`" + ` is

` + "```yaml" + `
docker:
  hosts: [unix:///run/docker.sock]
` + "```" + `

A list may be one value. In flags and variables commas separate its values. Rules,
` + "`expose`, `labels`, `bind` and the agent's `publish.allow`" + ` change while fairlead runs: it
reloads them when a file changes, and on SIGHUP. Other settings need a restart; a warning in the log, and the agent's
` + "`doctor`" + `, name those that differ. A file with a mistake is refused, and the previous configuration remains.

` + "`fairlead config check [FILE]`" + ` lists all mistakes of the file.
[config.schema.json](config.schema.json) is its JSON Schema, for editors.

## Example

` + "```yaml" + `
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
` + "```" + `

The keys of a rule are [below](#rules).

## The client's address

A server in the guest sees the agent as its client. By a rule of the agent the agent tells it who connects, by a header of the
[PROXY protocol](https://www.haproxy.org/download/2.9/doc/proxy-protocol.txt), version 2, before the client's first byte:

` + "```yaml" + `
rules:
  - match: {protocol: tcp, ports: 25}
    action: allow
    proxyProtocol: v2
` + "```" + `

The server must expect the header on each connection (nginx: ` + "`listen 25 proxy_protocol`" + `), also on those within the guest, which
have none. The header has the client's address on the host and the address that it connected to; IPv4 is written as mapped into IPv6
where they are of two families. Flows by [name](names.md) have it, too. The header is for TCP alone: a rule without ` + "`protocol: tcp`" + `, or of a host, is refused.

Only the host peer knows clients. A relay that shows ports of the guest, as WSL's, and gvproxy or wsl-proxy, which the agent's
other sinks use, hide them: they connect to the server themselves, without a header, or through the agent, which sends a header
without addresses (` + "`UNSPEC`" + `) then. ` + "`explain`" + ` warns of that; ` + "`explain --rules`" + ` names the rule.

## Several guests

A host peer serves any number of guests. Give each a name: commands and the page show it, and each guest with a name has
a token file of its own, ` + "`NAME.token`" + ` beside the default one (` + "`fairlead host pair --guest NAME`" + ` stores it there).

` + "```yaml" + `
# host.yaml
connect:
  - dev=vsock://3:1023
  - build=vsock://4:1023
  - lab=unix:///run/user/1000/fairlead/lab.sock
` + "```" + `

With ` + "`linkToken`" + ` one file is for all guests.
`

// document returns docs/config.md.
func document() string {
	agent, host := DefaultAgent(), defaultHost(systemDirs())
	var b strings.Builder
	b.WriteString(documentIntro)
	writeFields(&b, "Agent", agent.fields())
	writeFields(&b, "Host peer", host.fields())
	writeRules(&b)
	return b.String()
}

// writeRules writes the keys of a rule and of its match, as the schema describes them.
func writeRules(b *strings.Builder) {
	b.WriteString("\n## Rules\n\nThe first rule that matches decides; the [README](../README.md#rules) says what holds without one.\n\n" +
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

func writeFields(b *strings.Builder, title string, fields []field) {
	fmt.Fprintf(b, "\n## %s\n\n| key | flag | variable | default | meaning |\n|---|---|---|---|---|\n", title)
	for i := range fields {
		f := &fields[i]
		def := strings.Join(f.get(), ", ")
		if def != "" {
			def = "`" + def + "`"
		}
		fmt.Fprintf(b, "| `%s` | `--%s` | `%s` | %s | %s |\n", f.key, f.flag, f.env(), def, strings.ReplaceAll(f.usage, "|", `\|`))
	}
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
