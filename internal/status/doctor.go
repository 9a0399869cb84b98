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

	"github.com/fairlead/fairlead/internal/diagnose/doctor"
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
	return ask[doctor.Agent](ctx, c, http.MethodGet, "/v1/doctor", examineTimeout)
}

// WriteDoctor writes a human-readable report.
func WriteDoctor(w io.Writer, r doctor.Report, paint Painter) error {
	words := map[doctor.State]string{
		doctor.OK:      paint.Paint(Green, "ok  "),
		doctor.Warning: paint.Paint(Yellow, "warn"),
		doctor.Failing: paint.Paint(Red, "FAIL"),
	}
	var b strings.Builder
	count := map[doctor.State]int{}
	for _, c := range r.Checks {
		count[c.State]++
		fmt.Fprintf(&b, "%s  %-26s %s\n", words[c.State], c.Area+" "+c.Name, Quote(c.Detail))
		if c.Remedy != "" {
			fmt.Fprintf(&b, "      %-26s → %s\n", "", Quote(c.Remedy))
		}
	}
	fmt.Fprintf(&b, "\n%d ok, %d warnings, %d failed\n", count[doctor.OK], count[doctor.Warning], count[doctor.Failing])
	_, err := io.WriteString(w, b.String())
	return err
}
