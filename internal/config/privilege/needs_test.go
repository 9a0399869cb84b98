// SPDX-License-Identifier: Apache-2.0

package privilege

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite docs/privileges.md")

const document = "../../../docs/privileges.md"

// The document has the table and the sets of the code; test/e2e checks processes against these.
func TestDocumentIsUpToDate(t *testing.T) {
	b, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	text = replaceAfter(t, text, "<!-- table -->\n", "\n\n", strings.TrimSuffix(table(), "\n"))
	text = replaceAfter(t, text, "<!-- agent -->\n", "```\n\n", "```\n"+lines(SetOf(append(Agent(), UserSockets()), true)))
	text = replaceAfter(t, text, "<!-- host -->\n", "```\n\n", "```\n"+lines(SetOf(Host(), true)))
	if text == string(b) {
		return
	}
	if *update {
		err = os.WriteFile(document, []byte(text), 0o644)
	}
	if !*update || err != nil {
		t.Errorf("docs/privileges.md is out of date (%v): go test ./internal/config/privilege -update", err)
	}
}

func table() string {
	var b strings.Builder
	b.WriteString("| capability | until | what for | without it |\n|---|---|---|---|\n")
	for _, n := range append(Agent(), UserSockets()) {
		until, lost := "the end", n.Lost
		if n.Attach {
			until = "all hooks are attached"
		}
		if lost == "" {
			lost = "other hooks, or polling"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", n.Name, until, n.Why, lost)
	}
	return b.String()
}

// lines are those of /proc/PID/status.
func lines(s Set) string {
	return fmt.Sprintf("CapInh:\t%016x\nCapPrm:\t%016x\nCapEff:\t%016x\nCapAmb:\t%016x\nNoNewPrivs:\t1\n", 0, uint64(s), uint64(s), 0)
}

// replaceAfter replaces what is between two marks.
func replaceAfter(t *testing.T, text, from, to, with string) string {
	t.Helper()
	before, rest, ok := strings.Cut(text, from)
	_, after, found := strings.Cut(rest, to)
	if !ok || !found {
		t.Fatalf("no %q in the document", from)
	}
	return before + from + with + to + after
}
