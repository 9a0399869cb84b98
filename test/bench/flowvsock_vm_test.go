// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm && bench

package main

import (
	"errors"
	"testing"
)

// Flows pass over vsock's loopback, through fairlead and through plain relays, in
// one machine. The benchmark collects what that takes. It takes minutes, so that
// only the benchmark runs it.
func TestFlowsOverVsockInTheEmulatedMachine(t *testing.T) {
	e := emulatedEnv(t)
	if err := errors.Join(flowsOverVsock(t.Context(), e), e.err); err != nil {
		t.Error(err)
	}
}
