#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measures an earlier version of fairlead with today's benchmark, on this machine.
# Usage: hack/bench-before.sh COMMIT FILE
set -eu
export CGO_ENABLED=0
results=$2
if ! commit=$(git rev-parse --verify --quiet "$1^{commit}"); then
	echo "bench: BEFORE=$1: there is no such commit" >&2
	exit 2
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' INT TERM
# A clone, not a work tree: in that the compiler does not find out the commit.
git clone --quiet --shared --no-checkout . "$dir/tree"
git -C "$dir/tree" checkout --quiet --detach "$commit"
echo "bench: building $1" >&2
(cd "$dir/tree" && go build -buildvcs=true -tags grpcnotrace -trimpath -ldflags '-s -w' -o "$dir/fairlead" ./cmd/fairlead)
# What an earlier version cannot do is noted in the results, and ends nothing: the last line is
# missing only if the run was interrupted.
FAIRLEAD_PROGRAM=$dir/fairlead go -C test run ./bench -out "$dir/results" >/dev/null || grep -q '^BenchmarkRun ' "$dir/results"
mv "$dir/results" "$results"
