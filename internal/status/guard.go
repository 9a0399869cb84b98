// SPDX-License-Identifier: Apache-2.0

package status

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/fairlead/fairlead/internal/link"
)

// newToken returns 256 random bits, fit for a URL.
func newToken() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	return base64.RawURLEncoding.EncodeToString(b)
}

// PageTokens are the tokens of the page on TCP.
type PageTokens struct {
	Read   string // shows everything and changes nothing
	Change string // changes what is forwarded, too
}

func newTokens() PageTokens { return PageTokens{Read: newToken(), Change: newToken()} }

// LoadPageTokens returns the tokens of the page on TCP. They stay the same over restarts, so
// that an open page works on: they derive from a secret in a file beside that of the link's
// token, which is made at the first start. Without such a file each start has new ones.
func LoadPageTokens(log *slog.Logger, linkToken string) PageTokens {
	if linkToken == "" {
		return newTokens()
	}
	secret, err := link.LoadOrCreateToken(filepath.Join(filepath.Dir(linkToken), "page-token"))
	if err != nil {
		log.Warn("cannot persist the page tokens; using new ones at each start", "err", err)
		return newTokens()
	}
	// "page" is that of versions whose page only reads: who has such a URL gets no more by an update.
	return PageTokens{Read: secret.Derive("page"), Change: secret.Derive("page-changes")}
}

// guard refuses requests that a foreign web page could make a browser send: with a
// foreign Host (DNS rebinding), and requests from another origin that would change
// something. It adds headers that isolate the page.
func guard(next http.Handler) http.Handler {
	protected := http.NewCrossOriginProtection().Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if !ourName(r.Host) {
			text(w, http.StatusMisdirectedRequest, "unknown host name: use http://127.0.0.1")
			return
		}
		protected.ServeHTTP(w, r)
	})
}

// contentPolicy lets the page load its own script, style and icon, and connect to its
// own origin only. The browser refuses markup made from text.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// ourName reports whether a Host header names this machine and nothing else:
// a loopback address or localhost, with any port (it may be relayed), or the name
// that our own client sends.
func ourName(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	name = strings.ToLower(strings.TrimSuffix(strings.TrimPrefix(name, "["), "]"))
	if name == clientHost || name == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(name)
	return err == nil && a.IsLoopback()
}

// clientHost is the Host header of Client and of the documented curl commands.
const clientHost = "fairlead"

// withToken requires a token in an Authorization header. It is not a cookie, because
// a browser sends cookies to every port of a host, and other ports of this host may
// belong to other users.
func withToken(t PageTokens, next http.Handler) http.Handler {
	read, change := sha256.Sum256([]byte("Bearer "+t.Read)), sha256.Sum256([]byte("Bearer "+t.Change))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := sha256.Sum256([]byte(r.Header.Get("Authorization")))
		reads, changes := subtle.ConstantTimeCompare(got[:], read[:]), subtle.ConstantTimeCompare(got[:], change[:])
		switch {
		case reads|changes != 1:
			w.Header().Set("WWW-Authenticate", "Bearer")
			text(w, http.StatusUnauthorized, "missing or wrong token: `fairlead web` prints the URL with the token")
			return
		case changes != 1:
			r.Header.Set(readOnlyHeader, "the token in its address is one that only reads")
		}
		next.ServeHTTP(w, r)
	})
}

// readOnlyHeader is in requests that may change nothing, with the reason. Who sends it gives
// up a right.
const readOnlyHeader = "Fairlead-Read-Only"

// onlyReads returns why a request may change nothing, or "" if it may.
func onlyReads(r *http.Request) string {
	if why := r.Header.Get(readOnlyHeader); why != "" {
		return "this page changes nothing: " + why + "; `fairlead web` prints the address of one that does"
	}
	return ""
}

// tunnelled lets browsers that come through a tunnel to the control socket, and so without
// a token, only read: a page of whoever can connect to the tunnel is none of its user's.
// Browsers say at least one of these since 2023, and the command line none.
func tunnelled(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Origin") != "" || r.Header.Get("Sec-Fetch-Site") != "" {
			r.Header.Set(readOnlyHeader, "it was opened without a token")
		}
		next.ServeHTTP(w, r)
	})
}

// jsonOnly refuses bodies that a form of another page could send.
func jsonOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isJSON(r) {
			text(w, http.StatusUnsupportedMediaType, "want Content-Type: application/json")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isJSON reports whether the body is said to be JSON, which pages of other origins cannot
// say without asking first.
func isJSON(r *http.Request) bool {
	said := r.Header.Values("Content-Type")
	if len(said) != 1 {
		return false
	}
	kind, _, err := mime.ParseMediaType(said[0])
	return err == nil && kind == "application/json"
}
