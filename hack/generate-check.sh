#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Generates in a copy of the tree and fails when what comes out differs from what
# stands in the tree. The tree itself is not touched.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' f; do
	[ ! -e "$f" ] || printf '%s\0' "$f"
done | tar --null -T - -cf - | tar -xf - -C "$copy"
before=$(cd "$copy" && find . -type f -print0 | sort -z | xargs -0 sha256sum)
# The old output goes first, so that what is no longer generated is noticed.
rm -f "$copy"/internal/guest/kernel/bpf/*_bpfel.go "$copy"/internal/guest/kernel/bpf/*_bpfel.o
(cd "$copy" && go generate ./...)
after=$(cd "$copy" && find . -type f -print0 | sort -z | xargs -0 sha256sum)
diff <(printf '%s\n' "$before") <(printf '%s\n' "$after") ||
	{ echo "generate-check: generated files differ from the sources: run 'go run ./hack/stages generate'" >&2; exit 1; }
