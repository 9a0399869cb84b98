// SPDX-License-Identifier: Apache-2.0

// Package model compares the agent's core and the host peer (registry, rules,
// reconciler, link, claims, the driver of foreign peers) with a reference that keeps
// no state between two steps but what was reported and since when: random sets of
// bindings and owners, stale sources, reloads of rules, failing sinks, foreign peers
// that fail, forget or lose answers, engines that answer late or never when they are
// asked for lists, lost sessions and steps of the wall clock, in fake time.
//
// After each operation nothing may be open that the reference does not allow. When
// nothing is expected to change any more, both are equal, and a registry that starts then
// has the same publications.
package model
