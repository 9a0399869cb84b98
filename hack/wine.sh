#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs a program that was built for Windows under wine, in a directory of its own:
# go test -exec "$PWD/hack/wine.sh".
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: hack/wine.sh PROGRAM.exe ARGUMENT..." >&2; exit 2; }

cache=${FAIRLEAD_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/fairlead}
export WINEPREFIX=$cache/wine WINEDEBUG=-all
wine=/usr/lib/wine/wine64
[ -x "$wine" ] || { echo "$wine is missing: run hack/provision.sh wine" >&2; exit 1; }

# Go takes random numbers from a library that wine 8 lacks. Wine has the same function
# under another name.
library=$WINEPREFIX/drive_c/windows/system32/bcryptprimitives.dll
if [ ! -f "$library" ]; then
	mkdir -p "$cache"
	tmp=$(mktemp -d)
	trap 'rm -rf "$tmp"' EXIT
	"$wine" wineboot --init >"$tmp/wineboot.log" 2>&1 || { cat "$tmp/wineboot.log" >&2; exit 1; }
	printf '.text\n' >"$tmp/empty.s"
	printf 'LIBRARY bcryptprimitives.dll\nEXPORTS\nProcessPrng=ADVAPI32.SystemFunction036\n' >"$tmp/exports.def"
	x86_64-w64-mingw32-as -o "$tmp/empty.o" "$tmp/empty.s"
	x86_64-w64-mingw32-ld -shared -e 0 -o "$tmp/library.dll" "$tmp/empty.o" "$tmp/exports.def"
	cp "$tmp/library.dll" "$library"
fi
exec "$wine" "$@"
