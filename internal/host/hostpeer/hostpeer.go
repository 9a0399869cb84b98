// SPDX-License-Identifier: Apache-2.0

// Package hostpeer wires the host peer: configuration, links to the guests, host and
// status.
package hostpeer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/config/memory"
	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/host/route"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/link/wss"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/metrics"
	"github.com/fairlead/fairlead/internal/status/version"
)

// Daemon is the host peer.
type Daemon struct {
	cfg     config.Host
	log     *slog.Logger
	host    *host.Host
	sockets *own.Sockets
	server  *status.Server
	wss     *wss.Server // nil if no agent may dial

	forwards *forwards.Store
	rules    atomic.Pointer[rules.Set] // in effect
	names    *route.Router             // nil if names are not served

	accepted atomic.Pointer[config.Host] // the last configuration, of which only the rules and reloaded are in effect
}

// New wires a host peer. It starts nothing.
func New(cfg config.Host, log *slog.Logger, level *loglevel.Levels) (*Daemon, error) {
	name, err := os.Hostname()
	if err != nil {
		name = "host"
	}
	o := link.Options{
		Role: link.RoleHost, Identity: link.NewIdentity(), Name: name, Version: version.String(), Network: link.NetworkID(),
		Logger: log,
	}
	d := &Daemon{cfg: cfg, log: log, sockets: new(own.Sockets)}
	d.accepted.Store(&d.cfg)
	var guests []host.Guest
	for _, g := range cfg.Connect {
		at, err := link.ParseEndpoint(g.Endpoint.String()) // on Windows a path is converted
		if err != nil {
			return nil, err
		}
		o := o
		if cfg.TokenFile(g) != "" {
			o.LoadToken = func() (link.Token, error) { return loadToken(&cfg, g) }
		}
		dialer, err := link.NewDialer(at, o)
		if err != nil {
			return nil, err
		}
		guests = append(guests, host.Guest{Name: g.ID(), Dial: dialer.Dial})
	}
	if cfg.Serving.At.Listen {
		if err := d.serve(o, &cfg); err != nil {
			return nil, err
		}
		for _, name := range cfg.Serving.Guests {
			guests = append(guests, host.Guest{Name: name, Dials: true, Dial: func(ctx context.Context) (link.Session, error) {
				return d.wss.Session(ctx, name)
			}})
		}
	}
	tracer := new(trace.Hub)
	moved := ""
	if cfg.ForwardsFile != "" {
		moved = filepath.Join(filepath.Dir(cfg.ForwardsFile), "host-moved.json")
	}
	d.host, err = host.New(host.Options{
		MovedFile: moved,
		Trace:     tracer,
		Logger:    log, Guests: guests, Policy: cfg.Rules, Network: d.sockets,
		Grace: negativeZero(cfg.Grace), UDPIdle: cfg.Limits.UDPIdle,
		Held:         held(&cfg),
		MaxListeners: cfg.Limits.Listeners, MaxFlows: cfg.Limits.Flows, MaxUDPClients: cfg.Limits.UDPFlows,
	})
	if err != nil {
		return nil, err
	}
	d.rules.Store(cfg.Rules)
	d.forwards = forwards.NewStore(cfg.ForwardsFile, cfg.Rules, true, log, func(set *rules.Set) {
		d.rules.Store(set)
		d.host.SetPolicy(set)
	})
	d.names = d.router()
	p := provider{d.host, cfg.Peers(), d.lastRefused, d.names, d.forwards, newDials()}
	var page status.PageTokens
	if cfg.WebAddr != "" {
		page = status.LoadPageTokens(log, cfg.LinkToken)
	}
	d.server = status.NewServer(status.Options{
		Tokens:   page,
		Provider: p, Explainer: p, Metrics: metrics.Handler(func() Counters { return count(d.host, d.names) }), Level: level, Logger: log,
		Role: "host", Name: name, Vitals: func(uint64) status.Vitals { return vitals(d.host) },
		Peers: p.peers, Rules: d.rules.Load, Forwards: d.forwards, Settings: d.settings, ConfigFile: d.cfg.File(), Trace: tracer, Names: p.report,
	})
	return d, nil
}

