// SPDX-License-Identifier: Apache-2.0

// Package nat publishes the ports that exist only as NAT rules.
//
// A [Source] joins three packages, and data flows through them one way: watch
// reads rulesets and their changes from the kernel, ruleset decodes them, compile
// works out which ports they make reachable. A session begins with a dump and reads
// another after every gap; in between it applies commits, each as one step.
package nat
