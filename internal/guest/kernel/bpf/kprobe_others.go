// SPDX-License-Identifier: Apache-2.0

//go:build !amd64 && !arm64

package bpf

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/cilium/ebpf"
)

// LoadSockKprobes fails: kprobe programs read registers, and were not built for
// this architecture.
func LoadSockKprobes() (*ebpf.CollectionSpec, error) { return noKprobes() }

func noKprobes() (*ebpf.CollectionSpec, error) {
	return nil, fmt.Errorf("kprobe programs on %s: %w", runtime.GOARCH, errors.ErrUnsupported)
}
