// SPDX-License-Identifier: Apache-2.0

// Package route leads connections to published ports by the names of their owners: HTTP by
// the Host of each request, TLS by the name that a client asks for, which stays encrypted.
package route

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/names"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Host is where names lead; *host.Host is one.
type Host interface {
	View() host.View
	Guests() []host.GuestStatus
	Listen(ctx context.Context, at netip.AddrPort) (net.Listener, error)
	Reachable(r host.Reach) error
	Dial(ctx, life context.Context, r host.Reach) (link.Stream, error)
	Carry(ctx context.Context, conn net.Conn, first []byte, r host.Reach) error
}

// Options configure a Router.
type Options struct {
	Host      Host
	Domain    string // of all names, such as "localhost"
	HTTP, TLS []netip.AddrPort
	Logger    *slog.Logger
	// HeaderTimeout is how long a client may take for the head of a request, or for its
	// first TLS message; 0 means 10 s.
	HeaderTimeout time.Duration
}

// Limits of one listener.
const (
	maxConns        = 1024
	maxSilent       = 256 // connections on which no request is under way
	maxSilentScarce = 16
	idleTimeout     = time.Minute // between two requests
	maxHeader       = 64 << 10    // bytes of a request's or an answer's head; of the first TLS message, too
)

// result is what became of a request, or of a TLS connection.
type result uint8

const (
	resultOK        result = iota // passed on
	resultUnknown                 // nobody has the name, or the owner has several ports
	resultAmbiguous               // several have it
	resultForeign                 // not a name of ours
	resultFailed                  // its port could not be reached
	resultInvalid                 // not TLS, or without a name in time
	resultPage                    // the page or its JSON
	results
)

// resultNames are the values of the label in metrics.
var resultNames = [results]string{"ok", "unknown", "ambiguous", "foreign", "failed", "invalid", "page"}

// Stats are counts since the start, but for what is open now.
type Stats struct {
	Results  map[string]uint64 `metric:"host_names_total" label:"result=ok; unknown: nobody has the name, or it needs a port; ambiguous: several have it; foreign: outside the domain; failed: the port could not be reached; invalid: no TLS with a name in time; page: the list of names" help:"HTTP requests and TLS connections by the names of owners, by result."`
	HTTP     int               `metric:"host_names_connections" label:"protocol=http" help:"Currently open connections to the listeners of names."`
	TLS      int               `metric:"host_names_connections" label:"protocol=tls"`
	Limited  uint64            // connections refused, as too many were open
	Refused  uint64            // connections, as too few file descriptors were left
	Listened int               // listeners open now
}

// place is an address of the configuration.
type place struct {
	protocol string // "http" or "tls"
	at       netip.AddrPort
	flag     string
	serve    func(ctx context.Context, ln net.Listener) error

	// Guarded by Router.mu.
	open bool
	err  string
}

// Router serves names. Create it with New; Run does the work.
type Router struct {
	opt      Options
	places   []*place
	counts   [results]atomic.Uint64
	open     [2]atomic.Int64 // connections: HTTP, TLS
	limited  atomic.Uint64
	acceptor *own.Acceptor

	mu         sync.Mutex
	table      *names.Table // of generation
	generation uint64
	watches    map[schedule.Signal]struct{} // who wants to know of listeners
}

// New returns a router. It starts nothing.
func New(opt Options) *Router {
	if opt.HeaderTimeout == 0 {
		opt.HeaderTimeout = 10 * time.Second
	}
	r := &Router{opt: opt, acceptor: own.NewAcceptor(opt.Logger, own.ForFlow), watches: make(map[schedule.Signal]struct{})}
	for _, at := range opt.HTTP {
		r.places = append(r.places, &place{protocol: "http", at: at, flag: "--names", serve: r.serveHTTP, err: "not tried yet"})
	}
	for _, at := range opt.TLS {
		r.places = append(r.places, &place{protocol: "tls", at: at, flag: "--names-tls", serve: r.serveTLS, err: "not tried yet"})
	}
	return r
}

// Run serves names until ctx ends. A listener that cannot be opened is tried again.
func (r *Router) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, p := range r.places {
		if !p.at.Addr().IsLoopback() {
			r.opt.Logger.Warn("names are open to other machines, without encryption or a password; they lead them to what rules open there",
				"at", p.at, "flag", p.flag)
		}
		wg.Go(func() { r.keep(ctx, p) })
	}
	wg.Wait()
}

// keep has a listener open.
func (r *Router) keep(ctx context.Context, p *place) {
	pause := schedule.Backoff{Min: host.RetryMin, Max: host.RetryMax}
	for ctx.Err() == nil {
		ln, err := r.opt.Host.Listen(ctx, p.at)
		if err == nil {
			r.note(p, "")
			pause.Reset()
			err = p.serve(ctx, ln)
			_ = ln.Close()
		}
		if ctx.Err() != nil {
			return
		}
		r.note(p, host.WhyNot(err, p.at, p.flag))
		_ = schedule.Sleep(ctx, pause.Next())
	}
}

