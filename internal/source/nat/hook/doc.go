// SPDX-License-Identifier: Apache-2.0

// Package hook attaches BPF programs that report replacements of legacy iptables
// tables, and loads of kernel modules, after which more can be attached to.
package hook
