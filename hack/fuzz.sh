#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fuzzes one target and notes how often it ran, and how many inputs of the cache are new. What
# makes it fail is in testdata/fuzz of its package, to be kept with the fix.
#
#   hack/fuzz.sh DIRECTORY FUNCTION TIME
set -euo pipefail
[ $# = 3 ] || { echo "usage: hack/fuzz.sh DIRECTORY FUNCTION TIME" >&2; exit 2; }

# Without a limit, to make one new input smaller takes up to a minute, in which nothing is
# tried. Go reports its own deadline as a failure if the time ends while it collects a result:
# that is no finding, and has no failing input.
for _ in 1 2 3; do
	rc=0
	out=$(go -C "$1" test -run '^$' -fuzz "^$2\$" -fuzztime "$3" -fuzzminimizetime 20x . 2>&1) || rc=$?
	printf '%s\n' "$out"
	if [ $rc = 0 ]; then
		sed -nE 's/.*execs: ([0-9]+).*new interesting: ([0-9]+).*/note: \1 executions, \2 new inputs/p' <<<"$out" | tail -1
		exit
	fi
	if grep -q 'Failing input written to' <<<"$out" || ! grep -q '^ *context deadline exceeded$' <<<"$out"; then break; fi
done
exit 1
