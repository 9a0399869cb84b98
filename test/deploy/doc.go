// SPDX-License-Identifier: Apache-2.0

// Package deploy tests the files of deploy/ as far as that is possible without booting
// a system with them. It needs tools of this machine, so it does not run in emulated
// kernels.
package deploy
