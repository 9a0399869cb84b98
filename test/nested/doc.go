// SPDX-License-Identifier: Apache-2.0

// Package nested runs a host peer in a machine of test/vm, and its agents in machines within
// that machine, which are reached by vsock as virtual machines are:
//
//	go run ./hack/stages test-nested
package nested
