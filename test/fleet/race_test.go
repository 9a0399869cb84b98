// SPDX-License-Identifier: Apache-2.0

//go:build race

package fleet

// agents are fewer with the race detector, under which a TLS handshake takes many times
// longer.
const agents = 20
