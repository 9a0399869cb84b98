// SPDX-License-Identifier: Apache-2.0

// Package kernel loads and attaches BPF programs, and reads what they report. It
// and its subfolder bpf, which has the compiled programs, are the only importers
// of cilium/ebpf.
package kernel
