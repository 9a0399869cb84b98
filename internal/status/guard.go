// SPDX-License-Identifier: Apache-2.0

package status

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"log/slog"
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

// PageToken returns the token of the page on TCP. It stays the same over restarts, so that an
// open page works on: it derives from a secret in a file beside that of the link's token,
// which is made at the first start. Without such a file each start has a new token.
func PageToken(log *slog.Logger, linkToken string) string {
	if linkToken == "" {
		return newToken()
	}
	secret, err := link.LoadOrCreateToken(filepath.Join(filepath.Dir(linkToken), "page-token"))
	if err != nil {
		log.Warn("cannot persist the page token; using a new one at each start", "err", err)
		return newToken()
	}
	return secret.Derive("page")
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

// withToken requires the token in an Authorization header. It is not a cookie, because
// a browser sends cookies to every port of a host, and other ports of this host may
// belong to other users.
func withToken(token string, next http.Handler) http.Handler {
	want := sha256.Sum256([]byte("Bearer " + token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := sha256.Sum256([]byte(r.Header.Get("Authorization")))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			text(w, http.StatusUnauthorized, "missing or wrong token: `fairlead web` prints the URL with the token")
			return
		}
		next.ServeHTTP(w, r)
	})
}
