// SPDX-License-Identifier: Apache-2.0

// Package detect chooses the sinks that fit the guest it runs in: a plain VM, WSL,
// Rancher Desktop or Podman machine.
package detect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/guest/wsl"
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

// The names of a gvproxy, by product, and where Rancher Desktop's relay is.
const (
	rancherGateway = "gateway.rancher-desktop.internal"
	podmanGateway  = "gateway.containers.internal"
	wslProxyPath   = "/run/wsl-proxy.sock"
)

// Sink is a sink by name, with the URL that it sends to; empty where it takes none.
type Sink struct{ Name, URL string }

// choose returns the sinks for a guest, and why.
func choose(f facts) (sinks []Sink, why string) {
	hostlink, listener := Sink{Name: "hostlink"}, Sink{Name: "listener"}
	switch {
	case f.gvproxy != "":
		sinks = []Sink{{Name: "gvproxy", URL: f.gvproxy}}
		why = f.product + ": its gvproxy answers at " + f.gvproxy
		if f.wslProxy {
			sinks = append(sinks, Sink{Name: "vtunnel", URL: "unix://" + wslProxyPath})
			why += ", and its relay to other distributions is at " + wslProxyPath
		}
	case f.wslProxy:
		sinks = []Sink{{Name: "vtunnel", URL: "unix://" + wslProxyPath}}
		why = "Rancher Desktop: its relay to other distributions is at " + wslProxyPath
	case !f.wsl:
		return []Sink{hostlink}, "neither WSL nor gvproxy found: waiting for a host peer"
	case f.mode == "none":
		return []Sink{hostlink}, "WSL without networking has no relay: waiting for a host peer"
	case f.mode == "":
		sinks, why = []Sink{listener}, "WSL, networking mode unknown: Windows forwards to what listens here"
	case f.mode == "nat":
		sinks, why = []Sink{listener}, "WSL in NAT mode: its localhost relay forwards to what listens here"
	default:
		sinks, why = []Sink{listener}, "WSL in "+f.mode+" mode: Windows forwards to what listens here"
	}
	if f.link {
		sinks = append(sinks, hostlink)
		why += "; and a link is configured"
	}
	return sinks, why
}

// Detector looks at one guest. It is not safe for concurrent use.
type Detector struct {
	system system
	link   bool
	mode   string // of WSL, once it is known
	proved string // the URL at which the gvproxy of this product answered
}

// New returns a detector. Set link if the user configured a link to a host peer.
func New(link bool) *Detector {
	return &Detector{system: system{root: "/", get: get, mode: wsl.NetworkingMode}, link: link}
}

// Choice is the sinks that fit a guest.
type Choice struct {
	Sinks []Sink
	Why   string
	// Fallback is the sink that publishes only while no gvproxy is proved, as both open
	// the same ports of the host. It is one of Sinks if none is. Its name may be empty.
	Fallback Sink
}

// Sinks returns the sinks that fit this guest. It takes at most a second.
func (d *Detector) Sinks(ctx context.Context) Choice {
	ctx, cancel := context.WithTimeout(ctx, gatherTime)
	defer cancel()
	f := facts{link: d.link}
	f.wsl = wsl.Here(d.system.root)
	if st, err := os.Stat(filepath.Join(d.system.root, wslProxyPath)); err == nil && st.Mode()&os.ModeSocket != 0 {
		f.wslProxy = true
	}
	var wg sync.WaitGroup
	if f.wsl && d.mode == "" {
		wg.Go(func() {
			if mode, err := d.system.mode(ctx); err == nil {
				d.mode = strings.ToLower(mode)
			}
		})
	}
	var missing error
	f.gvproxy, f.product, missing = d.gvproxy(ctx)
	wg.Wait()
	f.mode = d.mode
	var c Choice
	c.Sinks, c.Why = choose(f)
	if missing != nil {
		c.Why += "; not gvproxy: " + missing.Error()
	}
	c.Fallback = fallback(f)
	return c
}

