/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the programs and the agent share. The Go types are generated from these.
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
	/* The socket released its port. */
	EVENT_CLOSE = 4,
	/* The socket got a peer and serves nobody else. */
	EVENT_CONNECT = 5,
	/* The socket is about to get a peer; a dump a moment later shows whether it did. */
	EVENT_CHECK = 6,
	/* The socket was bound to another interface, or to none. */
	EVENT_DEVICE = 7,
	/* A process of `owners` gets a name, maybe as it executes another program. */
	EVENT_RENAME = 8,
};

/* How many bits of event.group are the id. The kernel uses few of the upper 32 bits of one. */
enum group {
	GROUP_BITS = 48,
};

/*
 * One record of the ring buffer. EVENT_CLOSE, EVENT_CONNECT and EVENT_CHECK have
 * only observed, cookie, kind and protocol, EVENT_DEVICE also device; EVENT_RENAME has only
 * observed, kind, protocol (TCP, so that it does not wait), pid and comm; the rest is 0.
 * Addresses are in network byte order, all else in the host's.
 */
struct event {
	__u64 observed; /* CLOCK_MONOTONIC, ns */
	__u64 cookie;	/* 0: the kernel has not made one yet */
	__u64 cgroup;	/* id of the socket's cgroup2 directory, 0 if unknown */
	/*
	 * Id of the process's directory in a hierarchy of cgroup v1, with the number that
	 * this has in /proc/PID/cgroup above GROUP_BITS; 1 if it is in the roots, 0 if unknown.
	 */
	__u64 group;
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
	__u8 comm[16];	  /* of the first thread of the process that caused the event */
};
_Static_assert(sizeof(struct event) == 96, "event is the ABI with the agent");
_Static_assert(20000 * (sizeof(struct event) + 8) <= 2 << 20, "10,000 listeners must fit the ring");
_Static_assert(__builtin_offsetof(struct event, address) == 64, "no hidden padding");

/*
 * One page of memory shared with the agent.
 *
 * Most of the cost of an event is the wake-up, so there is one only when the agent
 * sleeps. The agent sets asleep, checks the ring once more, and then waits. A
 * program that finds asleep set clears it and wakes the agent; one that does not
 * checks again after its record is committed. Commit is a full barrier (xchg), and
 * so is the agent's store, so at least one of the two sees the other.
 *
 * Hundreds of UDP sockets can come and go each second without end. Then the agent
 * sleeps for a tenth of a second at a time, and only TCP wakes it before.
 */
enum sleep {
	SLEEP_AWAKE = 0,
	SLEEP_ANY = 1, /* any event wakes the agent */
	SLEEP_TCP = 2, /* only events of TCP do */
};

struct control {
	__u32 asleep; /* enum sleep */
	/*
	 * Stop hooks report only sockets in `tracked`, unless open is set: during
	 * a dump, whose rows are not tracked yet, and when the map is full.
	 */
	__u32 open;
	__u32 lost;  /* a record was lost since the agent cleared this */
	__u32 bound; /* bound TCP sockets are observed */
};
_Static_assert(sizeof(struct control) == 16, "control is the ABI with the agent");

#endif
