#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# bpf2go with the compiler and the flags of all objects; gen.go has the rest.
set -eu
export BPF2GO_CC=clang-14 BPF2GO_STRIP=llvm-strip-14
warnings="-Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare"
export BPF2GO_CFLAGS="-Ibpf/include -O2 -g -mcpu=v3 -fdebug-prefix-map=$PWD=. $warnings"
exec go tool bpf2go -go-package bpf -output-dir internal/guest/kernel/bpf "$@"