// note records why a place is not open, "" if it is, and logs what changed.
func (r *Router) note(p *place, err string) {
	r.mu.Lock()
	same, was := p.err == err, p.open
	p.open, p.err = err == "", err
	if p.open != was {
		for w := range r.watches {
			w.Notify()
		}
	}
	r.mu.Unlock()
	switch {
	case same:
	case err == "":
		r.opt.Logger.Info("serving names", "protocol", p.protocol, "at", p.at, "domain", r.opt.Domain)
	default:
		r.opt.Logger.Warn("cannot serve names; retrying", "protocol", p.protocol, "at", p.at, "err", err)
	}
}

// Watch returns a signal that is notified after URL may return others, as a listener was opened
// or closed, until stop is called.
func (r *Router) Watch() (changed schedule.Signal, stop func()) {
	changed = schedule.NewSignal()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watches[changed] = struct{}{}
	return changed, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.watches, changed)
	}
}

// Table returns the names of what is published now.
func (r *Router) Table() *names.Table {
	v := r.opt.Host.View()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.table == nil || r.generation != v.Generation() {
		r.table, r.generation = Names(r.opt.Host, v, r.opt.Domain), v.Generation()
	}
	return r.table
}

// Names makes the names of what a host publishes.
func Names(h Host, v host.View, domain string) *names.Table {
	var guests []string
	for _, g := range h.Guests() {
		guests = append(guests, g.Name)
	}
	return names.New(ports(v), guests, domain)
}

// ports returns what may have names: TCP ports that the host's rules open, whether or not
// their own listeners are open, of owners that are certain.
func ports(v host.View) (list []names.Port) {
	for _, p := range v.All() {
		if p.Protocol == port.TCP && !p.OwnerPending && allowed(&p) {
			list = append(list, PortOf(&p))
		}
	}
	return list
}

// PortOf returns a publication as names know it.
func PortOf(p *host.Row) names.Port {
	return names.Port{Guest: p.Guest, Key: p.Key, Owner: p.Owner, Alias: p.Alias()}
}

// allowed reports whether rules open a publication: what they do not has no address.
func allowed(p *host.Row) bool {
	for _, o := range p.Outcomes {
		if o.State != port.Denied && o.HostAddress.IsValid() {
			return true
		}
	}
	return false
}

// Report describes names and listeners.
func (r *Router) Report() names.Report {
	out := names.Report{Domain: r.opt.Domain, Names: r.Table().Entries(), Listeners: []names.Listener{}}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.places {
		out.Listeners = append(out.Listeners, names.Listener{Protocol: p.protocol, Address: p.at, Open: p.open, Error: p.err})
	}
	out.URL = r.url("http", "http", usualHTTP, names.Local)
	return out
}

// URL returns the URL of a name that leads to port n of a guest: at the first open listener for
// HTTP that the name leads to on this machine, or else for TLS; of port 443 for TLS alone. It is
// "" if there is none.
func (r *Router) URL(name string, n uint16) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	secure := r.url("tls", "https", TLSPort, name)
	if n == TLSPort {
		return secure
	}
	return cmp.Or(r.url("http", "http", usualHTTP, name), secure)
}

// url is URL for one protocol, with its scheme and usual port. r.mu is held.
func (r *Router) url(protocol, scheme string, usual uint16, name string) string {
	anywhere := name != names.Local && !strings.HasSuffix(name, "."+names.Local) // who runs the domain knows where it leads
	i := slices.IndexFunc(r.places, func(p *place) bool { return p.open && p.protocol == protocol && (anywhere || local(p.at.Addr())) })
	switch {
	case i < 0:
		return ""
	case r.places[i].at.Port() == usual:
		return scheme + "://" + name
	}
	return fmt.Sprintf("%s://%s:%d", scheme, name, r.places[i].at.Port())
}

// local reports whether localhost, and names below it, lead to a listener: they are 127.0.0.1
// and ::1, and no other address of the loopback.
func local(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsUnspecified() || a == netip.AddrFrom4([4]byte{127, 0, 0, 1}) || a == netip.IPv6Loopback()
}

// Stats returns the counts.
func (r *Router) Stats() Stats {
	s := Stats{
		Results: make(map[string]uint64), HTTP: int(r.open[0].Load()), TLS: int(r.open[1].Load()),
		Limited: r.limited.Load(), Refused: r.acceptor.Refused(),
	}
	for i := range r.counts {
		s.Results[resultNames[i]] = r.counts[i].Load()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.places {
		if p.open {
			s.Listened++
		}
	}
	return s
}

func (r *Router) count(v result) { r.counts[v].Add(1) }

// reach is a client's connection to a port.
func reach(p names.Port, peer, at netip.AddrPort) host.Reach {
	k := p.Key
	if p.Other != (port.Key{}) && p.Other.Address.Is4() == peer.Addr().Is4() {
		k = p.Other
	}
	return host.Reach{ID: host.ID{Guest: p.Guest, Key: k}, Owner: p.Owner, Peer: peer, At: at}
}

// addrPort returns a TCP address, unmapped.
func addrPort(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := t.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
