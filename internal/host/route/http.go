// SPDX-License-Identifier: Apache-2.0

package route

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/conns"
	"github.com/fairlead/fairlead/internal/port/names"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// usualHTTP is the port that a name means whose owner has several.
const usualHTTP = 80

// serveHTTP serves a listener until ctx ends, or the listener fails.
func (r *Router) serveHTTP(ctx context.Context, ln net.Listener) error {
	l := r.listener(ln, &r.open[0])
	srv := &http.Server{
		Handler:           l.silent.Handler(answering(func(w http.ResponseWriter, q *http.Request) { r.handle(ctx, w, q) })),
		ReadHeaderTimeout: r.opt.HeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnContext:       conns.WithConn,
		ConnState:         l.silent.Changed,
		ErrorLog:          slog.NewLogLogger(r.opt.Logger.Handler(), slog.LevelDebug),

		DisableGeneralOptionsHandler: true, // it answers "OPTIONS *" of any name
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	err := srv.Serve(l)
	_ = srv.Close()
	return err
}

// handle serves one request: a connection may carry some for several names. life is that of
// the listener.
func (r *Router) handle(life context.Context, w http.ResponseWriter, q *http.Request) {
	name, asked := names.FromHost(q.Host, r.opt.Domain)
	at, peer := addresses(q)
	local := at.Addr().IsLoopback()
	var found names.Found
	if asked == names.Named && q.Method != http.MethodConnect {
		found = r.Table().Find(name, usualHTTP)
	}
	if found.Outcome == names.Leads && !local && r.opt.Host.Reachable(reach(found.Port, peer, at)) != nil {
		found = names.Found{} // other machines learn nothing of what is not open to them
	}
	if found.Outcome == names.Leads {
		r.pass(life, w, q, reach(found.Port, peer, at))
		return
	}
	// What is answered here reads no body, but http.Server waits for it before it answers.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(r.opt.HeaderTimeout))
	switch {
	case asked == names.Foreign:
		r.count(resultForeign)
		refuse(w, http.StatusMisdirectedRequest, fmt.Sprintf("This is not a name below .%s.", r.opt.Domain))
	case q.Method == http.MethodConnect:
		r.count(resultForeign)
		refuse(w, http.StatusMethodNotAllowed, "This is no proxy.")
	case asked == names.Page && local:
		r.count(resultPage)
		r.page(w, q)
	case found.Outcome == names.Ambiguous && local:
		r.count(resultAmbiguous)
		r.choose(w, q, http.StatusConflict, "Several have this name. Their own names:", found.Names)
	case found.Outcome == names.Choice && local:
		r.count(resultUnknown)
		r.choose(w, q, http.StatusNotFound, "This name has several ports, or not this one:", found.Names)
	default:
		r.count(resultUnknown)
		text := "Nothing that is published has this name."
		if local {
			text += " All names: http://" + withPort(names.Local, q) + "/"
		}
		refuse(w, http.StatusNotFound, text)
	}
}

// addresses returns where a client connected, and its own address.
func addresses(q *http.Request) (at, peer netip.AddrPort) {
	if a, ok := q.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		at = addrPort(a)
	}
	peer, _ = netip.ParseAddrPort(q.RemoteAddr)
	return at, netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port())
}

// withPort returns a name with the port of the request's own, if it has one.
func withPort(name string, q *http.Request) string {
	if i := strings.LastIndexByte(q.Host, ':'); i >= 0 && !strings.HasSuffix(q.Host, "]") {
		return name + q.Host[i:]
	}
	return name
}

// passed are the headers that httputil.ReverseProxy drops. They are passed on as they came:
// a client that connects to the port itself can send them, too.
func passed() []string {
	return []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"}
}

// pass passes a request on, by a connection of its own: so each request is decided and dialled
// as a connection to the port is, and no two clients share one.
func (r *Router) pass(life context.Context, w http.ResponseWriter, q *http.Request, to host.Reach) {
	in, body := q, newUpload(w, q)
	if body != nil {
		in = q.WithContext(q.Context()) // a copy: http.Server looks at the body of q
		in.Body = io.NopCloser(body)
	}
	var server link.Stream // dialled once, as no connection is used again
	written := schedule.NewSignal()
	trace := httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { written.Notify() }}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (_ net.Conn, err error) {
			server, err = r.opt.Host.Dial(ctx, life, to)
			return server, err
		},
		DisableKeepAlives: true, DisableCompression: true, ExpectContinueTimeout: r.opt.HeaderTimeout, MaxResponseHeaderBytes: maxHeader,
	}
	proxy := httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = "http", "port"
			p.Out.URL.RawQuery = p.In.URL.RawQuery
			p.Out.Trailer = p.In.Trailer // has its values once the body was read
			// http.Transport does not tell when it has sent the end of a chunked body; see upgrade.
			// HTTP/1.0 has no upgrades (RFC 9110, section 7.8).
			if p.In.ContentLength < 0 || !p.In.ProtoAtLeast(1, 1) {
				p.Out.Header.Del("Connection")
				p.Out.Header.Del("Upgrade")
			}
			p.Out = p.Out.WithContext(httptrace.WithClientTrace(p.Out.Context(), &trace))
			for _, h := range passed() {
				if v, ok := p.In.Header[h]; ok {
					p.Out.Header[h] = v
				}
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			if resp.StatusCode == http.StatusSwitchingProtocols {
				return r.upgrade(life, w, resp, body, written, server)
			}
			r.count(resultOK)
			if _, ok := resp.Header["Content-Type"]; !ok {
				w.Header()["Content-Type"] = nil // or http.Server would guess one
			}
			body.answered(w)
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			if errors.Is(err, errUpgraded) {
				return
			}
			r.count(resultFailed)
			r.opt.Logger.Debug("request by name failed", "publication", to.ID.Key, "guest", to.ID.Guest, "err", err)
			code, text := failure(err)
			body.answered(w)
			refuse(w, code, text)
		},
		ErrorLog: slog.NewLogLogger(r.opt.Logger.Handler(), slog.LevelDebug),
	}
	proxy.ServeHTTP(w, in)
	body.finish(w, q)
}

// failure returns what a client is told.
func failure(err error) (code int, text string) {
	switch {
	case errors.Is(err, host.ErrDenied), errors.Is(err, host.ErrPending):
		return http.StatusForbidden, "The host's rules do not open this port."
	case errors.Is(err, host.ErrLimit):
		return http.StatusServiceUnavailable, "Too many connections to this guest."
	case errors.Is(err, errEarly), errors.Is(err, errUnasked):
		return http.StatusBadGateway, "The server cannot be used by name: " + err.Error()
	}
	return http.StatusBadGateway, "The server did not answer: " + err.Error()
}
