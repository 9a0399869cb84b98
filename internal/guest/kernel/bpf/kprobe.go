// SPDX-License-Identifier: Apache-2.0

//go:build amd64 || arm64

package bpf

import "github.com/cilium/ebpf"

// LoadSockKprobes returns the kprobe programs for sockets.
func LoadSockKprobes() (*ebpf.CollectionSpec, error) { return LoadSockKprobe() }
