// SPDX-License-Identifier: Apache-2.0

// Package install installs fairlead in a fresh Debian that booted systemd (build tag
// systemd) or OpenRC (openrc), in a machine of test/vm:
//
//	go run ./test/vm -system systemd -tags systemd ./test/install
package install
