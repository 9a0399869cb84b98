// SPDX-License-Identifier: Apache-2.0

// Package compile works out what a ruleset makes reachable: for each protocol and
// port, which addresses of this machine lead to which DNAT or REDIRECT, and what
// limits it. It reads nothing but what it is given.
//
// A [Compiler] keeps a ruleset (state.go). A change of it marks rules, set elements
// and base chains as dirty; Commit evaluates those alone (evaluate.go: what a rule
// does to packets, seen alone), walks the chains that they are reached through
// (walk.go), and states the difference to what was published (publish.go). What
// cannot be read for certain is listed as a [Problem] and not published.
//
// A [Mirror] applies the messages of nftables commits to a Compiler.
package compile
