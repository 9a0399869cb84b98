// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"strconv"
	"strings"
)

// Mismatch says what to update where agent and host have different versions, or "".
func Mismatch(agent, host string) string {
	if agent == host || agent == "" || host == "" {
		return ""
	}
	a, ok := numbers(agent)
	h, known := numbers(host)
	switch order := compare(a, h); {
	case !ok || !known || order == 0:
		return "update the older of agent and host"
	case order < 0:
		return "update the agent in the guest: the host is newer"
	}
	return "update fairlead on the host: the agent is newer"
}

// numbers are the parts of "v1.2.3", before any pre-release.
func numbers(version string) (list []int, ok bool) {
	version, ok = strings.CutPrefix(version, "v")
	if !ok {
		return nil, false
	}
	version, _, _ = strings.Cut(version, "+")
	version, _, _ = strings.Cut(version, "-")
	for part := range strings.SplitSeq(version, ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil, false
		}
		list = append(list, n)
	}
	return list, true
}

func compare(a, b []int) int {
	for i := range min(len(a), len(b)) {
		if c := cmp.Compare(a[i], b[i]); c != 0 {
			return c
		}
	}
	return 0
}
