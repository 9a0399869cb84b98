// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"regexp"
	"strconv"
)

// unreadMax bounds the NAT rules in one answer.
const unreadMax = 10

// UnreadAbout returns the first of the rules that name the port, or whose ports cannot be
// read.
func UnreadAbout(rules []Unread, port uint16) (list []Unread) {
	for _, r := range rules {
		names, unsure := namesPort(r.Rule, port)
		if (names || unsure) && len(list) < unreadMax {
			r.Unsure = unsure
			list = append(list, r)
		}
	}
	return list
}

// portLists matches the ports after "dport" or "--dports" in a rule's text.
var portLists = regexp.MustCompile(`dports? (?:[!={] ?)*([0-9][-0-9,: ]*)`)

// portBounds matches a port range of native nftables.
var portBounds = regexp.MustCompile(`dport >= ([0-9]+) th dport <= ([0-9]+)`)

var portRange = regexp.MustCompile(`([0-9]+)(?:[-:]([0-9]+))?`)

// namesPort reports whether the text of a rule names the port, alone or in a
// range. Unsure is true if the text names no port, for example because a set does.
func namesPort(rule string, p uint16) (names, unsure bool) {
	rule = portBounds.ReplaceAllString(rule, "dport $1-$2")
	lists := portLists.FindAllStringSubmatch(rule, -1)
	for _, list := range lists {
		for _, m := range portRange.FindAllStringSubmatch(list[1], -1) {
			lo, err := strconv.ParseUint(m[1], 10, 16)
			hi, errHi := lo, error(nil)
			if m[2] != "" {
				hi, errHi = strconv.ParseUint(m[2], 10, 16)
			}
			if err == nil && errHi == nil && lo <= uint64(p) && uint64(p) <= hi {
				return true, false
			}
		}
	}
	return false, len(lists) == 0
}
