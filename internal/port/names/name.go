// SPDX-License-Identifier: Apache-2.0

// Package names gives DNS names to the owners of published ports. It is pure: a set of
// ports gives the same names in whatever order the ports came.
package names

import (
	"net/netip"
	"strconv"
	"strings"
)

// Local is the name of this machine's own page, and the default domain.
const Local = "localhost"

const (
	maxLabel = 63  // bytes of a label, RFC 1035
	maxName  = 253 // bytes of a name without its last dot
)

// Asked is what a client asks for.
type Asked uint8

// What a client can ask for.
const (
	Foreign Asked = iota // a name that is not ours, or none
	Page                 // localhost, or a loopback address
	Named                // a name below the domain
)

// Label makes a DNS label of a name: in lower case, with one hyphen for each run of other
// bytes than letters, digits and hyphens, and none at its ends. It may be empty. Several
// names can have one label.
func Label(name string) string {
	var b strings.Builder
	replaced := false
	for _, c := range []byte(name) {
		switch {
		case 'A' <= c && c <= 'Z':
			c += 'a' - 'A'
		case !ldh(c):
			if !replaced {
				b.WriteByte('-')
			}
			replaced = true
			continue
		}
		replaced = false
		b.WriteByte(c)
	}
	s := strings.Trim(b.String(), "-")
	return strings.TrimRight(s[:min(len(s), maxLabel)], "-")
}

// ldh reports whether c is a letter in lower case, a digit or a hyphen.
func ldh(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' }

// valid reports whether s is a name of labels in lower case.
func valid(s string) bool {
	if s == "" || len(s) > maxName {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > maxLabel || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range []byte(label) {
			if !ldh(c) {
				return false
			}
		}
	}
	return true
}

// CheckDomain reports whether s can be the domain of names.
func CheckDomain(s string) bool {
	_, err := netip.ParseAddr(s)
	return valid(s) && err != nil
}

// FromHost reads a Host header, which may have a port.
func FromHost(host, domain string) (name string, asked Asked) {
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.HasSuffix(host, "]") {
		if _, err := strconv.ParseUint(host[i+1:], 10, 16); err != nil && host[i+1:] != "" {
			return "", Foreign
		}
		host = host[:i]
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		inner, ok = strings.CutSuffix(inner, "]")
		if a, err := netip.ParseAddr(inner); ok && err == nil && a.Is6() && a.IsLoopback() {
			return "", Page
		}
		return "", Foreign
	}
	return FromServerName(host, domain)
}

// FromServerName reads the name that a TLS client asks for.
func FromServerName(host, domain string) (name string, asked Asked) {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if a, err := netip.ParseAddr(host); err == nil {
		if a.Is4() && a.IsLoopback() {
			return "", Page
		}
		return "", Foreign
	}
	switch {
	case !valid(host):
		return "", Foreign
	case host == Local:
		return "", Page
	case host == domain:
		return "", Named
	}
	if name, ok := strings.CutSuffix(host, "."+domain); ok {
		return name, Named
	}
	return "", Foreign
}

// portLabel reads a label that is a port.
func portLabel(s string) (uint16, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && n > 0 && s[0] != '0'
}
