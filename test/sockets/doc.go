// SPDX-License-Identifier: Apache-2.0

// Package sockets compares what fairlead publishes of sockets with what the kernel
// says and what connections meet: random operations on sockets by several processes,
// for each method of observing them.
package sockets
