// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/names"
)

// names returns the names of ports.
func (s *Server) names(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.o.Names())
}

// Names returns the names of the ports of a host.
func (c *Client) Names(ctx context.Context) (names.Report, error) {
	return ask[names.Report](ctx, c, http.MethodGet, "/v1/names", nil, 0)
}

// WriteNames writes names as a human-readable table.
func WriteNames(w io.Writer, r names.Report, style Style) error {
	t := table{style: style, columns: []column{{head: "NAME"}, {head: "PORTS"}, {head: "KIND"}, {head: "OWNER"}, {head: "GUEST"}}}
	for _, e := range r.Names {
		owner := Quote(e.OwnerName)
		if e.Kind == port.OwnerService && e.Namespace != "" {
			owner = Quote(e.Namespace + "/" + e.OwnerName)
		}
		var ports []string
		for _, n := range e.Ports {
			ports = append(ports, strconv.Itoa(int(n)))
		}
		name := "-"
		if len(e.Names) > 0 {
			name = e.Names[0]
		}
		t.add([]string{name, strings.Join(ports, ","), e.Kind.String(), owner, Quote(e.Guest)}, port.Active, false)
	}
	if len(t.rows) > 0 {
		if err := t.write(w); err != nil {
			return err
		}
	} else if _, err := fmt.Fprintln(w, "No container or Service has a published TCP port."); err != nil {
		return err
	}
	var notes []string
	for _, e := range r.Names {
		if len(e.Ambiguous) > 0 {
			notes = append(notes, strings.Join(e.Ambiguous, ", ")+": others than "+e.OwnerName+" have it, too")
		}
	}
	if err := writeSome(w, "", notes); err != nil {
		return err
	}
	return writeNameListeners(w, r, style)
}

// writeNameListeners writes why names do not work.
func writeNameListeners(w io.Writer, r names.Report, style Style) error {
	var lines []string
	if len(r.Listeners) == 0 {
		lines = append(lines, "names are not served: start `fairlead host` with --names 127.0.0.1:80")
	}
	for _, l := range r.Listeners {
		if !l.Open {
			lines = append(lines, l.Protocol+" names are not served: "+cmp.Or(l.Error, "not tried yet"))
		}
	}
	for _, line := range lines {
		if _, err := fmt.Fprintln(w, style.Paint.Paint(Yellow, Quote(line))); err != nil {
			return err
		}
	}
	return nil
}
