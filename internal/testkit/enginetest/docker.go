// SPDX-License-Identifier: Apache-2.0

package enginetest

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Docker serves the API of a Docker with these containers, and returns its socket.
func Docker(t *testing.T, containers ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "docker.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Api-Version", "1.41")
		w.Header().Set("Content-Type", "application/json")
		switch {
		case strings.HasSuffix(r.URL.Path, "/_ping"):
			_, _ = fmt.Fprint(w, "OK")
		case strings.HasSuffix(r.URL.Path, "/info"):
			_, _ = fmt.Fprint(w, `{"ServerVersion":"20.10.24"}`)
		case strings.HasSuffix(r.URL.Path, "/events"):
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		case strings.HasSuffix(r.URL.Path, "/containers/json"):
			list := make([]string, len(containers))
			for i, c := range containers {
				list[i] = summary(c)
			}
			_, _ = fmt.Fprintf(w, `[%s]`, strings.Join(list, ","))
		case strings.HasSuffix(r.URL.Path, "/services"), strings.Contains(r.URL.Path, "/networks/"):
			http.NotFound(w, r) // it is in no swarm
		default:
			_, _ = fmt.Fprint(w, named(containers, r.URL.Path))
		}
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return "unix://" + path
}

// summary returns a container as a list has it: its state is a word.
func summary(container string) string {
	var fields map[string]any
	if err := json.Unmarshal([]byte(container), &fields); err != nil {
		return container
	}
	if state, ok := fields["State"].(map[string]any); ok {
		fields["State"] = state["Status"]
	}
	b, _ := json.Marshal(fields) // of what was JSON
	return string(b)
}

// named returns the container whose id a path has, else the first.
func named(containers []string, path string) string {
	for _, c := range containers {
		var it struct{ ID string }
		if json.Unmarshal([]byte(c), &it) == nil && strings.Contains(path, "/"+it.ID+"/") {
			return c
		}
	}
	return containers[0]
}
