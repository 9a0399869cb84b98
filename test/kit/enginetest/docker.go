// SPDX-License-Identifier: Apache-2.0

package enginetest

import (
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Docker serves the API of a Docker with one container, and returns its socket.
func Docker(t *testing.T, container string) string {
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
			_, _ = fmt.Fprintf(w, `[%s]`, container)
		default:
			_, _ = fmt.Fprint(w, container)
		}
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return "unix://" + path
}
