#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks that "go mod tidy" has nothing to do in either module, and that the tests are built
# with the versions of the product.
set -euo pipefail
cd "$(dirname "$0")/.."
rc=0
for module in . test; do
	go -C "$module" mod tidy -diff || { echo "modules: run 'go -C $module mod tidy'" >&2; rc=1; }
done
versions() { go -C "$1" mod edit -json | sed -n '/"Require"/,/^\t]/p' | sed -nE 's/.*"(Path|Version)": "(.*)".*/\2/p' | paste - - | sort; }
join <(versions .) <(versions test) | awk '$2 != $3 { print "modules: " $1 " is " $2 " in the product and " $3 " in test/go.mod"; rc = 1 } END { exit rc }' >&2 || rc=1
exit $rc
