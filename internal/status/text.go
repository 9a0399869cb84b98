// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/port"
)

// Style is the format of human-readable text.
type Style struct {
	Wide  bool // with all columns
	Width int  // of a row, to which cells are truncated; 0 for unlimited
	Paint Painter
	Now   time.Time
	Empty string // written instead of a table without rows
	Bare  bool   // without the header line
	All   bool   // with what guests of a host do not publish
}

// WriteTable writes the list as a human-readable table.
func WriteTable(w io.Writer, l List, style Style) error {
	t := table{style: style}
	guests, peers := map[string]bool{}, peersByGuest(l)
	lines := linesOf(l.Publications)
	for _, p := range lines {
		guests[p.Guest] = true
	}
	showGuests := len(guests) > 1 || style.Wide && !guests[""] && len(guests) > 0
	t.columns = []column{
		{head: "PORT"}, {head: "GUEST ADDRESS", least: 13}, {head: "STATE"}, {head: "ON THE HOST", least: 18},
		{head: "OWNER", least: 8}, {head: "AGE"},
	}
	if showGuests {
		t.columns = append(t.columns, column{head: "GUEST", least: 8})
	}
	showURLs := style.Wide && slices.ContainsFunc(l.Publications, func(p Publication) bool { return p.URL != "" })
	if showURLs {
		t.columns = append(t.columns, column{head: "URL", least: 8})
	}
	if style.Wide {
		t.columns = append(t.columns, column{head: "SOURCES"}, column{head: "DIAL"}, column{head: "RULE"}, column{head: "REASON"})
	}
	for _, p := range lines {
		row := []string{
			p.Key.Slot().String(), Quote(p.address()), p.shownState(), hostColumn(p.Publication, style.Wide), ownersColumn(p.Publication, style.Wide),
			p.age(style.Now),
		}
		if showGuests {
			row = append(row, Quote(cmp.Or(p.GuestName, p.Guest)))
		}
		if showURLs {
			row = append(row, orDash(Quote(p.URL)))
		}
		if style.Wide {
			var sources []string
			for _, o := range p.Origins {
				sources = append(sources, o.Source)
			}
			row = append(row, orDash(Quote(strings.Join(unique(sources), ","))), orDash(Quote(p.DialTarget)), orDash(Quote(p.Rule)), orDash(Quote(p.Reason)))
		}
		state := p.State
		if row[stateColumn] == lostState {
			state = port.Failed
		}
		t.add(row, state, p.exposed())
	}
	if len(t.rows) > 0 || style.Empty == "" {
		if err := t.write(w); err != nil {
			return err
		}
	} else if _, err := fmt.Fprintln(w, style.Empty); err != nil {
		return err
	}
	if err := writeExposed(w, lines, style.Paint); err != nil {
		return err
	}
	if err := writeNotes(w, lines); err != nil {
		return err
	}
	if err := WritePeers(w, l, style); err != nil {
		return err
	}
	return writeSources(w, l, style, peers)
}

// writeSources writes which sources are not live, and their warnings.
func writeSources(w io.Writer, l List, style Style, peers map[string]Peer) error {
	for _, s := range l.Sources {
		if _, ok := peers[s.Name]; ok { // a guest, whose state WritePeers writes
			if style.All {
				if err := writeWarnings(w, s); err != nil {
					return err
				}
			}
			continue
		}
		line := ""
		switch {
		case s.Error != "":
			line = fmt.Sprintf("source %s is %s: %s", Quote(s.Name), Quote(s.State), Quote(s.Error))
		case s.State == "starting":
			line = fmt.Sprintf("source %s is starting", Quote(s.Name))
		}
		if line != "" {
			if _, err := fmt.Fprintln(w, style.Paint.Paint(Yellow, line)); err != nil {
				return err
			}
		}
		if err := writeWarnings(w, s); err != nil {
			return err
		}
	}
	return nil
}

// lostState is shown for ports that are open while their guest is not connected.
const lostState = "lost"

// peersByGuest returns the guests of a host.
func peersByGuest(l List) map[string]Peer {
	peers := map[string]Peer{}
	for _, p := range l.Peers {
		if l.Role == "host" {
			peers[p.id()] = p
		}
	}
	return peers
}

// WritePeers writes which guests of a host are not connected, or which host the agent
// refused. It writes nothing if all is well.
func WritePeers(w io.Writer, l List, style Style) error {
	names := GuestNames(l.Peers)
	for _, p := range l.Peers {
		var line string
		switch {
		case p.State == PeerRefused:
			line = "a host was refused"
		case p.State == PeerConnected && p.Error != "":
			line = "two hosts take this agent from each other"
		case p.State == PeerAway && l.Role == "host":
			line = "guest " + Quote(names[p.id()]) + " is not connected"
		default:
			continue
		}
		if !p.Since.IsZero() && p.State == PeerRefused {
			line += " " + Age(style.Now.Sub(p.Since)) + " ago"
		} else if !p.Since.IsZero() {
			line += " for " + Age(style.Now.Sub(p.Since))
		}
		line += ": " + Quote(p.Error)
		if p.Next != "" {
			line += "; " + Quote(p.Next)
		}
		if _, err := fmt.Fprintln(w, style.Paint.Paint(Yellow, line)); err != nil {
			return err
		}
	}
	return nil
}

