/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Maps and helpers of the objects for sockets, which share their maps. */
#ifndef FAIRLEAD_SOCK_H
#define FAIRLEAD_SOCK_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_tracing.h>
#include "event.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* The agent sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 21);
} events SEC(".maps");

/* Cookies of the sockets whose end is reported: bound UDP, bound TCP. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u8);
} tracked SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct control);
} controls SEC(".maps");

/* Records that found the ring full, by CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} losses SEC(".maps");

/* Inode number of the network namespace that is observed. */
const volatile __u32 network_namespace;

/* The agent's pid namespace; 0 if that is the initial one. */
const volatile __u32 pid_namespace;

/* Controllers have hierarchies of cgroup v1. */
const volatile bool cgroup_v1;

static __always_inline volatile struct control *control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&controls, &zero);
}

/*
 * Most sockets that the hooks see are not observed, so that check is cheap:
 * programs that know the type of sk (trusted) read it with plain loads, the others
 * with probes. A plain load of a pointer costs the verifier a millisecond or more
 * on each path to it: only sock_netns has one.
 */
#define sock_read(trusted, sk, field) ((trusted) ? (sk)->field : BPF_CORE_READ(sk, field))

static __always_inline __u32 sock_netns(struct sock *sk, bool trusted)
{
	return trusted ? sk->__sk_common.skc_net.net->ns.inum
		       : BPF_CORE_READ(sk, __sk_common.skc_net.net, ns.inum);
}

/* Reports whether sk is of this protocol and in the observed namespace. */
static __always_inline bool observed(struct sock *sk, __u16 protocol, bool trusted)
{
	/* Not a byte: MPTCP is 262. */
	return sock_read(trusted, sk, sk_protocol) == protocol &&
	       sock_netns(sk, trusted) == network_namespace;
}

static __always_inline __u16 sock_port(struct sock *sk)
{
	return BPF_CORE_READ(sk, __sk_common.skc_num);
}

static __always_inline __u8 sock_state(struct sock *sk)
{
	return BPF_CORE_READ(sk, __sk_common.skc_state);
}

/* The cookie, or 0 if the kernel has made none: kprobe programs cannot make one. */
static __always_inline __u64 sock_cookie(struct sock *sk)
{
	return BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);
}

static __always_inline __u32 sock_inode(struct sock *sk)
{
	struct socket *socket = BPF_CORE_READ(sk, sk_socket);
	struct socket_alloc *alloc;

	if (!socket)
		return 0;
	alloc = (void *)socket - bpf_core_field_offset(struct socket_alloc, socket);
	return BPF_CORE_READ(alloc, vfs_inode.i_ino);
}

/*
 * The thread group id of a task in the agent's pid namespace, 0 if it has none there. The
 * helper bpf_get_ns_current_pid_tgid knows only tasks directly in the namespace, not those
 * of containers below it.
 */
static __noinline __u32 task_pid(struct task_struct *task)
{
	struct pid *pid;
	void *numbers;
	__u32 level;

	if (!pid_namespace)
		return BPF_CORE_READ(task, tgid);
	pid = BPF_CORE_READ(task, group_leader, thread_pid);
	level = BPF_CORE_READ(pid, level);
	numbers = (void *)pid + bpf_core_field_offset(struct pid, numbers);
#pragma unroll
	for (int i = 0; i < 8; i++) {
		struct upid *upid = numbers + i * bpf_core_type_size(struct upid);

		if (i > level)
			break;
		if (BPF_CORE_READ(upid, ns, ns.inum) == pid_namespace)
			return BPF_CORE_READ(upid, nr);
	}
	return 0;
}

/* A cgroup of cgroup v1. */
struct v1_group {
	__u64 id;
	__u32 hierarchy; /* 0: none */
	__u32 hash;	 /* of the name */
	int level;	 /* 0: a root */
};

