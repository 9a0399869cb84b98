// SPDX-License-Identifier: Apache-2.0

// Package bench measures fairlead as it runs: agents and host peers in network namespaces. "make
// bench" runs it, with an earlier version beside it if one is named, has benchstat compare both,
// and writes the targets and what was measured to docs/benchmarks. It needs root.
//
// A benchmark measures both sides of a ratio in turns, so that other load affects them alike.
// Run it with -benchtime 1x: how much is measured does not depend on b.N. FAIRLEAD_BENCH=short
// measures so little that it only shows that all works.
package bench
