// SPDX-License-Identifier: Apache-2.0

// Package registry merges what all sources report into one table of publications,
// finds their owners, applies the rules, and numbers each change. It keeps what
// each source last reported: a source that fails is stale, never empty.
//
// # Who owns a port
//
// A container, then a Service, then a process. Sources hand hints up with their
// bindings (port.Hints), and engines keep facts (Facts); neither knows of the other.
// Bindings with the same hints share one attribution, which is looked up when the
// first of them appears and when a fact about one of its keys changes. So a fact costs
// what it names, and the order of arrival does not matter. A cgroup or an address that
// two owners claim names nobody.
//
// # Owners that are pending
//
// An owner is pending while an engine may still name another one: a NAT rule leads to
// an address that no engine knows, a socket is in the cgroup of an unknown container or
// belongs to a program that relays ports, its process is searched for in /proc, or its
// container has gone and the socket or rule is still there. A rule that names an owner
// then neither matches nor fails to match; if that can change the decision, the port
// waits and is on no sink. The wait ends when an owner is named, or when each engine has
// answered two lists that name none; while an engine is starting or stale it does not
// end, and it begins anew when all are live again.
//
// # Several owners
//
// A live engine is believed before a stale one. If two live engines claim a port for
// different containers, and the rules decide differently for these, the port is pending
// and names both. A deny rule holds for each owner that a port's NAT rules lead to.
package registry
