// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"strings"
)

// document returns docs/metrics.md.
func document() string {
	var b strings.Builder
	b.WriteString(`# Metrics

<!-- Generated from internal/metrics by "make docs": do not edit. -->

For anyone who monitors fairlead. Agent and host peer serve /metrics on the control socket, and on TCP where
` + "`--metrics-addr`" + ` names an address, without authentication:

` + "```" + `
curl --unix-socket /run/fairlead/control.sock http://fairlead/metrics
` + "```" + `

Every label has a fixed set of values, named where it differs from the row before with that label: never a port, an
address, a process or a name from a guest. Nothing runs between scrapes. [Alerts](../deploy/prometheus) and a [dashboard](../deploy/grafana) come with fairlead; the
usual ` + "`go_*` and `process_*`" + ` metrics are exported as well.
`)
	writeSection(&b, "Agent", declareAgent().all)
	b.WriteString(fmt.Sprintf(`
`+"`fairlead_propagation_seconds`"+` has classic buckets from %s to %s, and native ones of factor %g.
Dashboard and alerts use the classic ones: with native histograms also set `+"`always_scrape_classic_histograms`"+`.
`, seconds(propagationBuckets[0]), seconds(propagationBuckets[len(propagationBuckets)-1]), nativeFactor))
	writeSection(&b, "Host peer", declareHost().all)
	return b.String()
}

func seconds(v float64) string {
	if v < 1e-3 {
		return fmt.Sprintf("%g µs", v*1e6)
	}
	return fmt.Sprintf("%g s", v)
}

// writeSection writes the values of a label where they differ from those of the row before that has it.
func writeSection(b *strings.Builder, title string, families []*Family) {
	said := make(map[string]string)
	fmt.Fprintf(b, "\n## %s\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n", title)
	for _, f := range families {
		labels := make([]string, len(f.Labels))
		for i, l := range f.Labels {
			labels[i] = fmt.Sprintf("**%s**", l.Name)
			if said[l.Name] != l.Values {
				labels[i] += ": " + l.Values
			}
			said[l.Name] = l.Values
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", f.Name, f.Kind, strings.Join(labels, "<br>"), f.Help)
	}
}
