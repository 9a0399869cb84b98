// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/test/nat/corpus"
)

var update = flag.Bool("update", false, "write the rules that engines write into the corpus")

const corpusDir = "../nat/corpus"

// capture is one ruleset of the corpus, and how to make an engine write it.
type capture struct {
	file   string
	proxy  bool
	legacy bool // its iptables are iptables-legacy
}

// Ports that the engine publishes without a rule.
const (
	// The container has no IPv6 address: docker-proxy alone serves it.
	proxied = "tcp [::]:8086"
	// docker-proxy alone serves it: nothing that enters PREROUTING has this address,
	// and OUTPUT leaves out the loopback unless the engine runs without proxies.
	loopback = "tcp 127.0.0.1:8081"
	// Debian's engine asks ip6tables-legacy whether a rule exists already, and the
	// answer is yes for all but the first of a protocol.
	ruleless = "[::]"
)

var (
	debianCaptures = []capture{
		{"docker-nft", true, false}, {"docker-nft-noproxy", false, false},
		{"docker-legacy", true, true}, {"docker-legacy-noproxy", false, true},
	}
	mobyCaptures = []capture{{"docker-nftables", true, false}, {"docker-nftables-noproxy", false, false}}

	// What every engine publishes, and what only the next version does.
	debianContainers = [][]string{{"--name", "web", "-p", "8080:80", "-p", "127.0.0.1:8081:81", "-p", "5353:53/udp",
		"-p", "9000-9002:9000-9002", "-p", "192.0.2.2:8082:82"}}
	mobyContainers = append(slices.Clone(debianContainers),
		[]string{"--name", "both", "-p", "[::1]:8083:83", "-p", "[2001:db8::2]:8084:84", "-p", "8085:85/tcp", "-p", "8085:85/udp"},
		[]string{"--name", "user", "--network", "own", "-p", "8086:86"})
)

// Engines still write the rules of the corpus, and publish the ports that the corpus
// expects of them. With -update the rules are captured anew; the expectations are
// written by hand.
func TestDockerRulesMatchCorpus(t *testing.T) {
	for _, args := range [][]string{
		{"ip", "addr", "add", "192.0.2.2/24", "dev", "nodebr"},
		{"ip", "addr", "add", "2001:db8::2/64", "dev", "nodebr", "nodad"},
		{"sysctl", "-qw", "net.ipv6.conf.all.forwarding=1", "net.ipv6.conf.default.forwarding=1"},
	} {
		run(t, args[0], args[1:]...)
	}
	t.Cleanup(func() {
		run(t, "ip", "addr", "del", "192.0.2.2/24", "dev", "nodebr")
		run(t, "ip", "addr", "del", "2001:db8::2/64", "dev", "nodebr")
	})
	captures, containers, moby := debianCaptures, debianContainers, os.Getenv(dockerdVariable) != ""
	if moby {
		captures, containers = mobyCaptures, mobyContainers
	}
	for _, c := range captures {
		t.Run(c.file, func(t *testing.T) {
			noRules(t)
			if c.legacy {
				legacyFirst(t)
			}
			flags := []string{fmt.Sprintf("--userland-proxy=%v", c.proxy), "--ipv6", "--fixed-cidr-v6=fd00:17::/64"}
			if !moby {
				flags = append(flags, "--experimental", "--ip6tables")
			}
			dockerd(t, flags...)
			dockerImage(t)
			defer func() { _, _ = try("sh", "-c", "docker rm -f web both user; docker network rm own"); noRules(t) }()
			if moby {
				run(t, "docker", "network", "create", "--subnet=172.18.0.0/16", "--opt=com.docker.network.bridge.name=own0", "own")
			}
			for _, args := range containers {
				drun(t, append(slices.Clone(args), "bb")...)
			}
			ports, err := dockerPorts()
			if err != nil {
				t.Fatal(err)
			}
			c.check(t, c.rules(t, moby), ports)
		})
	}
}

// noRules removes what engines wrote before, and their bridge.
func noRules(t testing.TB) {
	t.Helper()
	run(t, "sh", "-euc", `nft flush ruleset
for tool in iptables-legacy ip6tables-legacy; do printf '*nat\nCOMMIT\n' | $tool-restore; done
ip link del docker0 2>/dev/null || true`)
}

// legacyFirst makes iptables iptables-legacy until the end of the test.
func legacyFirst(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	for _, tool := range []string{"iptables", "ip6tables"} {
		if err := os.Symlink("/usr/sbin/"+tool+"-legacy", filepath.Join(dir, tool)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// rules are the sections of a corpus file, without packet counters.
func (c capture) rules(t testing.TB, nftables bool) (out []corpus.Section) {
	t.Helper()
	if nftables {
		return []corpus.Section{{Name: "nft", Text: run(t, "nft", "-s", "list", "ruleset") + "\n"}}
	}
	kind := "nft"
	if c.legacy {
		kind = "legacy"
	}
	for _, tool := range []string{"iptables-" + kind, "ip6tables-" + kind} {
		text := run(t, tool+"-save", "-t", "nat") + "\n"
		text = regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(text, "")
		text = regexp.MustCompile(`\[\d+:\d+\]`).ReplaceAllString(text, "[0:0]")
		out = append(out, corpus.Section{Name: tool, Text: text})
	}
	return out
}

// check compares with the corpus, or writes the rules into it.
func (c capture) check(t *testing.T, rules []corpus.Section, ports []string) {
	cases, err := corpus.Cases()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(cases, func(have corpus.Case) bool { return have.Name == c.file })
	if i < 0 {
		t.Fatalf("no %s.txt", c.file)
	}
	if *update {
		c.write(t, rules)
	} else {
		for at := range cases[i].Sections {
			cases[i].Sections[at].Command = nil
		}
		if d := cmp.Diff(cases[i].Sections, rules); d != "" {
			t.Errorf("rules (-corpus +engine):\n%s", d)
		}
	}
	var expects, publishes []string
	for _, line := range cases[i].Want {
		expects = append(expects, strings.Join(strings.Fields(line)[:2], " "))
	}
	for _, line := range ports {
		key := line[:strings.LastIndex(line, " ")]
		if !slices.Contains(expects, key) && c.withoutRule(key) {
			continue
		}
		publishes = append(publishes, key)
	}
	slices.Sort(expects)
	slices.Sort(publishes)
	if d := cmp.Diff(expects, publishes); d != "" {
		t.Errorf("ports (-corpus +engine):\n%s", d)
	}
}

// withoutRule reports whether the engine publishes a port without a rule.
func (c capture) withoutRule(key string) bool {
	return key == proxied || c.proxy && key == loopback || c.legacy && strings.Contains(key, ruleless)
}

// write replaces the rules of a corpus file.
func (c capture) write(t *testing.T, rules []corpus.Section) {
	t.Helper()
	path := filepath.Join(corpusDir, c.file+".txt")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(b), "-- ")
	_, want, wanted := strings.Cut(rest, "-- want --\n")
	if !ok || !wanted {
		t.Fatalf("%s has no sections", path)
	}
	for _, s := range rules {
		head += "-- " + s.Name + " --\n" + s.Text
	}
	if err := os.WriteFile(path, []byte(head+"-- want --\n"+want), 0o644); err != nil { //nolint:gosec // a file of the tree
		t.Fatal(err)
	}
}
