// SPDX-License-Identifier: Apache-2.0

//go:build !race

package model

import "math"

const most = math.MaxInt
