// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// curl runs curl in the namespace, without a proxy, and returns what it printed.
func (s *space) curl(t *testing.T, args ...string) (out string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit())
	defer cancel()
	err = s.Do(func() error {
		b, err := exec.CommandContext(ctx, "curl", append([]string{"--disable", "--fail", "--silent", "--show-error", "--noproxy", "*"}, args...)...).CombinedOutput()
		out = string(b)
		return err
	})
	return out, err
}

// curl, which resolves names below localhost itself, reaches a container by its name, in a
// network without a resolver, at the URL that ls shows.
func TestCurlReachesContainersByName(t *testing.T) {
	r := newRig(t, "--source", "docker", "--docker-host", enginetest.Docker(t, fmt.Sprintf(named, "{}")))
	r.hostFlags = append(r.hostFlags, "--names", "127.0.0.1:8000", "--names-tls", "127.0.0.1:8443")
	hello := http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) { _, _ = fmt.Fprintf(w, "hello from %s", q.Host) })
	web := &http.Server{Handler: hello}
	plain := r.guest.listen(t, "tcp4", "0.0.0.0:80")
	go func() { _ = web.Serve(plain) }()
	t.Cleanup(func() { _ = web.Close() })
	secure := httptest.NewUnstartedServer(hello)
	_ = secure.Listener.Close()
	secure.Listener = r.guest.listen(t, "tcp4", "0.0.0.0:443")
	secure.StartTLS()
	t.Cleanup(secure.Close)
	r.start()
	for _, n := range []string{"80", "443"} {
		r.wantState("tcp 0.0.0.0:"+n, port.Active.String())
	}
	var url, urlTLS string
	r.eventually("names are served, and ls has the URL", func() error {
		if out, _, _ := fairlead(t, "ls", "--names", "--control", r.hostCtl); strings.Contains(out, "not served") {
			return errors.New(out)
		}
		l, err := listAt(r.hostCtl)
		if err != nil {
			return err
		}
		for _, p := range l.Publications {
			switch p.Port {
			case 80:
				url = p.URL
			case 443:
				urlTLS = p.URL
			}
		}
		if url == "" || urlTLS == "" {
			return errors.New("no URL")
		}
		return nil
	})
	if want := "https://web.localhost:8443"; urlTLS != want { // the name that certificates have
		t.Errorf("the URL of 443 is %s, want %s", urlTLS, want)
	}
	for _, c := range []struct {
		url  string
		args []string
	}{
		{url, nil}, {"http://web.localhost:8000/", nil}, {"http://80.web.localhost:8000/", nil},
		{urlTLS, []string{"--insecure"}}, {"https://web.localhost:8443/", []string{"--insecure"}}, {"https://443.web.localhost:8443/", []string{"--insecure"}},
	} {
		_, at, _ := strings.Cut(c.url, "://")
		out, err := r.outside.curl(t, append(c.args, c.url)...)
		if want := "hello from " + strings.TrimSuffix(at, "/"); err != nil || out != want {
			t.Errorf("%s: %q, %v, want %q", c.url, out, err, want)
		}
	}
	if out, err := r.outside.curl(t, "http://none.localhost:8000/"); err == nil || !strings.Contains(out, "404") {
		t.Errorf("a name that nobody has: %q, %v", out, err)
	}
}