// held are the addresses at which the host peer itself listens.
func held(cfg *config.Host) (list []host.Held) {
	for _, at := range cfg.Names.HTTP {
		list = append(list, host.Held{At: at, By: "this host's names (--names)"})
	}
	for _, at := range cfg.Names.TLS {
		list = append(list, host.Held{At: at, By: "this host's names (--names-tls)"})
	}
	list = append(list,
		host.Held{At: listenAt(cfg.WebAddr), By: "this host's page (--web-addr)"},
		host.Held{At: listenAt(cfg.MetricsAddr), By: "this host's metrics (--metrics-addr)"})
	if cfg.Serving.At.Listen {
		list = append(list, host.Held{At: listenAt(cfg.Serving.At.Server), By: "this host's links (--listen)"})
	}
	return slices.DeleteFunc(list, func(h host.Held) bool { return h.At.Port() == 0 })
}

// listenAt returns the address that HOST:PORT means, without one the wildcard of both families;
// invalid for a name that must be resolved.
func listenAt(s string) netip.AddrPort {
	switch host, n, _ := strings.Cut(s, ":"); host {
	case "":
		s = "[::]:" + n
	case "localhost":
		s = "127.0.0.1:" + n
	}
	at, _ := netip.ParseAddrPort(s)
	return at
}

// router makes what serves names, nil for none.
func (d *Daemon) router() *route.Router {
	n := d.cfg.Names
	if len(n.HTTP)+len(n.TLS) == 0 {
		return nil
	}
	return route.New(route.Options{Host: d.host, Domain: n.Domain, HTTP: n.HTTP, TLS: n.TLS, Logger: d.log})
}

// serve makes the server of the links that agents dial.
func (d *Daemon) serve(o link.Options, cfg *config.Host) error {
	s := cfg.Serving
	so := wss.ServerOptions{
		Link: o, Guests: s.Guests, CertFile: s.Cert, KeyFile: s.Key, BundleFile: s.Bundle, ClientCAFile: s.ClientCA,
	}
	guest := func(name string) config.Guest { return config.Guest{Name: name, Endpoint: s.At} }
	if cfg.TokenFile(guest(s.Guests[0])) != "" {
		so.Token = func(name string) (link.Token, error) { return loadToken(cfg, guest(name)) }
	}
	server, err := wss.NewServer(so)
	if err != nil {
		return fmt.Errorf("listen %s: %w", s.At, err)
	}
	d.wss = server
	return nil
}

// lastRefused returns the last peer that came with a guest's name and was refused, zero if
// there was none.
func (d *Daemon) lastRefused(guest string) wss.Refused {
	if d.wss == nil || !slices.Contains(d.cfg.Serving.Guests, guest) {
		return wss.Refused{}
	}
	return d.wss.LastRefused(guest)
}

// negativeZero converts 0 to "none" for options whose 0 is "the default".
func negativeZero[T ~int64](d T) T {
	if d == 0 {
		return -1
	}
	return d
}

// CheckToken returns why a guest that needs a token cannot be reached: it cannot be read.
func CheckToken(cfg *config.Host) error {
	for _, g := range cfg.Peers() {
		if cfg.TokenFile(g) == "" {
			continue
		}
		if _, err := loadToken(cfg, g); err != nil {
			return err
		}
	}
	return nil
}

// loadToken reads the token of a guest, and says how to get a missing one.
func loadToken(cfg *config.Host, g config.Guest) (link.Token, error) {
	token, err := link.LoadToken(cfg.TokenFile(g))
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %s", err, PairHint(cfg, g))
	}
	return token, err
}

// Confine drops, for the whole process, all capabilities but that for ports below 1024. It
// is for programs that run nothing but a host peer.
func (d *Daemon) Confine() {
	if d.cfg.KeepPrivileges {
		d.log.Warn("keeping unneeded capabilities", "reason", "--keep-privileges is set")
		return
	}
	if err := privilege.Limit(privilege.SetOf(privilege.Host(), true)); err != nil {
		d.log.Warn("keeping unneeded capabilities", "reason", err)
	}
}

// service is a listener with what serves it until ctx ends, and closes it.
type service struct {
	ln    net.Listener
	serve func(ctx context.Context, ln net.Listener) error
}

// place is a TCP address at which something of this program listens.
type place struct {
	what, address, flag string
	serve               func(context.Context, net.Listener) error
}

// places returns those of the configuration.
func (d *Daemon) places() (list []place) {
	links := ""
	if d.wss != nil {
		links = d.cfg.Serving.At.Server
	}
	for _, p := range []place{
		{"page", d.cfg.WebAddr, "--web-addr", d.server.ServeWeb},
		{"metrics", d.cfg.MetricsAddr, "--metrics-addr", d.serveStatus(false)},
		{"links", links, "--listen", d.wss.Serve},
	} {
		if p.address != "" {
			list = append(list, p)
		}
	}
	return list
}

