/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the programs and the agent share. Generation makes the Go types from
 * these, so a change here is a change there.
 */
#ifndef FAIRLEAD_EVENT_H
#define FAIRLEAD_EVENT_H

enum event_kind {
	/* A TCP or UDP socket got its local port by bind(2). */
	EVENT_BIND = 1,
	/* A TCP socket entered LISTEN; port 0 if it is chosen only after the hook. */
	EVENT_LISTEN = 2,
	/* A TCP socket left LISTEN but stays bound: shutdown(2), or a failed listen(2). */
	EVENT_UNLISTEN = 3,
	/* The socket gave up its port. */
	EVENT_CLOSE = 4,
	/* The socket got a peer: it serves nobody else. */
	EVENT_CONNECT = 5,
	/* The socket is about to get a peer; ask the kernel in a moment whether it did. */
	EVENT_CHECK = 6,
};

/*
 * One record of the ring buffer. Of EVENT_CLOSE, EVENT_CONNECT and EVENT_CHECK
 * only observed, cookie, kind and protocol are said, the rest is 0. Addresses are in network byte order, all else in
 * the host's.
 */
struct event {
	__u64 observed; /* CLOCK_MONOTONIC, ns */
	__u64 cookie;	/* 0: the kernel has not made one yet */
	__u64 cgroup;	/* id of the socket's cgroup2 directory, 0 if unknown */
	__u32 netns;	/* inode of the socket's network namespace */
	__u32 pid;	/* thread group in the agent's pid namespace, 0 if not visible there */
	__u32 uid;	/* of the socket */
	__u32 inode;	/* of the socket, 0 if it has no file */
	__u32 device;	/* interface index that the socket is bound to, or 0 */
	__u16 port;
	__u8 kind;     /* enum event_kind */
	__u8 protocol; /* IPPROTO_TCP or IPPROTO_UDP */
	__u8 family;   /* AF_INET or AF_INET6 */
	__u8 v6only;
	__u8 state; /* TCP_* of the socket when the event was made */
	__u8 padding[5];
	__u8 address[16]; /* IPv4: the first four bytes */
	__u8 comm[16];	  /* of the task that caused the event */
};
_Static_assert(sizeof(struct event) == 88, "event is the ABI with the agent");
_Static_assert(sizeof(struct event) <= 128, "a burst must fit the ring");
_Static_assert(__builtin_offsetof(struct event, address) == 56, "no hidden padding");

/*
 * One page of memory shared with the agent.
 *
 * Wake-ups are the cost of an event, so they are made only when the agent
 * sleeps. It says so in asleep, looks at the ring once more, and then waits. A
 * producer that finds it asleep clears that and wakes it; one that did not find
 * it so looks again after its record is committed. Commit is a full barrier
 * (xchg), and so is the agent's store, so at least one of the two sees the other.
 *
 * UDP sockets can come and go by the hundred each second, for ever. When that
 * has gone on for a while the agent dozes: it comes back by itself in a tenth of a
 * second, and only TCP wakes it before.
 */
enum sleep {
	SLEEP_AWAKE = 0,
	SLEEP_DEEP = 1,
	SLEEP_DOZE = 2,
};

struct control {
	__u32 asleep; /* enum sleep */
	/*
	 * Stop hooks report only sockets in `tracked`, unless open is set: during
	 * a dump, whose rows are not tracked yet, and when the map is full.
	 */
	__u32 open;
	__u32 lost;  /* a record was lost since the agent last cleared this */
	__u32 bound; /* bound TCP sockets are observed */
};
_Static_assert(sizeof(struct control) == 16, "control is the ABI with the agent");

#endif
