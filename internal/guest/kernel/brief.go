// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"slices"
	"strings"

	"github.com/cilium/ebpf"
)

// Brief describes on one line why better methods failed: for each joined error
// its first and its innermost part, without the wrapping between, which can be long. Of a
// program that the verifier refused, the reason is the verifier's own.
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

// cause returns the first line of the innermost error, what the verifier stated last, or what
// the kernel does not have.
func cause(err error) string {
	for {
		var inner error
		switch e := err.(type) { //nolint:errorlint // unwraps step by step
		case *AbsentError:
			return "the kernel has no " + e.Target
		case *ebpf.VerifierError:
			if line := verdict(e.Log); line != "" {
				return line
			}
			inner = e.Cause
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

// verdict returns the line of a verifier's log that names what it refused, "" if none does.
func verdict(log []string) string {
	for _, line := range slices.Backward(log) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "processed ") {
			return line
		}
	}
	return ""
}
