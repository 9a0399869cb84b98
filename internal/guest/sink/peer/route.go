// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bufio"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port/procnet"
)

// DefaultGateway returns the router of the best IPv4 default route, by /proc below root.
// It is the zero address if there is none.
func DefaultGateway(root string) netip.Addr {
	f, err := os.Open(filepath.Join(root, "proc/net/route"))
	if err != nil {
		return netip.Addr{}
	}
	defer func() { _ = f.Close() }()
	var best netip.Addr
	lowest := uint64(1 << 63)
	for s := bufio.NewScanner(f); s.Scan(); {
		// Iface Destination Gateway Flags RefCnt Use Metric Mask ...
		col := strings.Fields(s.Text())
		if len(col) < 8 || col[1] != "00000000" || col[7] != "00000000" {
			continue
		}
		a, err := procnet.ParseAddr(col[2])
		metric, merr := strconv.ParseUint(col[6], 10, 32)
		if err == nil && merr == nil && a.Is4() && !a.IsUnspecified() && metric < lowest {
			best, lowest = a, metric
		}
	}
	return best
}

// PodmanMarkers returns the files of which a Podman machine has one, since Podman 6 the
// first. It names the machine's kind.
func PodmanMarkers() []string {
	return []string{"/etc/podman-machine", "/etc/containers/podman-machine"}
}

// HostsFile returns the addresses that /etc/hosts below root gives a name. Unlike an
// answer of DNS, they were written by root of this machine.
func HostsFile(root, name string) []netip.Addr {
	f, err := os.Open(filepath.Join(root, "etc/hosts"))
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	var out []netip.Addr
	for s := bufio.NewScanner(f); s.Scan(); {
		line, _, _ := strings.Cut(s.Text(), "#")
		words := strings.Fields(line)
		if len(words) < 2 || !slices.ContainsFunc(words[1:], func(w string) bool { return strings.EqualFold(w, name) }) {
			continue
		}
		if a, err := netip.ParseAddr(words[0]); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}
