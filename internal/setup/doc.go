// SPDX-License-Identifier: Apache-2.0

// Package setup holds what brings fairlead to a machine and shows it there: tokens of a pair,
// starting with the machine or the session, the demo, and the flags of Rancher Desktop's agent.
package setup
