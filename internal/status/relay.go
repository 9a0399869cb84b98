// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
)

// Relay serves the page on l, with the data of c's control socket. Requests need the
// token of the URL that announce is called with; a page that is readOnly changes nothing.
// Relay closes l when ctx ends.
func Relay(ctx context.Context, c *Client, l net.Listener, readOnly bool, announce func(url string)) error {
	proxy := &httputil.ReverseProxy{
		Transport:     c.http.Transport,
		FlushInterval: -1,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", clientHost, clientHost
			if why := r.In.Header.Get(readOnlyHeader); why != "" {
				r.Out.Header.Set(readOnlyHeader, why) // also if the request's Connection names it
			}
			// These have been checked here.
			for _, h := range []string{"Authorization", "Origin", "Sec-Fetch-Site", "Cookie"} {
				r.Out.Header.Del(h)
			}
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) {
			text(w, http.StatusBadGateway, fmt.Sprintf("control socket %s: %v", c.path, ErrNotRunning))
		},
	}
	tokens := newTokens()
	token := tokens.Change
	if readOnly {
		token = tokens.Read // nobody has the other one
	}
	mux := http.NewServeMux()
	pageRoutes(mux)
	for _, route := range pageNeeds {
		mux.Handle(route, withToken(tokens, proxy))
	}
	mux.Handle("POST /v1/forwards", withToken(tokens, jsonOnly(proxy)))
	s := NewServer(Options{Logger: slog.New(slog.DiscardHandler)})
	announce(fmt.Sprintf("http://%s/#token=%s", l.Addr(), token))
	return s.serve(ctx, l, guard(mux))
}

// pageNeeds lists the routes by which the page reads.
var pageNeeds = []string{"GET /v1/ports", "GET /v1/events", "GET /v1/explain", "POST /v1/explain", "GET /v1/names", "GET /v1/forwards"}