// fallback returns the sink that is chosen instead of gvproxy. The link is none, as its
// ports are opened by whoever connects a host peer.
func fallback(f facts) Sink {
	f.gvproxy = ""
	sinks, _ := choose(f)
	if i := slices.IndexFunc(sinks, func(s Sink) bool { return s.Name == "listener" }); i >= 0 {
		return sinks[i]
	}
	return Sink{}
}

// Gvproxy returns the base URL of this guest's gvproxy and the product that it is of, or
// why none is proved. It takes at most a second.
func (d *Detector) Gvproxy(ctx context.Context) (url, product string, err error) {
	ctx, cancel := context.WithTimeout(ctx, gatherTime)
	defer cancel()
	return d.gvproxy(ctx)
}

// gatherTime bounds all probes together, because the start waits for them.
const gatherTime = time.Second

func (d *Detector) gvproxy(ctx context.Context) (url, product string, err error) {
	product, gateway, err := d.system.evidence()
	if err != nil && product != "" && !gateway.IsValid() && d.proved != "" {
		return d.proved, product, nil // the network is down for a while
	}
	if err != nil {
		d.proved = ""
		return "", "", err
	}
	url = "http://" + netip.AddrPortFrom(gateway, 80).String()
	answer, err := d.system.get(ctx, url+"/services/forwarder/all")
	switch {
	case err != nil && d.proved == url && !errors.As(err, new(statusError)): // away for a while, as when it restarts
		return url, product, nil
	case err == nil:
		err = isList(answer)
	}
	if err != nil {
		d.proved = ""
		return "", "", fmt.Errorf("%s: %s: %w", product, url, err)
	}
	d.proved = url
	return url, product, nil
}

// system is where facts come from.
type system struct {
	root string // of the file system
	get  func(ctx context.Context, url string) (body []byte, err error)
	mode func(ctx context.Context) (string, error) // of WSL's networking
}

// evidence returns the product that left its mark in this guest, and the address of its
// gvproxy, which is the default gateway there. Whoever answers elsewhere, or is named by
// DNS alone, may be anyone.
func (s system) evidence() (product string, gateway netip.Addr, err error) {
	gateway = peer.DefaultGateway(s.root)
	named := func(name string) error {
		if all := peer.HostsFile(s.root, name); len(all) > 0 && !slices.Contains(all, gateway) {
			return fmt.Errorf("%s is %v in /etc/hosts, and the default gateway is %v", name, all[0], gateway)
		}
		return nil
	}
	switch {
	case slices.ContainsFunc(peer.PodmanMarkers(), s.has):
		product, err = "Podman machine", named(podmanGateway)
	case len(peer.HostsFile(s.root, rancherGateway)) > 0:
		product, err = "Rancher Desktop", named(rancherGateway)
	default:
		return "", netip.Addr{}, errNoProduct
	}
	if err == nil && !gateway.IsValid() {
		err = errors.New("there is no default gateway")
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", product, err)
	}
	return product, gateway, err
}

var errNoProduct = errors.New("neither Podman machine's file nor Rancher Desktop's name in /etc/hosts is here")

func (s system) has(path string) bool {
	_, err := os.Stat(filepath.Join(s.root, path))
	return err == nil
}

// isList returns an error unless an answer is a list of forwards.
func isList(answer []byte) error {
	var list []struct{ Local, Remote, Protocol *string }
	if err := json.Unmarshal(answer, &list); err != nil || list == nil {
		return errors.New("what answers there lists no forwards")
	}
	for _, f := range list {
		if f.Local == nil || f.Remote == nil || f.Protocol == nil {
			return errors.New("what answers there lists something else")
		}
	}
	return nil
}

const (
	maxAnswer = 32 << 20 // bytes
	maxHead   = 64 << 10 // bytes, before it
)

// statusError is the status of a server that answered without what was asked for.
type statusError string

func (e statusError) Error() string { return "answered with status " + string(e) }

// get returns the body of a URL, if the status is 200.
func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	// A transport of its own: no proxy of the environment, and nothing kept open.
	t := &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: maxHead}
	defer t.CloseIdleConnections()
	resp, err := t.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, statusError(resp.Status)
	}
	return io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
}
