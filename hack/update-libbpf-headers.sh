#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Refreshes bpf/include from the libbpf headers installed on this machine
# (Debian: libbpf-dev). Usage: hack/update-libbpf-headers.sh [include directory]
set -eu
cd "$(dirname "$0")/.."
from=${1:-/usr/include}
to=bpf/include/bpf
mkdir -p "$to"
for h in bpf_core_read.h bpf_endian.h bpf_helper_defs.h bpf_helpers.h bpf_tracing.h; do
	install -m 0644 "$from/bpf/$h" "$to/$h"
done
# The version, so that a reader knows what is vendored.
awk '/LIBBPF_MAJOR_VERSION/ {a = $3} /LIBBPF_MINOR_VERSION/ {b = $3}
	END {print "libbpf " a "." b}' "$from/bpf/libbpf_version.h" >"$to/VERSION"
