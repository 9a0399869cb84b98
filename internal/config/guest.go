// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
)

// Guest is one guest of a host peer. Its text is ENDPOINT or NAME=ENDPOINT.
type Guest struct {
	Name string // how it is shown; empty if it was given none
	Endpoint
}

var guestName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

// CheckGuestName returns an error that says what a guest may be called.
func CheckGuestName(name string) error {
	if !guestName.MatchString(name) {
		return fmt.Errorf("%q: want a name of up to 63 letters, digits, dots, dashes and underscores", name)
	}
	return nil
}

// UnmarshalText implements encoding.TextUnmarshaler by ParseGuest.
func (g *Guest) UnmarshalText(b []byte) (err error) {
	*g, err = ParseGuest(string(b))
	return err
}

// ParseGuest reads the text of a Guest.
func ParseGuest(s string) (Guest, error) {
	before, after, _ := strings.Cut(s, "://")
	name, scheme, named := strings.Cut(before, "=")
	if !named {
		e, err := parseEndpoint(s, hostEndpoints)
		return Guest{Endpoint: e}, err
	}
	if err := CheckGuestName(name); err != nil {
		return Guest{}, err
	}
	e, err := parseEndpoint(scheme+"://"+after, hostEndpoints)
	return Guest{name, e}, err
}

// String returns what ParseGuest reads.
func (g Guest) String() string {
	if g.Name == "" {
		return g.Endpoint.String()
	}
	return g.Name + "=" + g.Endpoint.String()
}

// ID identifies the guest among those of a host: its name, or else its endpoint.
func (g Guest) ID() string { return cmp.Or(g.Name, g.Endpoint.String()) }

// TokenFileFor returns where the token of the guest is stored if its link has one. A
// guest with a name has a file of its own, unless one file was set for all guests.
func (c *Host) TokenFileFor(name string) string {
	if name == "" || c.TokenGiven || c.LinkToken == "" {
		return c.LinkToken
	}
	return filepath.Join(filepath.Dir(c.LinkToken), name+".token")
}

// TokenFile returns the file with the token of the guest, or "" if its link has none.
func (c *Host) TokenFile(g Guest) string {
	if c.TokenFileOf(g.Endpoint) == "" || g.Network == networkWSS && c.Serving.ClientCA != "" && !c.TokenGiven {
		return ""
	}
	return c.TokenFileFor(g.Name)
}
