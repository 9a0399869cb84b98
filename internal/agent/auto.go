// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/config"
)

// facts are what the choice of sinks is made from.
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
		return []config.Sink{hostlink}, "neither WSL nor a gvproxy is here: a host peer connects"
	case f.mode == "none":
		return []config.Sink{hostlink}, "WSL without networking has no relay: a host peer connects"
	case f.mode == "":
		sinks, why = []config.Sink{listener}, "WSL, networking mode not known: its relay, or the mirror, shows what listens here"
	case f.mode == "nat":
		sinks, why = []config.Sink{listener}, "WSL in NAT mode: its localhost relay shows what listens here"
	default:
		sinks, why = []config.Sink{listener}, "WSL in "+f.mode+" mode: Windows shows what listens here"
	}
	if f.link {
		sinks = append(sinks, hostlink)
		why += "; and a link is configured"
	}
	return sinks, why
}

// chosenSinks is what the configuration says, or what fits this guest.
func (a *Agent) chosenSinks() []config.Sink {
	if a.cfg.Sinks[0].Name != config.AutoSink {
		return a.cfg.Sinks
	}
	f := gather(context.Background(), system{root: "/", get: answers, run: output})
	f.link = !sameEndpoints(a.cfg.Link, config.DefaultAgent().Link)
	sinks, why := choose(f)
	names := make([]string, len(sinks))
	for i, s := range sinks {
		names[i] = s.String()
	}
	a.log.Info("sinks chosen", "sinks", strings.Join(names, ","), "why", why)
	return sinks
}

func sameEndpoints(a, b []config.Endpoint) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// system is where facts come from.
type system struct {
	root string // of the file system
	get  func(ctx context.Context, url string) bool
	run  func(ctx context.Context, name string, args ...string) (string, error)
}

// gatherTime bounds each question: somebody waits for the start.
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
	out, err := exec.CommandContext(ctx, name, args...).Output()
	return string(out), err
}
