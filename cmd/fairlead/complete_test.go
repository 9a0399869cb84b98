// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestWordsAreCompleted(t *testing.T) {
	for line, want := range map[string]string{
		"ls --filter ":                           "state=\n",
		"ls --filter state=":                     "state=conflict\n",
		"watch --filter protocol=":               "protocol=udp\n",
		"host --bind ":                           "loopback\n",
		"host --log-level ":                      "debug\n",
		"config loglevel set ":                   "debug\n",
		"config loglevel set debug --component ": "nat\n",
		"config show --output ":                  "json\n",
		"ls --filter owner=whatever":             ":4\n",
	} {
		args := strings.Split(line, " ")
		out, _, code := execute(t, append([]string{"__complete"}, args...)...)
		if code != exitOK || !strings.Contains(out, want) {
			t.Errorf("%q: exit %d, no %q in %q", line, code, want, out)
		}
	}
}
