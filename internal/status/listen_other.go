// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package status

import (
	"net"
	"os"
)

func ensureDir(dir string) error { return os.MkdirAll(dir, 0o700) }

// listenPrivate relies on the directory's access list, which the user's profile provides.
func listenPrivate(path string) (net.Listener, error) { return net.Listen("unix", path) }
