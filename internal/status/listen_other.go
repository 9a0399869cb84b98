// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package status

import "net"

// listenPrivate relies on the directory's access list, which the user's profile provides.
func listenPrivate(path string) (net.Listener, error) { return net.Listen("unix", path) }
