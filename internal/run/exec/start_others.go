// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package exec

import (
	"fmt"
	"runtime"
)

func start(p Program) (*Job, error) {
	return nil, fmt.Errorf("%s: programs cannot be run on %s", p.Path, runtime.GOOS)
}
