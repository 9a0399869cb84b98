// SPDX-License-Identifier: Apache-2.0

// Package ruleset is the data of a NAT ruleset as the kernel gives it, and its
// decoding: nftables messages (message.go) and expressions (expr.go), tables of
// iptables-legacy (legacy.go), matches and targets of x_tables (xtables.go). It
// does not judge what rules mean.
package ruleset
