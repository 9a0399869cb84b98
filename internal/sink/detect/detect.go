// SPDX-License-Identifier: Apache-2.0

// Package detect chooses the sinks that fit the guest it runs in: a plain VM, WSL,
// Rancher Desktop or Podman machine.
package detect

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/trust"
)

// facts is what the choice of sinks depends on.
type facts struct {
	wsl  bool
	mode string // of WSL's networking: "nat", "mirrored", "virtioproxy", "consomme", "none"; empty if not known

	// gvproxy is the base URL at which a gvproxy answers, with the product whose
	// address that is; empty if none does.
	gvproxy, product string

	wslProxy bool // Rancher Desktop's relay between distributions is there

	link bool // a link to a host peer is configured, not only the default
}

// Where a gvproxy may be, by product, and where Rancher Desktop's relay is.
const (
	rancherSwitch = "http://gateway.rancher-desktop.internal:80"
	olderSwitch   = "http://192.168.127.1:80"
	podmanGateway = "http://gateway.containers.internal"
	wslProxyPath  = "/run/wsl-proxy.sock"
)

// choose returns the sinks for a guest, and why.
func choose(f facts) (sinks []config.Sink, why string) {
	hostlink, listener := config.Sink{Name: "hostlink"}, config.Sink{Name: "listener"}
	switch {
	case f.gvproxy != "":
		sinks = []config.Sink{{Name: "gvproxy", URL: f.gvproxy}}
		why = f.product + ": its gvproxy answers at " + f.gvproxy
		if f.wslProxy {
			sinks = append(sinks, config.Sink{Name: "vtunnel", URL: "unix://" + wslProxyPath})
			why += ", and its relay to other distributions is at " + wslProxyPath
		}
	case f.wslProxy:
		sinks = []config.Sink{{Name: "vtunnel", URL: "unix://" + wslProxyPath}}
		why = "Rancher Desktop: its relay to other distributions is at " + wslProxyPath
	case !f.wsl:
		return []config.Sink{hostlink}, "neither WSL nor gvproxy found: waiting for a host peer"
	case f.mode == "none":
		return []config.Sink{hostlink}, "WSL without networking has no relay: waiting for a host peer"
	case f.mode == "":
		sinks, why = []config.Sink{listener}, "WSL, networking mode unknown: Windows forwards to what listens here"
	case f.mode == "nat":
		sinks, why = []config.Sink{listener}, "WSL in NAT mode: its localhost relay forwards to what listens here"
	default:
		sinks, why = []config.Sink{listener}, "WSL in "+f.mode+" mode: Windows forwards to what listens here"
	}
	if f.link {
		sinks = append(sinks, hostlink)
		why += "; and a link is configured"
	}
	return sinks, why
}

// Sinks returns the sinks that fit this guest, and why. Set link if the user
// configured a link to a host peer. It takes at most a second.
func Sinks(ctx context.Context, link bool) (sinks []config.Sink, why string) {
	f := gather(ctx, system{root: "/", get: answers, run: output})
	f.link = link
	return choose(f)
}

// system is where facts come from.
type system struct {
	root string // of the file system
	get  func(ctx context.Context, url string) bool
	run  func(ctx context.Context, name string, args ...string) (string, error)
}

// gatherTime bounds all probes together, because the start waits for them.
const gatherTime = time.Second

func gather(ctx context.Context, s system) facts {
	ctx, cancel := context.WithTimeout(ctx, gatherTime)
	defer cancel()
	var f facts
	// The kernel of WSL 2 names itself so ("5.15.90.1-microsoft-standard-WSL2").
	release, _ := os.ReadFile(s.root + "/proc/sys/kernel/osrelease")
	f.wsl = strings.Contains(strings.ToLower(string(release)), "microsoft")
	if st, err := os.Stat(s.root + wslProxyPath); err == nil && st.Mode()&os.ModeSocket != 0 {
		f.wslProxy = true
	}
	var wg sync.WaitGroup
	peers := []struct {
		url, product string
		here         bool
	}{{rancherSwitch, "Rancher Desktop", false}, {podmanGateway, "Podman machine", false}, {olderSwitch, "gvisor-tap-vsock", false}}
	for i := range peers {
		wg.Go(func() { peers[i].here = s.get(ctx, peers[i].url+"/services/forwarder/all") })
	}
	if f.wsl {
		wg.Go(func() {
			if out, err := s.run(ctx, "wslinfo", "--networking-mode"); err == nil {
				f.mode = strings.ToLower(strings.TrimSpace(out))
			}
		})
	}
	wg.Wait()
	for _, p := range peers {
		if p.here {
			f.gvproxy, f.product = p.url, p.product
			break
		}
	}
	return f
}

// answers reports whether a GET gives 200.
func answers(ctx context.Context, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	// A transport of its own: no proxy of the environment, and nothing kept open.
	t := &http.Transport{DisableKeepAlives: true}
	defer t.CloseIdleConnections()
	resp, err := t.RoundTrip(req)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	path, err := trust.Find(name)
	if err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, path, args...).Output()
	return string(out), err
}
