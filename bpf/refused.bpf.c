// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Hooks that report when a process is refused a port that the agent holds with a
 * placeholder. The cgroup hooks report each attempt, which will be refused while
 * the placeholder exists.
 *
 * A report that finds no room is dropped: the process will try again.
 */
#include "sock.h"

/* The ports of placeholders, as bits. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536 / 32);
	__type(key, __u32);
	__type(value, __u32);
} placeholders SEC(".maps");

static __always_inline bool placeholder(__u16 port)
{
	__u32 word = port / 32;
	__u32 *bits = bpf_map_lookup_elem(&placeholders, &word);

	return bits && *bits & 1U << port % 32;
}

/* MPTCP has a protocol of its own, but its ports are TCP's. */
#define IPPROTO_MPTCP 262

static __always_inline __u8 port_protocol(struct sock *sk)
{
	__u16 protocol = BPF_CORE_READ(sk, sk_protocol);

	return protocol == IPPROTO_MPTCP ? IPPROTO_TCP : protocol;
}

static __always_inline struct event *describe_attempt(struct sock *sk, __u16 port, __u64 cookie)
{
	struct event *e;

	if (!sk || !placeholder(port) || sock_netns(sk, false) != network_namespace)
		return NULL;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return NULL;
	begin(e, port_protocol(sk), EVENT_BIND, cookie);
	e->port = port;
	describe_probed(e, sk);
	return e;
}

/* The socket already has the address; it is removed after the refusal. */
static __always_inline int refused(struct sock *sk, __u16 port, int ret)
{
	struct event *e;

	if (!ret)
		return 0;
	e = describe_attempt(sk, port, sock_cookie(sk));
	if (e)
		bpf_ringbuf_submit(e, 0);
	return 0;
}

SEC("fexit/inet_csk_get_port")
int BPF_PROG(tcp_refused, struct sock *sk, unsigned short port, int ret)
{
	return refused(sk, port, ret);
}

SEC("fexit/udp_lib_get_port")
int BPF_PROG(udp_refused, struct sock *sk, unsigned short port, unsigned int hash, int ret)
{
	return refused(sk, port, ret);
}

/* cgroup: before the socket is bound ----------------------------------------- */

static __always_inline int attempt(struct bpf_sock_addr *view, bool six)
{
	__u16 port = bpf_ntohs(view->user_port);
	struct bpf_sock *peek = view->sk;
	struct sock *sk = NULL;
	struct event *e;
	__u64 cookie;

	if (!peek || !placeholder(port))
		return 1;
	cookie = bpf_get_socket_cookie(view);
	bpf_probe_read_kernel(&sk, sizeof(sk), &peek);
	e = describe_attempt(sk, port, cookie);
	if (!e)
		return 1;
	if (six) {
		__u32 *to = (void *)e->address;

		to[0] = view->user_ip6[0];
		to[1] = view->user_ip6[1];
		to[2] = view->user_ip6[2];
		to[3] = view->user_ip6[3];
	} else {
		*(__u32 *)e->address = view->user_ip4;
	}
	bpf_ringbuf_submit(e, 0);
	return 1;
}

SEC("cgroup/bind4")
int bind4_attempt(struct bpf_sock_addr *view)
{
	return attempt(view, false);
}

SEC("cgroup/bind6")
int bind6_attempt(struct bpf_sock_addr *view)
{
	return attempt(view, true);
}
