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
	Pin  string `key:"linkPin" flag:"link-pin" kind:"sha256" is:"sha256" older:"CATTLE_CA_CHECKSUM" help:"SHA-256 of the CA bundle of a wss:// server, which is then trusted alone; without, the system's roots count"` // in lower case
	Cert string `key:"linkCert" flag:"link-cert" kind:"file" is:"file" help:"certificate that proves this guest to a wss:// server"`
	Key  string `key:"linkKey" flag:"link-key" kind:"file" is:"file" help:"key of --link-cert"`
}

// Serving is how a host takes the links of agents that dial it.
type Serving struct {
	At       Endpoint `key:"listen" flag:"listen" kind:"endpoint" is:"listen" help:"take the links of agents that dial this host: wss://:PORT or wss://ADDRESS:PORT"` // the zero Endpoint is nowhere
	Guests   []string `key:"guest" flag:"guest" kind:"name" is:"guest" help:"name of a guest that may connect to --listen (may be repeated)"`
	Cert     string   `key:"cert" flag:"cert" kind:"file" is:"file" help:"certificate of --listen in PEM, with its chain"`
	Key      string   `key:"key" flag:"key" kind:"file" is:"file" help:"key of --cert in PEM"`
	Bundle   string   `key:"caBundle" flag:"ca-bundle" kind:"file" is:"file" help:"CA bundle whose SHA-256 agents pin; by default the certificates of --cert"`
	ClientCA string   `key:"clientCA" flag:"client-ca" kind:"file" is:"file" help:"roots of the guests' certificates, which --listen then requires; a token is then only required if --link-token is set"`
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
		for _, f := range fieldsOf(s, false) {
			if f.text() != "" {
				return f.Key, fmt.Errorf("is only for --listen, which is not set")
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

// fromOlder reads a variable of older agents, which counts where none of fairlead's own is set. Empty
// sets nothing.
func fromOlder(variable, s string) string {
	switch variable {
	case "CATTLE_SERVER":
		return cattleServer(s)
	case "CATTLE_DEBUG":
		return cattleDebug(s)
	}
	return strings.TrimSpace(s)
}

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
