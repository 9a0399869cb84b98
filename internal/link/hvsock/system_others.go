// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package hvsock

import (
	"context"
	"errors"
)

// NewSystem fails: Hyper-V sockets are for Windows hosts.
func NewSystem() (System, error) {
	return nil, errors.New("hyper-v sockets are for Windows: use vsock://CID:PORT or unix:///PATH")
}

// RunWSL fails: there is no wsl.exe here.
func RunWSL(context.Context, ...string) ([]byte, error) {
	return nil, errors.New("wsl.exe is on Windows only")
}
