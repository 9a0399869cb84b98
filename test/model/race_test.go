// SPDX-License-Identifier: Apache-2.0

//go:build race

package model

// slower is how many times as long an operation takes, with the race detector.
const slower = 10
