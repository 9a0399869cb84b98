// SPDX-License-Identifier: Apache-2.0

package observer

import "strings"

// Brief says on one line why better methods failed: of each of the joined errors
// what failed and the cause, without the way between them, which can be long.
func Brief(err error) string {
	if err == nil {
		return ""
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []string
		for _, e := range joined.Unwrap() {
			all = append(all, Brief(e))
		}
		return strings.Join(all, "; ")
	}
	what, _, _ := strings.Cut(err.Error(), ":")
	if why := cause(err); why != what {
		what += ": " + why
	}
	return what
}

// cause is the first line of the innermost error.
func cause(err error) string {
	for {
		var inner error
		switch e := err.(type) { //nolint:errorlint // walked by hand
		case interface{ Unwrap() error }:
			inner = e.Unwrap()
		case interface{ Unwrap() []error }:
			if all := e.Unwrap(); len(all) > 0 {
				inner = all[0]
			}
		}
		if inner == nil {
			line, _, _ := strings.Cut(err.Error(), "\n")
			return line
		}
		err = inner
	}
}
