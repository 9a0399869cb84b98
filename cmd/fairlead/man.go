// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/status/version"
)

// newMan writes the manual pages for packages ("go run ./hack/stages man").
func newMan() *cobra.Command {
	return &cobra.Command{
		Use: "man DIR", Short: "Write the manual pages to a directory", Hidden: true, Args: oneArg("a directory"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			root := c.Root()
			root.DisableAutoGenTag = true
			return writeManuals(root, args[0])
		},
	}
}

// writeManuals writes the page of a command and those of its subcommands.
func writeManuals(c *cobra.Command, dir string) error {
	for _, sub := range c.Commands() {
		if !sub.IsAvailableCommand() || sub.IsAdditionalHelpTopicCommand() {
			continue
		}
		if err := writeManuals(sub, dir); err != nil {
			return err
		}
	}
	page, err := manual(c)
	if err != nil {
		return err
	}
	name := strings.ReplaceAll(c.CommandPath(), " ", "-") + ".1"
	return os.WriteFile(filepath.Join(dir, name), page, 0o644)
}

// manual returns the page of a command: what cobra makes, with our sections before the
// last one.
func manual(c *cobra.Command) ([]byte, error) {
	date := time.Unix(0, 0).UTC() // for reproducible builds
	var b bytes.Buffer
	err := doc.GenMan(c, &doc.GenManHeader{
		Title: strings.ToUpper(strings.ReplaceAll(c.CommandPath(), " ", "-")), Section: "1",
		Source: "fairlead " + version.String(), Manual: "fairlead", Date: &date,
	}, &b)
	if err != nil {
		return nil, err
	}
	page := b.String()
	at := strings.LastIndex(page, ".SH SEE ALSO")
	if at < 0 {
		at = len(page)
	}
	return []byte(page[:at] + exitStatus() + files() + page[at:]), nil
}

func exitStatus() string {
	return manSection("EXIT STATUS", [][2]string{
		{"0", "Success, or the answer yes."},
		{"1", `Failure, or the answer no: "explain" of a port that is not reachable, "doctor" with a check that fails.`},
		{"2", "A usage error."},
	})
}

func files() string {
	agent := config.DefaultAgent()
	rows := [][2]string{
		{config.DefaultAgentFile, "Configuration of the agent."},
		{agent.LinkToken, "Token of the link, mode 0600."},
		{agent.Control, "Control socket of the agent."},
		{"/etc/fairlead/host.yaml, $XDG_CONFIG_HOME/fairlead/host.yaml", "Configuration of the host peer of root, and of other users."},
		{"/run/fairlead/host.sock, $XDG_RUNTIME_DIR/fairlead/host.sock", "Control socket of the host peer of root, and of other users."},
	}
	return manSection("FILES", rows)
}

// manSection returns a section of terms and what they mean.
func manSection(title string, rows [][2]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".SH %s\n", title)
	for _, r := range rows {
		fmt.Fprintf(&b, ".TP\n\\fB%s\\fP\n%s\n", manText(r[0]), manText(r[1]))
	}
	return b.String()
}

// manText escapes what groff interprets; a line must not begin with a dot or quote.
func manText(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(s)
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		s = `\&` + s
	}
	return s
}
