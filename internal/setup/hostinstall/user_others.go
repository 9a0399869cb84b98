// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package hostinstall

import (
	"os"
	"strconv"
)

// CurrentUser returns the id of this process's user.
func CurrentUser() (string, error) { return strconv.Itoa(os.Getuid()), nil }