// writeExposed writes, in red, which ports other machines can reach for a time.
func writeExposed(w io.Writer, lines []line, paint Painter) error {
	for _, p := range lines {
		if !p.exposed() {
			continue
		}
		line := fmt.Sprintf("port %s: %s", p.Key.Slot(), Quote(p.Reason))
		if _, err := fmt.Fprintln(w, paint.Paint(Red, line)); err != nil {
			return err
		}
	}
	return nil
}

// writeNotes writes the reasons of reachable ports that have one.
func writeNotes(w io.Writer, lines []line) error {
	var notes []string
	for _, p := range lines {
		if p.State == port.Active && p.Reason != "" && !p.exposed() {
			notes = append(notes, p.Key.Slot().String()+": "+p.Reason)
		}
	}
	return writeSome(w, "port ", notes)
}

func writeWarnings(w io.Writer, s Source) error {
	return writeSome(w, "source "+Quote(s.Name)+": ", s.Warnings)
}

// writeSome writes the first lines, and how many more there are.
func writeSome(w io.Writer, prefix string, lines []string) error {
	const limit = 5
	for i, text := range lines {
		if i == limit {
			text = fmt.Sprintf("and %d more: ls -o json", len(lines)-i)
		}
		if _, err := fmt.Fprintf(w, "%s%s\n", prefix, Quote(text)); err != nil || i == limit {
			return err
		}
	}
	return nil
}

// hostColumn returns where a port is reachable, or else why not.
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

// ownersColumn names all who serve a port, or one and how many others.
func ownersColumn(p Publication, wide bool) string {
	all := []string{}
	for _, o := range p.Others {
		all = append(all, ownerColumn(o.Owner, wide))
	}
	if own := ownerColumn(p.Owner, wide); own != "-" || len(all) == 0 {
		all = slices.Insert(all, 0, own)
	}
	if wide || len(all) == 1 {
		return strings.Join(all, ", ")
	}
	return fmt.Sprintf("%s +%d", all[0], len(all)-1)
}

func ownerColumn(o port.Owner, wide bool) string {
	if wide && o.Cluster != "" {
		return ownerColumn(o, false) + " in " + Quote(o.Cluster)
	}
	name := Quote(o.Name)
	switch {
	case o.Kind == port.OwnerUnknown:
		return "-"
	case o.Kind == port.OwnerProcess && o.ID != "":
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

// Shorten truncates s to n characters, with an ellipsis as the last.
func Shorten(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// Quote makes a name from the guest safe for a terminal: if a character is not
// printable, the whole is quoted with escapes.
func Quote(s string) string {
	if !strings.ContainsFunc(s, unsafeRune) && utf8.ValidString(s) {
		return s
	}
	return strconv.QuoteToGraphic(s)
}

func unsafeRune(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }

// Age formats a duration in one unit.
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

// eventColors are the colours of the events' types.
var eventColors = map[EventType]Color{Added: Green, Gone: Yellow}

// WriteEvent writes one watch event as a human-readable line.
func WriteEvent(w io.Writer, e Event, paint Painter) error {
	if e.Publication == nil {
		return nil
	}
	p := *e.Publication
	state := paint.Paint(stateColors[p.State], p.shownState())
	if e.Previous != nil {
		state = e.Previous.String() + " -> " + state
	}
	age := p.age(e.Time)
	switch e.Type {
	case Gone:
		state = "gone after " + age
	case Present:
		state += " for " + age
	}
	line := fmt.Sprintf("%s  %s  %-10s %-22s  %s", e.Time.Local().Format("15:04:05.000"),
		paint.Paint(eventColors[e.Type], fmt.Sprintf("%-8s", e.Type)), p.Key.Slot(), Quote(p.guestAddress()), state)
	if len(p.HostAddresses) > 0 && e.Type != Gone {
		color := Plain
		if p.exposed() {
			color = Red
		}
		line += "  on " + paint.Paint(color, hostColumn(p, true))
	}
	if p.URL != "" && e.Type != Gone {
		line += "  as " + Quote(p.URL)
	}
	if o := ownersColumn(p, true); o != "-" {
		line += "  by " + o
	}
	if p.Reason != "" && e.Type != Gone {
		line += "  (" + Quote(p.Reason) + ")"
	}
	if p.Guest != "" {
		line += "  guest " + Quote(cmp.Or(p.GuestName, p.Guest))
	}
	if p.Node != "" {
		line += "  node " + Quote(p.Node)
	}
	_, err := fmt.Fprintln(w, line)
	return err
}
