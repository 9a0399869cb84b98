#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Vets the packages given and everything of this module that they need, for the
# system that GOOS and GOARCH name.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: hack/vet-deps.sh PACKAGE..." >&2; exit 2; }
deps=$(go list -deps -f '{{with .Module}}{{if .Main}}{{$.ImportPath}}{{end}}{{end}}' "$@")
# What is compiled is not run: half of the work is left out.
# shellcheck disable=SC2086
exec go vet -gcflags='all=-N -l -dwarf=false' $deps