/* Reads the cgroup of a controller, whose number is -1 if the kernel has none. */
static __always_inline struct v1_group controller_group(struct css_set *set, int controller)
{
	struct cgroup_subsys_state *state = NULL;
	struct cgroup *cgroup;
	struct v1_group g = {};

	if (controller < 0)
		return g;
	bpf_probe_read_kernel(&state, sizeof(state), (void *)set +
			      bpf_core_field_offset(struct css_set, subsys) + controller * sizeof(state));
	cgroup = BPF_CORE_READ(state, cgroup);
	g.hierarchy = BPF_CORE_READ(cgroup, root, hierarchy_id);
	if (!g.hierarchy)
		return g;
	g.level = BPF_CORE_READ(cgroup, level);
	if (!g.level)
		return g;
	g.id = BPF_CORE_READ(cgroup, kn, id);
	g.hash = BPF_CORE_READ(cgroup, kn, hash);
	return g;
}

#define controller_number(name)                                          \
	(bpf_core_enum_value_exists(enum cgroup_subsys_id, name) ?       \
		 bpf_core_enum_value(enum cgroup_subsys_id, name) : -1)

/*
 * Finds the cgroup of the process in the hierarchies of cgroup v1, as /proc/PID/cgroup has it:
 * that of the first thread. Engines give a container the same path in all hierarchies, so that
 * two are enough; if they differ by their depth or the name, it is unknown. A root does not
 * count if the other is none. Returns what event.group has.
 *
 * Not static: the verifier checks it once, not on each path to it.
 */
__noinline __u64 process_group(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct v1_group memory, pids;
	struct css_set *set;

	if (!cgroup_v1)
		return 0;
	set = BPF_CORE_READ(task, group_leader, cgroups);
	memory = controller_group(set, controller_number(memory_cgrp_id));
	pids = controller_group(set, controller_number(pids_cgrp_id));
	if (memory.level && pids.level && (memory.level != pids.level || memory.hash != pids.hash))
		return 0;
	if (!memory.level)
		memory = pids.level || !memory.hierarchy ? pids : memory;
	if (!memory.hierarchy || memory.id >> GROUP_BITS)
		return 0;
	return memory.level ? (__u64)memory.hierarchy << GROUP_BITS | memory.id : 1;
}

static __always_inline void describe(struct event *e, struct sock *sk, bool trusted)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	e->cgroup = 0;
	if (bpf_core_field_exists(sk->sk_cgrp_data.cgroup))
		e->cgroup = BPF_CORE_READ(sk, sk_cgrp_data.cgroup, kn, id);
	e->group = cgroup_v1 ? process_group() : 0;
	e->netns = network_namespace;
	e->pid = task_pid(task);
	e->uid = sock_read(trusted, sk, sk_uid.val);
	e->inode = sock_inode(sk);
	e->device = sock_read(trusted, sk, __sk_common.skc_bound_dev_if);
	e->family = sock_read(trusted, sk, __sk_common.skc_family);
	e->state = sock_read(trusted, sk, __sk_common.skc_state);
	e->v6only = 0;
	__builtin_memset(e->address, 0, sizeof(e->address));
	if (e->family == AF_INET6) {
		e->v6only = BPF_CORE_READ_BITFIELD_PROBED(sk, __sk_common.skc_ipv6only);
		if (bpf_core_field_exists(sk->__sk_common.skc_v6_rcv_saddr))
			bpf_core_read(e->address, 16, &sk->__sk_common.skc_v6_rcv_saddr);
	} else {
		*(__be32 *)e->address = sock_read(trusted, sk, __sk_common.skc_rcv_saddr);
	}
	task = BPF_CORE_READ(task, group_leader);
	bpf_core_read(e->comm, sizeof(e->comm), &task->comm);
}

static __noinline __attribute__((unused)) void describe_trusted(struct event *e, struct sock *sk)
{
	describe(e, sk, true);
}

static __noinline __attribute__((unused)) void describe_probed(struct event *e, struct sock *sk)
{
	describe(e, sk, false);
}

static __always_inline void lose(volatile struct control *c)
{
	__u32 zero = 0;
	__u64 *count = bpf_map_lookup_elem(&losses, &zero);

	if (count)
		__sync_fetch_and_add(count, 1);
	c->lost = 1;
}

/* Reports whether an event of this protocol must wake the agent. */
static __always_inline bool asleep(volatile struct control *c, __u8 protocol)
{
	__u32 sleep = c->asleep;

	return sleep == SLEEP_ANY || (sleep == SLEEP_TCP && protocol == IPPROTO_TCP);
}

