// SPDX-License-Identifier: Apache-2.0

//go:build linux && !(amd64 || arm64 || loong64 || mips64le || ppc64le || riscv64)

package bpf

// The compiler prints this name: what BPF programs and agent share has 64-bit, little-endian
// numbers, and structs of the kernel have the layout of 64-bit machines.
var _ = fairlead_on_Linux_needs_a_64_bit_little_endian_processor
