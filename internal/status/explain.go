// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// Explainer returns why a port is, or is not, reachable.
type Explainer interface {
	Explain(ctx context.Context, q explain.Query) (explain.Report, error)
}

// ParseQuery reads "8080", which means both protocols, "8080/tcp" or "53/udp".
func ParseQuery(s string) (explain.Query, error) {
	number, protocol, given := strings.Cut(s, "/")
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 {
		return explain.Query{}, fmt.Errorf("port %q: want 1 to 65535, optionally followed by /tcp or /udp", s)
	}
	q := explain.Query{Port: uint16(n)}
	if given {
		if q.Protocol, err = port.ParseProtocol(protocol); err != nil {
			return explain.Query{}, fmt.Errorf("port %q: %w", s, err)
		}
	}
	return q, nil
}

// explain serves GET, which never dials, and POST, which may.
func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	q, err := ParseQuery(r.URL.Query().Get("port"))
	if err != nil {
		text(w, http.StatusBadRequest, err.Error())
		return
	}
	q.Dial = r.Method == http.MethodPost
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(explainTimeout + writeTimeout))
	ctx, cancel := context.WithTimeout(r.Context(), explainTimeout)
	defer cancel()
	report, err := s.o.Explainer.Explain(ctx, q)
	if err != nil {
		text(w, http.StatusInternalServerError, err.Error())
		return
	}
	addWaiting(&report, s.waiting(q))
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(report)
}

// addWaiting adds to a report what was asked for by name and waits. It is the answer where
// no port is known.
func addWaiting(report *explain.Report, list []explain.Related) {
	if len(list) > 0 && len(report.Chains) == 0 {
		if report.Verdict != port.VerdictNothingHere {
			report.Related = slices.Insert(report.Related, 0, explain.Related{Kind: report.Verdict, Text: report.Summary})
		}
		report.Verdict, report.Summary, report.Next = list[0].Kind, list[0].Text, ""
		list = list[1:]
	}
	report.Related = append(report.Related, list...)
}

// waiting returns what was asked for by name, has the port or gets the host port, and waits.
func (s *Server) waiting(q explain.Query) (list []explain.Related) {
	add := func(d port.Demand, hostPort uint16, reason string) {
		if q.Protocol != 0 && q.Protocol != d.Protocol || d.Port != q.Port && hostPort != q.Port {
			return
		}
		text := fmt.Sprintf("%s is asked for by name, and waits: %s", d, reason)
		list = append(list, explain.Related{Kind: port.VerdictPending, Text: text})
	}
	named := make(map[string]bool) // by requests
	if s.o.Forwards != nil {
		for _, r := range s.forwards().Requests {
			if d := r.Request.Match().Demand; !d.IsZero() && r.State == port.Pending.String() {
				named[d.String()] = true
				add(d, r.Request.To, r.Reason)
			}
		}
	}
	for _, p := range s.o.Provider.List().Publications { // asked for by name
		if d, err := port.ParseDemand(p.Waits); err == nil && !named[p.Waits] {
			add(d, 0, p.Reason)
		}
	}
	return list
}

// explainTimeout bounds dumping other namespaces and dialling.
const explainTimeout = 10 * time.Second

// Explain asks why a port is, or is not, reachable. Its dial targets are tried only if
// q.Dial is set.
func (c *Client) Explain(ctx context.Context, q explain.Query) (explain.Report, error) {
	method := http.MethodGet
	if q.Dial {
		method = http.MethodPost
	}
	what := strconv.Itoa(int(q.Port))
	if q.Protocol != 0 {
		what += "/" + q.Protocol.String()
	}
	return ask[explain.Report](ctx, c, method, "/v1/explain?port="+what, nil, explainTimeout)
}

var marks = map[explain.Mark]struct {
	word  string
	color Color
}{
	explain.OK: {"ok", Green}, explain.Warning: {"warn", Yellow}, explain.Failing: {"FAIL", Red}, explain.Skipped: {"-", Plain},
}

// Where the text of a step begins, and where other lines are continued.
const stepIndent, hanging = 25, 4

// WriteReport writes a human-readable report. Lines longer than style.Width are continued
// on the next line.
func WriteReport(w io.Writer, r explain.Report, style Style) error {
	var b strings.Builder
	line := func(indent int, text string) string { return wrap(Quote(text), style.Width, indent) }
	for _, c := range r.Chains {
		fmt.Fprintf(&b, "%s", Quote(c.Publication))
		if c.Guest != "" {
			fmt.Fprintf(&b, " of guest %s", Quote(cmp.Or(c.GuestName, c.Guest)))
		}
		fmt.Fprintf(&b, ": %s\n", c.Verdict)
		for _, s := range c.Steps {
			m := marks[s.Mark]
			text := s.Text
			if s.Since != nil {
				text += ", for " + Age(style.Now.Sub(*s.Since))
			}
			fmt.Fprintf(&b, "  %-16s %s  %s\n", s.Step, style.Paint.Paint(m.color, fmt.Sprintf("%-4s", m.word)), line(stepIndent, text))
		}
		if len(r.Chains) > 1 {
			fmt.Fprintf(&b, "  %s\n", line(hanging, c.Summary))
		}
		b.WriteByte('\n')
	}
	for _, n := range r.Related {
		fmt.Fprintf(&b, "%s\n", line(hanging, fmt.Sprintf("related: %s: %s", n.Kind, n.Text)))
	}
	for _, m := range r.Missing {
		fmt.Fprintf(&b, "%s\n", line(hanging, "not checked: "+m))
	}
	if len(r.Related)+len(r.Missing) > 0 {
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "%s\n", line(hanging, r.Summary))
	if r.Next != "" {
		fmt.Fprintf(&b, "%s %s\n", style.Paint.Paint(Bold, "Next:"), line(len("Next: "), r.Next))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
