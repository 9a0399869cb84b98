// SPDX-License-Identifier: Apache-2.0

//go:build linux && !amd64 && !arm64

package observer

import "github.com/cilium/ebpf"

// loadKprobes has nothing for this architecture: kprobe programs read registers.
func loadKprobes() (*ebpf.CollectionSpec, error) { return nil, nil }

func loadNftKprobes() (*ebpf.CollectionSpec, error) { return nil, nil }
