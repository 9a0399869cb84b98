// SPDX-License-Identifier: Apache-2.0

package status

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// A program of root learns whose a process is, whole, and why nobody's, from the control
// socket alone. A host has no such question.
func TestWhois(t *testing.T) {
	web := port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "1", Namespace: "n", Labels: map[string]string{"a": "b"}, Cluster: "c"}
	var asked []string
	s := NewServer(Options{Role: "agent", Logger: slog.New(slog.DiscardHandler), Container: func(cgroups []string) (port.Owner, error) {
		asked = cgroups
		if cgroups[0] == "/web" {
			return web, nil
		}
		return port.Owner{}, errors.New("no engine knows its container")
	}})
	path := filepath.Join(t.TempDir(), "run", "s")
	l, err := ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() { <-ended })
	go func() {
		defer close(ended)
		_ = s.Serve(t.Context(), l, true)
	}()
	c := NewClient(path)
	long := "/" + strings.Repeat("x", 4095)
	cgroups := []string{"/web", "/", long, long, long, long}
	if got, err := c.Whois(t.Context(), cgroups); err != nil || !reflect.DeepEqual(got, web) || !slices.Equal(asked, cgroups) {
		t.Errorf("%+v, %v, asked for %q", got, err, asked)
	}
	var none NoContainer
	if got, err := c.Whois(t.Context(), []string{"/other"}); !errors.As(err, &none) || none != "no engine knows its container" {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := NewClient(path+"x").Whois(t.Context(), cgroups); err == nil || errors.As(err, &none) {
		t.Errorf("an agent that does not run: %v", err)
	}
	if code, body := serve(s, http.MethodPost, "/v1/whois", "{"); code != http.StatusBadRequest {
		t.Errorf("malformed: %d %s", code, body)
	}
	if code, body := serve(NewServer(Options{Role: "host"}), http.MethodPost, "/v1/whois", "{}"); code != http.StatusNotFound {
		t.Errorf("a host: %d %s", code, body)
	}
	tcp, w := http.NewServeMux(), httptest.NewRecorder()
	s.routes(tcp, false)
	tcp.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/whois", strings.NewReader("{}")))
	if w.Code != http.StatusNotFound {
		t.Errorf("not at the control socket: %d", w.Code)
	}
}
