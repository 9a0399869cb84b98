// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
)

// unseen are the variables of this shell that count where a program is started by hand, and
// that it has not where it was installed.
type unseen []string

// lookup is os.LookupEnv for a program without variables. It notes those that this shell has.
func (u *unseen) lookup(name string) (string, bool) {
	if os.Getenv(name) != "" {
		*u = append(*u, name)
	}
	return "", false
}

// note is what to print after an installation, empty if there are none.
func (u unseen) note() string {
	if len(u) == 0 {
		return ""
	}
	return "\nWhat was installed has none of the variables of this shell, such as " + strings.Join(u, ", ") +
		": give flags instead, or see https://github.com/fairlead/fairlead/blob/main/docs/remote.md#at-boot"
}