static __always_inline void submit(struct event *e, volatile struct control *c)
{
	__u8 protocol = e->protocol;
	void *wake;

	if (asleep(c, protocol)) {
		c->asleep = SLEEP_AWAKE;
		bpf_ringbuf_submit(e, BPF_RB_FORCE_WAKEUP);
		return;
	}
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	if (!asleep(c, protocol))
		return;
	/* The agent went to sleep before it could see this record. Only another can wake it. */
	wake = bpf_ringbuf_reserve(&events, 8, 0);
	if (wake)
		bpf_ringbuf_discard(wake, BPF_RB_FORCE_WAKEUP);
}

/* Writes what every event has; the rest is not written. */
static __always_inline void begin(struct event *e, __u8 protocol, __u8 kind, __u64 cookie)
{
	e->observed = bpf_ktime_get_ns();
	e->cookie = cookie;
	e->kind = kind;
	e->protocol = protocol;
	__builtin_memset(e->padding, 0, sizeof(e->padding));
}

/* Reports an event with all fields. The caller has checked the socket's namespace. */
static __always_inline void report(struct sock *sk, __u8 protocol, __u8 kind, __u64 cookie,
				   __u16 port, volatile struct control *c, bool trusted)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e) {
		lose(c);
		return;
	}
	begin(e, protocol, kind, cookie);
	e->port = port;
	if (trusted)
		describe_trusted(e, sk);
	else
		describe_probed(e, sk);
	submit(e, c);
}

/* Reports an event with the cookie alone, of a socket that the agent knows. */
static __always_inline void mention(__u8 protocol, __u8 kind, __u64 cookie,
				    volatile struct control *c)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e) {
		lose(c);
		return;
	}
	__builtin_memset(e, 0, sizeof(*e));
	begin(e, protocol, kind, cookie);
	submit(e, c);
}

static __always_inline void track(__u64 cookie, volatile struct control *c)
{
	__u8 one = 1;

	/* No room: report the end of all sockets. */
	if (cookie && bpf_map_update_elem(&tracked, &cookie, &one, BPF_ANY))
		c->open = 1;
}

/* Reports whether the end of this socket must be reported, and forgets it. */
static __always_inline bool untrack(__u64 cookie, volatile struct control *c)
{
	/* First: the agent tracks the sockets of a dump before it clears open. */
	__u32 open = c->open;

	return cookie && (!bpf_map_delete_elem(&tracked, &cookie) || open);
}

/* bind(2) succeeded. */
static __always_inline void bound(struct sock *sk, __u8 protocol, __u64 cookie, bool trusted)
{
	volatile struct control *c = control();
	__u16 port = sock_port(sk);

	/* IP_BIND_ADDRESS_NO_PORT: the port comes with connect(2), for a client. */
	if (!c || !port)
		return;
	track(cookie, c);
	report(sk, protocol, EVENT_BIND, cookie, port, c, trusted);
}

/* The socket is about to release its port, or has got a peer. */
static __always_inline void ended(__u8 protocol, __u8 kind, __u64 cookie)
{
	volatile struct control *c = control();

	if (c && untrack(cookie, c))
		mention(protocol, kind, cookie, c);
}

/*
 * connect(2) with AF_UNSPEC succeeded. The socket keeps its port if bind(2) named
 * one, and serves again.
 */
static __always_inline __attribute__((unused)) void unpeered(struct sock *sk, __u64 cookie, bool trusted)
{
	if (sock_state(sk) == TCP_CLOSE)
		bound(sk, IPPROTO_UDP, cookie, trusted);
}

/* The socket was bound to an interface, or to none, after it was bound to a port. */
static __always_inline __attribute__((unused)) void moved(struct sock *sk, __u8 protocol)
{
	volatile struct control *c = control();
	__u64 cookie = sock_cookie(sk);
	struct event *e;

	if (!c || !cookie || !sock_port(sk))
		return;
	if (sock_state(sk) != TCP_LISTEN && !c->open && !bpf_map_lookup_elem(&tracked, &cookie))
		return;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		lose(c);
		return;
	}
	__builtin_memset(e, 0, sizeof(*e));
	begin(e, protocol, EVENT_DEVICE, cookie);
	e->device = BPF_CORE_READ(sk, __sk_common.skc_bound_dev_if);
	submit(e, c);
}

#endif
