// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package main

import "os"

// hangups returns nil: this system has no SIGHUP.
func hangups() (<-chan os.Signal, func()) { return nil, func() {} }
