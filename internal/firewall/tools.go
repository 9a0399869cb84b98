// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// state is whether a firewall is on.
type state uint8

const (
	unknownState state = iota
	off
	on
	blocksAll // whatever rules say
)

// rule is the line below the title of a profile.
var rule = regexp.MustCompile(`(?m)^-{10,}\s*$`)

// netshState reads what `netsh advfirewall show currentprofile state` prints: for each
// profile in use a title, a line, and the state as the last word, in the language of Windows.
// It returns on if any of them is, and the titles of these.
func netshState(out string) (s state, profiles []string) {
	parts := rule.Split(strings.ReplaceAll(out, "\r\n", "\n"), -1)
	for i, part := range parts[1:] {
		title := lastLine(parts[i])
		first, _, _ := strings.Cut(strings.TrimLeft(part, "\n"), "\n")
		words := strings.Fields(first)
		if len(words) == 0 {
			return unknownState, nil
		}
		switch strings.ToUpper(words[len(words)-1]) {
		case "ON":
			s = on
			profiles = append(profiles, strings.TrimSuffix(strings.TrimRight(title, ": "), " Profile Settings"))
		case "OFF":
			s = max(s, off)
		default: // another language
			return unknownState, nil
		}
	}
	return s, profiles
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// filterState reads what macOS prints for `socketfilterfw --getglobalstate`.
func filterState(out string) state {
	switch {
	case strings.Contains(out, "(State = 0)"):
		return off
	case strings.Contains(out, "(State = 1)"):
		return on
	case strings.Contains(out, "(State = 2)"):
		return blocksAll
	}
	return unknownState
}

// constant is a firewall that says the same of each port.
func constant(text string, judge func(slot port.Slot) Report) Firewall {
	return Firewall{text: text, judge: func(slot port.Slot, _ bool, _ time.Duration) Report { return judge(slot) }}
}

// windowsFirewall is that of Windows, whose rules are by port, program and profile.
func windowsFirewall(s state, profiles []string) Firewall {
	text := "Windows Defender Firewall may be on, and blocks connections of other machines unless a rule allows them"
	switch s {
	case off:
		const text = "Windows Defender Firewall is off"
		return constant(text, func(port.Slot) Report { return Report{Text: text} })
	case on:
		text = "Windows Defender Firewall is on (" + strings.Join(profiles, ", ") + "), and blocks connections of other machines unless a rule allows them"
	}
	return constant(text, func(slot port.Slot) Report {
		return Report{
			Text: text + "; as administrator",
			Command: fmt.Sprintf(`netsh advfirewall firewall add rule name="fairlead %s" dir=in action=allow protocol=%s localport=%d`,
				slot, strings.ToUpper(slot.Protocol.String()), slot.Port),
		}
	})
}

// filterTool is the program that shows and changes the application firewall of macOS.
const filterTool = "/usr/libexec/ApplicationFirewall/socketfilterfw"

// macFirewall is that of macOS, which is by program.
func macFirewall(s state) Firewall {
	r := Report{
		Text:    "the application firewall of macOS, if it is on, asks or blocks by program, not by port",
		Command: "sudo " + filterTool + ` --unblockapp "$(command -v fairlead)"`,
	}
	switch s {
	case off:
		r = Report{Text: "the application firewall of macOS is off"}
	case on:
		r.Text = "the application firewall of macOS is on: it asks or blocks by program, not by port"
	case blocksAll:
		r = Report{Text: "the application firewall of macOS blocks all connections of other machines", Command: "sudo " + filterTool + " --setblockall off", Refuses: true}
	}
	return constant(r.Text, func(port.Slot) Report { return r })
}
