// SPDX-License-Identifier: Apache-2.0

// Package deploy tries what deploy/ holds, as far as it can be without booting a
// system with it. It needs tools of the machine, so it is not for the emulated
// kernels.
package deploy
