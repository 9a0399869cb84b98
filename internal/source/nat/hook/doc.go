// SPDX-License-Identifier: Apache-2.0

// Package hook attaches BPF programs that report replacements of legacy iptables tables.
package hook
