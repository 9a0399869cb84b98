// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/status/doctor"
)

// Examiner returns what the agent knows about its health.
type Examiner interface {
	Examine() doctor.Agent
}

func (s *Server) examine(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	_ = json.NewEncoder(w).Encode(s.o.Examiner.Examine())
}

// examineTimeout is how long an agent may take to look at its health.
const examineTimeout = 10 * time.Second

// Examine asks a running agent about its health.
func (c *Client) Examine(ctx context.Context) (doctor.Agent, error) {
	return ask[doctor.Agent](ctx, c, http.MethodGet, "/v1/doctor", nil, examineTimeout)
}

// doctorIndent is where details begin.
const doctorIndent = 33

// WriteDoctor writes a human-readable report: what is worst comes last, where it is read.
// Details longer than style.Width are continued on the next line. Wide adds what
// matters only to who looks into a problem.
func WriteDoctor(w io.Writer, r doctor.Report, style Style) error {
	words := map[doctor.State]string{
		doctor.OK:      style.Paint.Paint(Green, "ok  "),
		doctor.Warning: style.Paint.Paint(Yellow, "warn"),
		doctor.Failing: style.Paint.Paint(Red, "FAIL"),
	}
	var b strings.Builder
	count := map[doctor.State]int{}
	for _, state := range []doctor.State{doctor.OK, doctor.Warning, doctor.Failing} {
		for _, c := range r.Checks {
			if c.State != state {
				continue
			}
			count[state]++
			fmt.Fprintf(&b, "%s  %-26s %s\n", words[state], c.Area+" "+c.Name, wrap(Quote(c.Detail), style.Width, doctorIndent))
			if c.More != "" && style.Wide {
				fmt.Fprintf(&b, "%*s%s\n", doctorIndent, "", wrap(Quote(c.More), style.Width, doctorIndent))
			}
			if c.Remedy != "" {
				fmt.Fprintf(&b, "%*s→ %s\n", doctorIndent, "", wrap(Quote(c.Remedy), style.Width, doctorIndent+2))
			}
		}
	}
	fmt.Fprintf(&b, "\n%d ok, %s, %d failed\n", count[doctor.OK], plural(count[doctor.Warning], "warning"), count[doctor.Failing])
	_, err := io.WriteString(w, b.String())
	return err
}

// wrap breaks s at spaces, so that no line that begins at column indent is wider than
// width, if it can be; 0 is unlimited.
func wrap(s string, width, indent int) string {
	room := width - indent
	if width == 0 || room < 20 || utf8.RuneCountInString(s) <= room {
		return s
	}
	var b strings.Builder
	column := 0
	for i, word := range strings.Split(s, " ") {
		n := utf8.RuneCountInString(word)
		switch {
		case i == 0:
		case column+1+n > room:
			b.WriteString("\n" + strings.Repeat(" ", indent))
			column = 0
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += n
	}
	return b.String()
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
