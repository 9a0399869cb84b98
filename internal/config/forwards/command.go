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
		Forward: "forward add", Remove: "forward rm",
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

// Elsewhere is the command that gives a port of a guest, or what demand names, a host port in
// place of one that the system refuses: 8080 for 80. Guest is empty if there is but one. A forward
// that is there already has to be removed before.
func Elsewhere(of port.Slot, demand, guest string, refused uint16) string {
	q := Request{Op: Forward, Demand: demand, Guest: guest, To: refused%50000 + 8000}
	if demand == "" {
		q.Protocol, q.Port = of.Protocol, of.Port
	}
	return fmt.Sprintf("`%s` (before that, if it is a forward already, `%s`)", q.Command(), q.Undo().Command())
}

// word returns s as one word of a shell.
func word(s string) string {
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || strings.ContainsRune("\"'`$\\*?[]{}()<>|&;!#~", r) }) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
