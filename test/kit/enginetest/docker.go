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
			_, _ = fmt.Fprintf(w, `[%s]`, strings.Join(containers, ","))
		default:
			_, _ = fmt.Fprint(w, named(containers, r.URL.Path))
		}
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return "unix://" + path
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
