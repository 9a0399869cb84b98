// SPDX-License-Identifier: Apache-2.0

//go:build race

package model

// most bounds the operations with the race detector, which makes them ten times as long.
const most = 5_000
