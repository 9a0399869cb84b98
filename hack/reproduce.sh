#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the programs here with the usual build cache, and a copy of the tree elsewhere
# with an empty one, and fails if they differ by a byte.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'GOCACHE=$work/cache go clean -cache; rm -rf "$work"' EXIT
copy=$work/another/place
mkdir -p "$copy"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' f; do
	[ ! -e "$f" ] || printf '%s\0' "$f"
done | tar --null -T - -cf - | tar -xf - -C "$copy"
build() { # CACHE OUT
	CGO_ENABLED=0 GOFLAGS='' GOCACHE=$1 go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags '-s -w -buildid=' -o "$2/" ./cmd/...
}
build "$(go env GOCACHE)" "$work/one"
(cd "$copy" && build "$work/cache" "$work/two")
cd "$work"
diff <(cd one && sha256sum -- *) <(cd two && sha256sum -- *) || { echo "reproduce: two builds differ" >&2; exit 1; }
