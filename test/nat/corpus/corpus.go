// SPDX-License-Identifier: Apache-2.0

// Package corpus holds rulesets as tools and people write them, each with what
// is published for it. A file has sections that begin with "-- name --": the tool
// that loads the text, "sh" for a script before it, and "want" for the answer.
//
// What Docker writes is captured by test/engines: -run RulesOfTheCorpus -update.
package corpus

import (
	"embed"
	"fmt"
	"slices"
	"strings"
)

//go:embed *.txt
var files embed.FS

// Case is one ruleset.
type Case struct {
	Name     string // of its file, without the ending
	Sections []Section
	// Want has a line for each publication, "tcp ADDRESS:PORT [TABLE] DIAL...
	// (why it is withheld)", then one for each rule that is not understood,
	// beginning with "problem ".
	Want []string
}

// Section is a text and the command that loads it from its standard input.
type Section struct {
	Name, Text string
	Command    []string
}

// Cases returns all rulesets, by name. The texts are the caller's to change.
func Cases() ([]Case, error) {
	entries, err := files.ReadDir(".")
	if err != nil {
		return nil, err
	}
	var out []Case
	for _, e := range entries {
		b, err := files.ReadFile(e.Name())
		if err != nil {
			return nil, err
		}
		c, err := parse(strings.TrimSuffix(e.Name(), ".txt"), string(b))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Name(), err)
		}
		out = append(out, c)
	}
	return out, nil
}

func parse(name, text string) (Case, error) {
	c := Case{Name: name}
	var all []Section
	for line := range strings.Lines(text) {
		l := strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(l, "-- "); ok && strings.HasSuffix(name, " --") {
			all = append(all, Section{Name: strings.TrimSuffix(name, " --")})
			continue
		}
		if len(all) > 0 {
			all[len(all)-1].Text += line
		}
	}
	for _, s := range all {
		switch s.Name {
		case "want":
			c.Want = slices.DeleteFunc(strings.Split(s.Text, "\n"), func(l string) bool { return l == "" })
			continue
		case "sh":
			s.Command = []string{"sh", "-eu", "-s"}
		case "nft":
			s.Command = []string{"nft", "-f", "-"}
		case "iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy":
			s.Command = []string{s.Name + "-restore", "-w"} // for the lock that all on a machine share
		default:
			return c, fmt.Errorf("section %q is not known", s.Name)
		}
		c.Sections = append(c.Sections, s)
	}
	if len(c.Sections) == 0 || len(c.Want) == 0 {
		return c, fmt.Errorf("%d sections, %d lines wanted", len(c.Sections), len(c.Want))
	}
	return c, nil
}
