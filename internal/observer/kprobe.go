// SPDX-License-Identifier: Apache-2.0

//go:build linux && (amd64 || arm64)

package observer

import "github.com/cilium/ebpf"

func loadKprobes() (*ebpf.CollectionSpec, error) { return loadSockKprobe() }

func loadNftKprobes() (*ebpf.CollectionSpec, error) { return loadNftKprobe() }
