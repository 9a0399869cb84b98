// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"fmt"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// Command returns the command line that makes the request, for a shell.
func (q Request) Command() string {
	words := map[Op]string{
		Add: "forward add", Remove: "forward rm",
		Deny: "deny", Allow: "allow", Expose: "expose", Hide: "expose",
	}
	list := []string{"fairlead", words[q.Op]}
	switch {
	case q.Demand != "":
		list = append(list, word(q.Demand))
	case q.Port != 0:
		list = append(list, fmt.Sprintf("%d/%s", q.Port, q.Protocol))
	case q.Owner != "":
		list = append(list, "--owner", word(q.Owner))
	default:
		list = append(list, "--all")
	}
	if q.Op == Hide {
		list = append(list, "--end")
	}
	if q.To != 0 {
		list = append(list, fmt.Sprintf("--to %d", q.To))
	}
	for _, f := range []struct{ name, value string }{{"--on-conflict", q.OnConflict}, {"--bind", q.Bind}, {"--guest", q.Guest}} {
		if f.value != "" {
			list = append(list, f.name, word(f.value))
		}
	}
	if q.Seconds > 0 {
		list = append(list, "--for", (time.Duration(q.Seconds) * time.Second).String())
	}
	return strings.Join(list, " ")
}

// Elsewhere is the command that gives a port of the guest, or what demand names, a host port in
// place of one that the system refuses: 8080 for 80.
func Elsewhere(guest port.Slot, demand string, refused uint16) string {
	q := Request{Op: Add, Demand: demand, To: refused%50000 + 8000}
	if demand == "" {
		q.Protocol, q.Port = guest.Protocol, guest.Port
	}
	return "`" + q.Command() + "`"
}

// word returns s as one word of a shell.
func word(s string) string {
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || strings.ContainsRune("\"'`$\\*?[]{}()<>|&;!#~", r) }) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
