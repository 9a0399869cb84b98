// SPDX-License-Identifier: Apache-2.0

//go:build !race

package fleet

const agents = 200
