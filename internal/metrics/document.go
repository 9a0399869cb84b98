// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"io"
	"strings"
)

// Document writes docs/metrics.md.
func Document(w io.Writer) error {
	var b strings.Builder
	b.WriteString(`# Metrics

<!-- Generated from internal/metrics by "make docs": do not edit. -->

Agent and host peer serve /metrics on the control socket, and on TCP where
` + "`--metrics-addr`" + ` names an address:

` + "```" + `
curl --unix-socket /run/fairlead/control.sock http://fairlead/metrics
` + "```" + `

Labels are bounded sets: no port, address, process or name of a guest is ever one. A
scrape reads what is counted anyway; between scrapes nothing runs for it. Alert rules
are in [deploy/prometheus](../deploy/prometheus), a dashboard in
[deploy/grafana](../deploy/grafana). Besides what is listed, the Go runtime and the
system say what they know of the process, as ` + "`go_*` and `process_*`" + `.
`)
	section(&b, "Agent", declareAgent().all)
	b.WriteString(fmt.Sprintf(`
`+"`fairlead_propagation_seconds`"+` has classic buckets from %s to %s, and native ones of
factor %g for a Prometheus that takes them. Dashboard and alerts use the classic ones, which
such a Prometheus must be told to keep (`+"`always_scrape_classic_histograms`"+`).
`, seconds(propagationBuckets[0]), seconds(propagationBuckets[len(propagationBuckets)-1]), nativeFactor))
	section(&b, "Host peer", declareHost().all)
	_, err := io.WriteString(w, b.String())
	return err
}

func seconds(v float64) string {
	if v < 1e-3 {
		return fmt.Sprintf("%g µs", v*1e6)
	}
	return fmt.Sprintf("%g s", v)
}

func section(b *strings.Builder, title string, families []*Family) {
	fmt.Fprintf(b, "\n## %s\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n", title)
	for _, f := range families {
		labels := make([]string, len(f.Labels))
		for i, l := range f.Labels {
			labels[i] = fmt.Sprintf("**%s**: %s", l.Name, l.Values)
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", f.Name, f.Kind, strings.Join(labels, "<br>"), f.Help)
	}
}
