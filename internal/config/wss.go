// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
)

// networkWSS is the network of links over WebSockets and TLS.
const networkWSS = "wss"

const wssPort = "443" // of a server that is given without one

// serverName matches the names of servers, of at most maxDNSName bytes.
var serverName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$`)

// parseWSS reads what follows wss:// in a link to dial: HOST[:PORT][/NAME].
func parseWSS(s, rest string) (Endpoint, error) {
	if strings.ContainsAny(rest, "@?") { // no part of it is shown
		return Endpoint{}, fmt.Errorf("%q: want no user and no query, wss://SERVER[:PORT][/NAME]", s)
	}
	server, name, _ := strings.Cut(rest, "/")
	host, p := server, wssPort
	if !strings.HasSuffix(server, "]") && strings.Contains(server, ":") || strings.Contains(server, "]:") {
		var err error
		if host, p, err = net.SplitHostPort(server); err != nil {
			return Endpoint{}, fmt.Errorf("%q: want wss://SERVER[:PORT][/NAME]", s)
		}
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if n, err := strconv.ParseUint(p, 10, 16); err != nil || n == 0 {
		return Endpoint{}, fmt.Errorf("%q: want a port from 1 to 65535, wss://SERVER:PORT/NAME", s)
	}
	if net.ParseIP(host) == nil && (len(host) > maxDNSName || !serverName.MatchString(host)) {
		return Endpoint{}, fmt.Errorf("%q: want the name or address of a server, wss://SERVER[:PORT][/NAME]", s)
	}
	if name = strings.TrimSuffix(name, "/"); name != "" {
		if err := CheckGuestName(name); err != nil {
			return Endpoint{}, fmt.Errorf("%q: %w", s, err)
		}
	}
	return Endpoint{Network: networkWSS, Server: net.JoinHostPort(host, p), Name: name}, nil
}

// parseListen reads where a host listens for agents, wss://[ADDRESS]:PORT. Empty is
// nowhere.
func parseListen(s string) (Endpoint, error) {
	if s == "" {
		return Endpoint{}, nil
	}
	at, ok := strings.CutPrefix(s, "wss://")
	if _, err := listenAddr(at); !ok || at == "" || err != nil {
		return Endpoint{}, fmt.Errorf(`%q: want wss://:PORT or wss://ADDRESS:PORT, or "" for none`, s)
	}
	return Endpoint{Network: networkWSS, Server: at, Listen: true}, nil
}

func listenText(e Endpoint) string {
	if e.Network == "" {
		return ""
	}
	return e.String()
}

func guestNameText(s string) (string, error) { return s, CheckGuestName(s) }

var sha256Text = regexp.MustCompile(`^[0-9A-Fa-f]{64}$`)

// pinText reads the SHA-256 of a CA bundle.
func pinText(s string) (string, error) {
	if s != "" && !sha256Text.MatchString(s) {
		return "", fmt.Errorf("%q: want the SHA-256 of a CA bundle, 64 hexadecimal digits", s)
	}
	return strings.ToLower(s), nil
}

// TLS is how an agent and the server that it dials trust each other.
type TLS struct {
	Pin       string // SHA-256 of the server's CA bundle, in lower case; empty for the system's roots
	Cert, Key string // files with the certificate that proves this guest; empty for none
}

func (c *Agent) tlsFields() []field {
	return []field{
		one("linkPin", "link-pin", "sha256", &c.TLS.Pin, pinText, str,
			"SHA-256 of the CA bundle of a wss:// server, which is then trusted alone; without, the system's roots count").
			alias("CATTLE_CA_CHECKSUM", strings.TrimSpace),
		one("linkCert", "link-cert", "file", &c.TLS.Cert, filePath(true), str, "certificate that proves this guest to a wss:// server"),
		one("linkKey", "link-key", "file", &c.TLS.Key, filePath(true), str, "key of --link-cert"),
	}
}

