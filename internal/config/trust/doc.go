// SPDX-License-Identifier: Apache-2.0

// Package trust reads files, and finds programs, only if no user but root and the
// process's own can change them, and writes files in one step.
package trust

import "errors"

// ErrUntrusted is in the error about a file that another user can change or replace.
var ErrUntrusted = errors.New("another user can change it")
