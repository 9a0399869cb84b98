#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Vets packages and everything of this module that they need for another system:
#
#   hack/vet-deps.sh GOOS/GOARCH PACKAGE...
set -euo pipefail
[ $# -gt 1 ] || { echo "usage: hack/vet-deps.sh GOOS/GOARCH PACKAGE..." >&2; exit 2; }
export CGO_ENABLED=0 GOOS=${1%/*} GOARCH=${1#*/}
shift
deps=$(go list -deps -f '{{with .Module}}{{if .Main}}{{$.ImportPath}}{{end}}{{end}}' "$@")
# What is compiled is not run: half of the work is left out.
# shellcheck disable=SC2086
exec go vet -gcflags='all=-N -l -dwarf=false' $deps
