#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Measures this tree RUNS times (3), and in turns with it the commit that BEFORE names, each with
# its own benchmark. benchstat shows both. The results and the table of targets are written to
# docs/benchmarks, unless BENCH chooses some benchmarks.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "bench: the benchmarks make network namespaces: run it as root" >&2; exit 1; }
results=$PWD/docs/benchmarks
export CGO_ENABLED=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

# prepare NAME DIRECTORY builds program and benchmark of a tree.
prepare() {
	echo "bench: building $1" >&2
	[ -e "$2/test/go.mod" ] || { echo "bench: the commit of BEFORE has no such benchmark" >&2; exit 2; }
	go -C "$2" build -buildvcs=false -tags grpcnotrace -trimpath -ldflags '-s -w' -o "$work/$1.fairlead" ./cmd/fairlead
	go -C "$2/test" test -c -tags root -o "$work/$1.test" ./bench
	{
		echo "commit: $(git -C "$2" rev-parse --short=12 HEAD)$([ -z "$(git -C "$2" status --porcelain --untracked-files=no)" ] || echo ' and changes')"
		echo "date: $(date -u '+%Y-%m-%d %H:%M UTC')"
		echo "kernel: $(uname -r)"
		echo "processors: $(nproc)"
		echo "load: $(cut -d ' ' -f 1-3 /proc/loadavg)"
	} >"$work/$1"
}

rc=0
# measure NAME DIRECTORY measures it once.
measure() {
	(cd "$2/test/bench" && FAIRLEAD_PROGRAM=$work/$1.fairlead "$work/$1.test" -test.run '^$' -test.bench "${BENCH:-.}" -test.benchtime 1x -test.timeout 3h) |
		tee -a "$work/$1" || { echo "bench: $1: not all was measured" >&2; rc=1; }
}

prepare results .
if [ -n "${BEFORE:-}" ]; then
	git rev-parse --verify --quiet "$BEFORE^{commit}" >/dev/null || { echo "bench: BEFORE=$BEFORE: there is no such commit" >&2; exit 2; }
	git clone --quiet --shared --no-checkout . "$work/tree"
	git -C "$work/tree" checkout --quiet --detach "$(git rev-parse "$BEFORE^{commit}")"
	prepare before "$work/tree"
fi
for ((i = 0; i < ${RUNS:-3}; i++)); do
	[ -z "${BEFORE:-}" ] || measure before "$work/tree"
	measure results .
done
go -C test tool benchstat -ignore commit,date,load ${BEFORE:+"before=$work/before"} "now=$work/results"
if [ -z "${BENCH:-}" ]; then
	for name in before results; do
		[ ! -e "$work/$name" ] || cp "$work/$name" "$results/$name.txt"
	done
	go -C test test -count 1 ./bench -run '^TestReportIsUpToDate$' -update
fi
exit $rc
