// SPDX-License-Identifier: Apache-2.0

// Package install installs fairlead in a fresh Debian that booted systemd or OpenRC, in a
// machine of test/vm. The names of the tests begin with the init they need:
//
//	go -C test run ./vm -system systemd -tags boot -run ^TestSystemd ./test/install
//	go -C test run ./vm -system openrc -tags boot -run ^TestOpenRC ./test/install
package install
