// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package observer tells which sockets of a network namespace serve a port, as
// the kernel says it: TCP sockets in LISTEN, UDP sockets that are bound and
// have no peer, and TCP sockets that are bound and do not listen.
//
// Hooks in the kernel (BPF programs, see bpf/) bring each change within
// microseconds through a ring buffer; a socket diag dump at the start, after a
// loss and now and then in the background is the truth that the state is
// checked against. Where a kernel lacks a hook the next one is tried, for each
// capability on its own, down to polling by dumps.
//
// A socket is known by its cookie, a number that the kernel never uses twice,
// and that hooks and dumps agree on. While a dump runs, a cookie with an event
// is decided by its last event in the order of the ring; the dump decides the
// rest. That is exact because the hooks that end a socket are attached before
// those that start one, and both before the first dump.
//
// This is the only package that imports cilium/ebpf.
package observer
