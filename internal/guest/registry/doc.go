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
// An owner is in doubt while an engine may still name another one: a NAT rule leads to an
// address that no engine knows, a socket is in the cgroup of an unknown container or belongs
// to a program that relays ports, its process is searched for in /proc, or its container or
// Service has gone and the socket or rule is still there. The owner of each publication is
// in one of these states:
//
//	state     enters                                     leaves                                        rules that name an owner
//	certain   nothing is in doubt                        with a doubt                                  decide
//	awaited   with a doubt                               each engine has answered two lists, or        wait
//	                                                     ownerWait is over for one that has no lists
//	searched  with a doubt, a process is searched for    as awaited, and ownerWait is over             wait
//	stopped   a NAT rule leads to an address whose       the address is another's, or the rule goes    wait
//	          container has stopped
//	orphaned  the Service was deleted, and its rules     the rules go, or an engine claims the port    wait
//	          lead to a container or pod
//	givenUp   at the end of awaited or searched          with a new doubt, or less is known            decide, as if certain
//
// From each state the doubt leads to the first that applies of orphaned, stopped, certain,
// searched and awaited; history decides three things. Only a port whose owner was a Service
// becomes orphaned. A wait goes on, and what was given up stays so, also while an engine is
// stale, until a doubt begins that is newer than the wait, or the owner is known less well.
// And lists and time count from when all engines are live: while one is starting or stale
// no wait ends, and then it begins anew.
//
// A rule that waits neither matches nor fails to match; if that can change the decision, the
// port is pending and on no sink. If only a NAT rule's target besides the owner is in doubt,
// that can only add a denial: what is denied anyway is not pending.
//
// # Several owners
//
// A live engine is believed before a stale one. If two live engines claim a port for
// different containers, and the rules decide differently for these, the port is pending
// and names both. Sockets of several owners can have one address and port (SO_REUSEPORT, and
// SO_REUSEADDR of UDP), and NAT rules can lead to several: a deny rule holds for each of them,
// and an allow list must allow each. Which of them is shown as the owner depends on the sockets'
// cookies alone. The kernel gives each socket one for life, but numbers them for each CPU and
// when somebody first asks (gen_cookie_next, Linux 6.18): they do not tell who came first, and so
// not who of several gets a datagram.
package registry
