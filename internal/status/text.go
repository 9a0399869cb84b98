// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/port"
)

// WriteTable writes the list for people: within 80 columns, or wide.
func WriteTable(w io.Writer, l List, wide bool, now time.Time) error {
	guests := false
	for _, p := range l.Publications {
		guests = guests || p.Guest != ""
	}
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	head := []string{"PORT", "GUEST ADDRESS", "STATE", "ON THE HOST", "OWNER", "AGE"}
	if guests {
		head = append(head, "GUEST")
	}
	if wide {
		head = append(head, "SOURCES", "DIAL", "RULE", "REASON")
	}
	_, _ = fmt.Fprintln(tw, strings.Join(head, "\t"))
	for _, p := range l.Publications {
		row := []string{
			p.Key().Slot().String(),
			shorten(p.Address.String(), width(wide, 18)),
			p.State.String(),
			shorten(hostColumn(p, wide), width(wide, 20)),
			shorten(ownerColumn(p.Owner), width(wide, 18)),
			Age(now.Sub(p.Since)),
		}
		if guests {
			row = append(row, Quote(p.Guest))
		}
		if wide {
			var sources []string
			for _, o := range p.Origins {
				sources = append(sources, o.Source)
			}
			row = append(row, orDash(strings.Join(unique(sources), ",")), orDash(p.DialTarget), orDash(p.Rule), orDash(Quote(p.Reason)))
		}
		_, _ = fmt.Fprintln(tw, strings.Join(row, "\t"))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, s := range l.Sources {
		if s.Error != "" {
			if _, err := fmt.Fprintf(w, "source %s is %s: %s\n", s.Name, s.State, Quote(s.Error)); err != nil {
				return err
			}
		}
		if err := writeWarnings(w, s); err != nil {
			return err
		}
	}
	return nil
}

// shownWarnings is how many warnings of a source people read at most.
const shownWarnings = 5

func writeWarnings(w io.Writer, s Source) error {
	for i, text := range s.Warnings {
		if i == shownWarnings {
			text = fmt.Sprintf("and %d more: ls -o json", len(s.Warnings)-i)
		}
		if _, err := fmt.Fprintf(w, "source %s: %s\n", s.Name, Quote(text)); err != nil || i == shownWarnings {
			return err
		}
	}
	return nil
}

func width(wide bool, n int) int {
	if wide {
		return 64
	}
	return n
}

// hostColumn says where a port is reachable, or else why not.
func hostColumn(p Publication, wide bool) string {
	if len(p.HostAddresses) == 0 {
		if wide || p.Reason == "" {
			return "-"
		}
		return Quote(p.Reason)
	}
	first := p.HostAddresses[0].String()
	if n := len(p.HostAddresses) - 1; n > 0 {
		if wide {
			var all []string
			for _, a := range p.HostAddresses {
				all = append(all, a.String())
			}
			return strings.Join(all, ",")
		}
		return fmt.Sprintf("%s +%d", first, n)
	}
	return first
}

func ownerColumn(o Owner) string {
	name := Quote(o.Name)
	switch {
	case o.Kind == port.OwnerUnknown:
		return "-"
	case o.Kind == port.OwnerProcess:
		return fmt.Sprintf("%s (%s)", name, Quote(o.ID))
	case name != "":
		return name
	}
	return Quote(o.ID)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func unique(list []string) (out []string) {
	seen := make(map[string]bool)
	for _, s := range list {
		if !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	return out
}

// shorten cuts s to at most n characters and says so by its last one.
func shorten(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// Quote makes a name that comes from the guest safe for a terminal: what is not
// a printable character, or would end a table's cell, is shown escaped.
func Quote(s string) string {
	if !strings.ContainsFunc(s, unsafeRune) && utf8.ValidString(s) {
		return s
	}
	return strconv.QuoteToGraphic(s)
}

func unsafeRune(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }

// Age says a duration as people do, in one unit.
func Age(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// WriteEvent writes one watch event as a line for people.
func WriteEvent(w io.Writer, e Event) error {
	if e.Publication == nil {
		return nil
	}
	p := *e.Publication
	state := p.State.String()
	if e.Previous != nil {
		state = e.Previous.String() + " -> " + state
	}
	if e.Type == Gone {
		state = "gone"
	}
	line := fmt.Sprintf("%s  %-8s  %-10s %-22s  %s", e.Time.Local().Format("15:04:05.000"), e.Type,
		p.Key().Slot(), Quote(p.Address.String()), state)
	if len(p.HostAddresses) > 0 && e.Type != Gone {
		line += "  on " + hostColumn(p, true)
	}
	if o := ownerColumn(p.Owner); o != "-" {
		line += "  by " + o
	}
	if p.Reason != "" {
		line += "  (" + Quote(p.Reason) + ")"
	}
	if p.Guest != "" {
		line += "  guest " + Quote(p.Guest)
	}
	_, err := fmt.Fprintln(w, line)
	return err
}
