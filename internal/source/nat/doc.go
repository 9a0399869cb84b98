// SPDX-License-Identifier: Apache-2.0

// Package nat publishes the ports that exist only as NAT rules.
//
// It keeps a model of the part of the kernel's nftables and iptables-legacy
// rulesets that nat hooks can reach (model.go), and compiles it to bindings
// (compile.go): for each protocol and port, which local addresses lead to which
// DNAT or REDIRECT, and what limits it. The compiler is a pure function of the
// model, worked out again only where a change reaches. What it cannot read for
// certain it lists as a [Problem] and does not publish.
//
// [Source] feeds the model: a generation-checked dump at the start and after
// every gap, the kernel's own notifications in between, one commit as one step.
package nat

// sourceName is the source of all origins of this package.
const sourceName = "nat"
