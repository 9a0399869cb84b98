// SPDX-License-Identifier: Apache-2.0

// Package bpf has the compiled BPF programs of the folder bpf/, which bpf2go
// generates with the names of their maps, programs and types.
package bpf
