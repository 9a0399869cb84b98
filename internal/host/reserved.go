// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// PortRange is First to Last, both included. The zero value is an empty range.
type PortRange struct{ First, Last uint16 }

// String returns "FIRST-LAST".
func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// Contains reports whether p is in the range.
func (r PortRange) Contains(p uint16) bool { return r != PortRange{} && r.First <= p && p <= r.Last }

// parseReserved parses the output of "netsh interface ipv4 show excludedportrange": a
// heading in the user's language, then lines with the first and the last port, and
// an asterisk for ranges that an administrator added.
func parseReserved(r io.Reader) ([]PortRange, error) {
	var ranges []PortRange
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) < 2 || len(f) > 3 || len(f) == 3 && f[2] != "*" {
			continue
		}
		first, err1 := strconv.ParseUint(f[0], 10, 16)
		last, err2 := strconv.ParseUint(f[1], 10, 16)
		if err1 == nil && err2 == nil && first > 0 && first <= last {
			ranges = append(ranges, PortRange{uint16(first), uint16(last)})
		}
	}
	return ranges, sc.Err()
}
