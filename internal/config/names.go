// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port/claims"
	"github.com/fairlead/fairlead/internal/port/names"
)

// Names is where a host leads clients to ports by the names of their owners.
type Names struct {
	HTTP   []netip.AddrPort `key:"http" flag:"names" kind:"address:port" is:"address" help:"serve http://NAME.localhost of containers and Services at this address, such as 127.0.0.1:80 (may be repeated)"`
	TLS    []netip.AddrPort `key:"tls" flag:"names-tls" kind:"address:port" is:"address" help:"lead TLS connections by the name that they ask for, without decrypting them, from this address, such as 127.0.0.1:443 (may be repeated)"`
	Domain string           `key:"domain" flag:"names-domain" kind:"domain" is:"domain" help:"domain of all names"`
}

// nameAddr reads an address at which names are served.
func nameAddr(s string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(s)
	if err != nil || a.Port() == 0 || a.Addr().Zone() != "" {
		return netip.AddrPort{}, fmt.Errorf(`%q: want ADDRESS:PORT such as "127.0.0.1:80" or "[::1]:80"`, s)
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
}

func nameDomain(s string) (string, error) {
	s = strings.ToLower(strings.Trim(s, "."))
	if !names.CheckDomain(s) {
		return "", fmt.Errorf("%q: want a domain of letters, digits, hyphens and dots, such as %q", s, names.Local)
	}
	return s, nil
}

func (c *Host) validateNames() (key string, err error) {
	all := slices.Concat(c.Names.HTTP, c.Names.TLS)
	for i, a := range all {
		for _, b := range all[:i] {
			if claims.Overlap(a, b) {
				key := "names.http"
				if i >= len(c.Names.HTTP) {
					key = "names.tls"
				}
				return key, fmt.Errorf("%q: is at the port of %q, want another port or address", a, b)
			}
		}
	}
	return "", nil
}
