// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package observe

import (
	"fmt"
	"net/http"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// A browser opens a container by its name, follows the links of the list, and lets no page
// read the list.
func TestNamesInABrowser(t *testing.T) {
	const container = `{"Id":"4f1e3c0a9b7d2c6e8f5a1b3d7c9e0f2a4b6c8d0e1f3a5b7c9d1e3f5a7b9c0d2e","Name":"/my_web","Names":["/my_web"],
		"State":{"Status":"running","Running":true},"HostConfig":{},"Config":{},
		"NetworkSettings":{"Networks":{},"Ports":{"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"8081"}]}}}`
	r := newRig(t, "--source", "docker", "--docker-host", enginetest.Docker(t, container))
	l, err := r.guest.Listen("tcp", "0.0.0.0:8081")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(w, `<link rel="icon" href="data:,"><h1>hello from %s</h1>`, q.Host)
	})}
	go func() { _ = web.Serve(l) }()
	t.Cleanup(func() { _ = web.Close() })
	r.startAgent()
	r.hostPage(t, "dev", "--names", "127.0.0.1:8000")
	r.ready()
	host := status.NewClient(filepath.Join(r.dir, "h", "s"))
	wait.Within(t, limit(), "the host serves the name", func() error {
		n, err := host.Names(t.Context())
		if err == nil && (len(n.Names) == 0 || !n.Listeners[0].Open) { // the page does not change by itself
			err = fmt.Errorf("names %+v", n)
		}
		return err
	})
	p := newChromium(t, r.outside).open(t, "http://localhost:8000/", 1280, 800)
	p.wait("the names", `[...document.querySelectorAll('td:first-child a')].map((a) => a.textContent).join(' ')`, "my-web.localhost my-web.dev.localhost")
	p.wait("its style", `getComputedStyle(document.querySelector('table')).borderCollapse`, "collapse")
	p.noConsole()
	p.eval(`document.querySelector('td a').click()`)
	p.wait("the container", `document.querySelector('h1')?.textContent`, "hello from my-web.localhost:8000")
	p.noConsole()
	p.wait("the list is not for pages", `fetch('http://localhost:8000/names.json').then(() => 'read', () => 'refused')`, "refused")
	p.visit("http://8081.my-web.dev.localhost:8000/")
	p.wait("the container by its port", `document.querySelector('h1')?.textContent`, "hello from 8081.my-web.dev.localhost:8000")
}
