// SPDX-License-Identifier: Apache-2.0

package kernel

import "strings"

// Brief describes on one line why better methods failed: for each joined error
// its first and its innermost part, without the wrapping between, which can be long.
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

// cause returns the first line of the innermost error.
func cause(err error) string {
	for {
		var inner error
		switch e := err.(type) { //nolint:errorlint // unwraps step by step
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