// Serving is how a host takes the links of agents that dial it.
type Serving struct {
	At        Endpoint // where it listens; the zero Endpoint is nowhere
	Guests    []string // names of the guests that may connect
	Cert, Key string   // files of the certificate, with its chain, and its key
	Bundle    string   // file with the CA bundle that agents pin; empty for the certificates of Cert
	ClientCA  string   // file with the roots of the guests' certificates; empty if they need none
}

func (c *Host) servingFields() []field {
	return []field{
		one("listen", "listen", "endpoint", &c.Serving.At, parseListen, listenText,
			"take the links of agents that dial this host: wss://:PORT or wss://ADDRESS:PORT"),
		many("guest", "guest", "name", &c.Serving.Guests, guestNameText, str,
			"name of a guest that may connect to --listen (may be repeated)"),
		one("cert", "cert", "file", &c.Serving.Cert, filePath(true), str, "certificate of --listen in PEM, with its chain"),
		one("key", "key", "file", &c.Serving.Key, filePath(true), str, "key of --cert in PEM"),
		one("caBundle", "ca-bundle", "file", &c.Serving.Bundle, filePath(true), str,
			"CA bundle whose SHA-256 agents pin; by default the certificates of --cert"),
		one("clientCA", "client-ca", "file", &c.Serving.ClientCA, filePath(true), str,
			"roots of the guests' certificates, which --listen then requires; a token is then only required if --link-token is set"),
	}
}

// Peers returns all guests: those that the host dials, and those that dial it.
func (c *Host) Peers() []Guest {
	list := append([]Guest{}, c.Connect...)
	for _, name := range c.Serving.Guests {
		list = append(list, Guest{Name: name, Endpoint: c.Serving.At})
	}
	return list
}

func (c *Agent) validateWSS(e Endpoint) (key string, err error) {
	switch {
	case e.Listen:
		return "link", fmt.Errorf("%q: an agent dials only: want wss://SERVER/NAME", e)
	case (c.TLS.Cert == "") != (c.TLS.Key == ""):
		return "linkCert", fmt.Errorf("want --link-cert and --link-key, or neither")
	case c.LinkToken == "" && c.TLS.Cert == "":
		return "linkToken", fmt.Errorf("%q: want a file, %q needs a token or --link-cert", "", e)
	}
	return "", nil
}

func (c *Host) validateServing() (key string, err error) {
	s := &c.Serving
	if s.At.Network == "" {
		for _, f := range c.servingFields()[1:] {
			if strings.Join(f.get(), "") != "" {
				return f.key, fmt.Errorf("is only for --listen, which is not set")
			}
		}
		return "", nil
	}
	if name, ok := twice(s.Guests); ok {
		return "guest", fmt.Errorf("%q: given twice, want each guest once", name)
	}
	switch {
	case len(s.Guests) == 0:
		return "guest", fmt.Errorf("an empty list: --listen wants the names of the guests that may connect")
	case s.Cert == "" || s.Key == "":
		return "cert", fmt.Errorf("--listen wants --cert and --key")
	case c.LinkToken == "" && s.ClientCA == "":
		return "linkToken", fmt.Errorf("%q: want a file, %q needs a token or --client-ca", "", s.At)
	}
	return "", nil
}

// The variables of older agents, which count where none of fairlead's own is set.

// cattleServer reads the address of a server, with or without a scheme. Only that of wss://
// names the guest in its path. What has another path or another scheme is kept as it is, and
// refused as an endpoint. Empty sets nothing.
func cattleServer(s string) string {
	s = strings.TrimSpace(s)
	if s == "" {
		return ""
	}
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		scheme, rest = "https", s
	}
	rest = strings.TrimRight(rest, "/")
	if strings.EqualFold(scheme, networkWSS) || strings.EqualFold(scheme, "https") && !strings.Contains(rest, "/") {
		return networkWSS + "://" + rest
	}
	return s
}

// cattleDebug is "debug" for a true value, and else empty, which sets nothing.
func cattleDebug(s string) string {
	if on, err := strconv.ParseBool(s); err == nil && on {
		return "debug"
	}
	return ""
}