func (d *Daemon) serveStatus(control bool) func(context.Context, net.Listener) error {
	return func(ctx context.Context, ln net.Listener) error { return d.server.Serve(ctx, ln, control) }
}

func (d *Daemon) open(ctx context.Context, p place) (net.Listener, error) {
	ln, err := d.sockets.Listen(ctx, "tcp", p.address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: choose another %s", p.what, err, p.flag)
	}
	return ln, nil
}

// listen opens all listeners, or none.
func (d *Daemon) listen(ctx context.Context) (list []service, err error) {
	control, err := status.ListenControl(d.cfg.Control)
	if err != nil {
		return nil, err
	}
	list = append(list, service{control, d.serveStatus(true)})
	for _, p := range d.places() {
		ln, err := d.open(ctx, p)
		if err != nil {
			for _, s := range list {
				_ = s.ln.Close()
			}
			return nil, err
		}
		list = append(list, service{ln, p.serve})
	}
	return list, nil
}

// Check returns why a host peer with this configuration would not start, or could reach no
// guest for want of a token. It opens what the host peer would open, and closes it. With
// replaces the new one takes the place of a running one, whose control socket and
// addresses may be in use.
func Check(ctx context.Context, cfg config.Host, replaces bool) error {
	if err := CheckToken(&cfg); err != nil {
		return err
	}
	wired := cfg
	wired.WebAddr = "" // New would make the token of the page
	d, err := New(wired, slog.New(slog.DiscardHandler), new(loglevel.Levels))
	if err != nil {
		return err
	}
	d.cfg = cfg
	if !replaces {
		list, err := d.listen(ctx)
		for _, s := range list {
			_ = s.ln.Close()
		}
		return err
	}
	for _, p := range d.places() {
		ln, err := d.open(ctx, p)
		switch {
		case err == nil:
			_ = ln.Close()
		case !own.InUse(err):
			return err
		}
	}
	return nil
}

// Run works until ctx ends. watch blocks until its context ends, and calls its
// argument with each new configuration, or with the error for which the old one is kept.
func (d *Daemon) Run(ctx context.Context, watch func(ctx context.Context, onChange func(config.Host, error))) error {
	services, err := d.listen(ctx)
	if err != nil {
		return err
	}
	d.logStart()
	g, ctx := errgroup.WithContext(ctx)
	for _, s := range services {
		g.Go(func() error { return s.serve(ctx, s.ln) })
	}
	g.Go(func() error { return d.host.Run(ctx) })
	if d.names != nil {
		g.Go(func() error {
			d.names.Run(ctx)
			return nil
		})
	}
	g.Go(func() error {
		memory.Keep(ctx, nil, memory.Percent)
		return nil
	})
	g.Go(func() error {
		d.forwards.Run(ctx)
		return nil
	})
	g.Go(func() error {
		watch(ctx, d.reload)
		return nil
	})
	return g.Wait()
}

// logStart logs what this host peer is and which guests it connects to.
func (d *Daemon) logStart() {
	var guests []string
	for _, g := range d.cfg.Connect {
		guests = append(guests, g.String())
	}
	if d.wss != nil {
		d.log.Info("agents may dial", "listen", d.cfg.Serving.At, "guests", strings.Join(d.cfg.Serving.Guests, ","), "pin", d.wss.Pin())
	}
	d.log.Info("starting", "version", version.String(), "config", cmp.Or(d.cfg.File(), "none"),
		"connect", strings.Join(guests, ","), "control", d.cfg.Control)
}

// reloaded are the settings that can change while running, besides the rules.
var reloaded = []string{"bind", "rulesFile"}

// settings are those in effect.
func (d *Daemon) settings() []config.Setting {
	return config.Reloaded(d.cfg.Settings(), d.accepted.Load().Settings(), reloaded...)
}

// waiting are the keys of a configuration that need a restart.
func (d *Daemon) waiting(next *config.Host) []string {
	return config.Waiting(d.cfg.Settings(), next.Settings(), reloaded...)
}

func (d *Daemon) reload(cfg config.Host, err error) {
	if err != nil {
		d.log.Error("configuration refused; keeping the previous one", "err", err)
		return
	}
	d.forwards.Reload(cfg.Rules)
	d.accepted.Store(&cfg)
	d.log.Info("rules reloaded", "rules", cfg.Rules.Len())
	if keys := d.waiting(&cfg); len(keys) > 0 {
		d.log.Warn("settings changed that need a restart", "keys", strings.Join(keys, ","))
	}
}
