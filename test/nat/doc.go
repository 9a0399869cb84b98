// SPDX-License-Identifier: Apache-2.0

// Package nat tests the NAT source against real rulesets: each file of corpus/
// is loaded in a fresh network namespace with the tools that people use, read
// through the kernel, and compared with the publications that it must give.
package nat
