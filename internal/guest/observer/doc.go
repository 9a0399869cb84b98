// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package observer reports which sockets of a network namespace serve a port: TCP
// sockets in LISTEN, UDP sockets that are bound and have no peer, and TCP sockets
// that are bound and do not listen.
//
// Hooks in the kernel (BPF programs, see bpf/) report each change within
// microseconds through a ring buffer. A socket diag dump at the start, after a
// loss and now and then in the background corrects the state. Where a kernel lacks
// a hook the next one is tried, for each capability on its own, down to polling by
// dumps.
//
// A socket is identified by its cookie, a number that the kernel never uses twice
// and that hooks and dumps have in common. While a dump runs, the last event of a
// cookie, in the order of the ring, decides; the dump decides for cookies without
// an event. That is exact because the hooks that report the end of a socket are
// attached before those that report a start, and both before the first dump.
//
// Many hooks run before a dump shows the change that they report, and a call can be
// interrupted in between. So events of the last second before a dump count as those
// during the dump, unless events were lost: then the dump decides.
//
// The owner of a socket is the process that has it: of several the one that started first,
// or of those that started within a tick the one with the lowest pid, under the name that its
// first thread has now. An event names the process that caused it, and another one its new name. To hand
// a socket on makes no event, so the owner is looked at a second after it is known,
// when it ends or executes a program, and by audits; an older process that got a copy is found
// only by the audits that search all of /proc. If nobody there has the socket, the owner is
// unknown. The name of a process of another pid namespace is known by the event alone.
package observer
