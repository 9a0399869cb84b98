#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fuzzes every target, for FUZZTIME each or for MINUTES in all, and prints of each how
# often it ran, how many inputs of the cache are new, and its crashers. Those are in
# testdata/fuzz of their package, to be kept with the fix.
#
# TARGET is for this script itself: "DIR FUNCTION TIME", fuzzes one.
set -euo pipefail
cd "$(dirname "$0")/.."

# Without a limit, to make one new input smaller takes up to a minute, in which nothing is
# tried. Go reports its own deadline as a failure if the time ends while it collects a result:
# that is no finding, and has no failing input.
one() {
	local dir=$1 func=$2 time=$3 out
	for _ in 1 2 3; do
		out=$(go test -run '^$' -fuzz "^$func\$" -fuzztime "$time" -fuzzminimizetime 20x "./$dir" 2>&1) && { echo "$out"; return; }
		echo "$out"
		if grep -q 'Failing input written to' <<<"$out" || ! grep -q '^ *context deadline exceeded$' <<<"$out"; then return 1; fi
	done
	return 1
}
if [ -n "${TARGET:-}" ]; then
	read -r dir func time <<<"$TARGET"
	one "$dir" "$func" "$time"
	exit
fi

results=${RESULTS:-bin/results}
mapfile -t targets < <(grep -rHoE '^func Fuzz[A-Za-z0-9_]*' --include='*_test.go' cmd internal test | sort)
time=${FUZZTIME:-5s}
[ -z "${MINUTES:-}" ] || time=$((MINUTES * 60 / ${#targets[@]}))s
[ "$time" != 0s ] || { echo "fuzz: $MINUTES minutes are less than a second for each of ${#targets[@]} targets" >&2; exit 2; }
rc=0 total=0 report=
for target in "${targets[@]}"; do
	dir=$(dirname "${target%%:*}") func=${target##*func }
	name=fuzz.$(tr / . <<<"${dir#internal/}").$func
	TARGET="$dir $func $time" hack/stage.sh check "$name" hack/fuzz.sh || rc=1
	log=$results/$name.log
	execs=$(sed -nE 's/.*execs: ([0-9]+).*/\1/p' "$log" | tail -1)
	new=$(sed -nE 's/.*new interesting: ([0-9]+).*/\1/p' "$log" | tail -1)
	crashers=$(grep -c 'Failing input written to' "$log" || true)
	total=$((total + ${execs:-0}))
	report+=$(printf '%-50s %12s %6s %9s' "${dir#internal/} $func" "${execs:-0}" "${new:-0}" "$crashers")$'\n'
done
printf '\n%-50s %12s %6s %9s\n%s%d targets, %s each: %d executions\n' target executions new crashers "$report" ${#targets[@]} "$time" $total
exit $rc
