// SPDX-License-Identifier: Apache-2.0

// Package packets compares what fairlead makes of a NAT ruleset with what
// packets do: random rulesets, real connections from outside, from the guest
// itself and through the host, and servers that answer which of them they are.
package packets
