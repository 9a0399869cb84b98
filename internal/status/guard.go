// SPDX-License-Identifier: Apache-2.0

package status

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// newToken returns 256 bits of chance, fit for a URL.
func newToken() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	return base64.RawURLEncoding.EncodeToString(b)
}

// guard refuses what a web page of somebody else could send through a browser:
// requests under a foreign name (a name that was made to resolve to us) and
// requests of another origin that would change something. It adds the headers
// that keep the page to itself.
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
			text(w, http.StatusMisdirectedRequest, "this is fairlead, under no such name: use http://127.0.0.1")
			return
		}
		protected.ServeHTTP(w, r)
	})
}

// contentPolicy lets the page load its own script, style and icon, talk to
// where it came from, and no more. Markup made from text is refused by the
// browser itself.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// ourName reports whether a Host header names this machine and nothing else:
// a loopback address or localhost, with any port (it may have been relayed), or
// what our own client says.
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

// clientHost is the Host that Client and the documents' curl lines send.
const clientHost = "fairlead"

// withToken asks for the token in an Authorization header. It is not a cookie:
// a browser sends cookies to every port of a host, and other ports of this host
// belong to others.
func withToken(token string, next http.Handler) http.Handler {
	want := sha256.Sum256([]byte("Bearer " + token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := sha256.Sum256([]byte(r.Header.Get("Authorization")))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			text(w, http.StatusUnauthorized, "the token is missing or wrong: `fairlead web` prints an address with it")
			return
		}
		next.ServeHTTP(w, r)
	})
}
