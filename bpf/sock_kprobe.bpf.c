// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The same hooks as kprobes, for kernels without BPF trampolines. They read
 * registers, so this file is built for each architecture. They cannot make a
 * socket's cookie: for an event without one the agent dumps.
 */
#include "sock.h"

/* Sockets in a bind or connect call of a thread, until it returns. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u64);
} calls SEC(".maps");

static __always_inline void call_entered(struct sock *sk, __u16 protocol)
{
	__u64 thread = bpf_get_current_pid_tgid();
	__u64 value = (__u64)sk;

	if (sk && observed(sk, protocol, false))
		bpf_map_update_elem(&calls, &thread, &value, BPF_ANY);
}

/* Calls may nest (an IPv6 connect makes an IPv4 one), but only of one protocol. */
static __always_inline struct sock *call_returned(int ret, __u16 protocol)
{
	__u64 thread = bpf_get_current_pid_tgid();
	__u64 *value = bpf_map_lookup_elem(&calls, &thread);
	struct sock *sk;

	if (!value)
		return NULL;
	sk = (struct sock *)*value;
	if (BPF_CORE_READ(sk, sk_protocol) != protocol)
		return NULL;
	bpf_map_delete_elem(&calls, &thread);
	return ret ? NULL : sk;
}

/* TCP: listen. tcp_state_stop has made the cookie. --------------------------- */

static __always_inline int hashed(struct sock *sk)
{
	volatile struct control *c;

	if (sock_state(sk) != TCP_LISTEN || !observed(sk, IPPROTO_TCP, false))
		return 0;
	c = control();
	if (c)
		report(sk, IPPROTO_TCP, EVENT_LISTEN, sock_cookie(sk), sock_port(sk), c, false);
	return 0;
}

SEC("kprobe/inet_hash")
int BPF_KPROBE(tcp_inet_hash, struct sock *sk)
{
	return hashed(sk);
}

SEC("kprobe/inet6_hash")
int BPF_KPROBE(tcp_inet6_hash, struct sock *sk)
{
	return hashed(sk);
}

/* bind -------------------------------------------------------------------- */

static __always_inline int bind_entered(struct socket *socket, __u16 protocol)
{
	call_entered(BPF_CORE_READ(socket, sk), protocol);
	return 0;
}

static __always_inline int bind_returned(int ret, __u16 protocol)
{
	struct sock *sk = call_returned(ret, protocol);

	if (sk)
		bound(sk, protocol, sock_cookie(sk), false);
	return 0;
}

SEC("kprobe/inet_bind")
int BPF_KPROBE(tcp_bind4_enter, struct socket *socket)
{
	return bind_entered(socket, IPPROTO_TCP);
}

SEC("kretprobe/inet_bind")
int BPF_KRETPROBE(tcp_bind4_exit, int ret)
{
	return bind_returned(ret, IPPROTO_TCP);
}

SEC("kprobe/inet6_bind")
int BPF_KPROBE(tcp_bind6_enter, struct socket *socket)
{
	return bind_entered(socket, IPPROTO_TCP);
}

SEC("kretprobe/inet6_bind")
int BPF_KRETPROBE(tcp_bind6_exit, int ret)
{
	return bind_returned(ret, IPPROTO_TCP);
}

SEC("kprobe/inet_bind")
int BPF_KPROBE(udp_bind4_enter, struct socket *socket)
{
	return bind_entered(socket, IPPROTO_UDP);
}

SEC("kretprobe/inet_bind")
int BPF_KRETPROBE(udp_bind4_exit, int ret)
{
	return bind_returned(ret, IPPROTO_UDP);
}

SEC("kprobe/inet6_bind")
int BPF_KPROBE(udp_bind6_enter, struct socket *socket)
{
	return bind_entered(socket, IPPROTO_UDP);
}

SEC("kretprobe/inet6_bind")
int BPF_KRETPROBE(udp_bind6_exit, int ret)
{
	return bind_returned(ret, IPPROTO_UDP);
}

/* UDP: end and connect ------------------------------------------------------ */

SEC("kprobe/udp_lib_unhash")
int BPF_KPROBE(udp_unhash_kp, struct sock *sk)
{
	if (sock_port(sk) && observed(sk, IPPROTO_UDP, false))
		ended(IPPROTO_UDP, EVENT_CLOSE, sock_cookie(sk));
	return 0;
}

static __always_inline int connect_returned(int ret)
{
	struct sock *sk = call_returned(ret, IPPROTO_UDP);

	if (sk)
		ended(IPPROTO_UDP, EVENT_CONNECT, sock_cookie(sk));
	return 0;
}

SEC("kprobe/__ip4_datagram_connect")
int BPF_KPROBE(udp_conn4_enter, struct sock *sk)
{
	call_entered(sk, IPPROTO_UDP);
	return 0;
}

SEC("kretprobe/__ip4_datagram_connect")
int BPF_KRETPROBE(udp_conn4_exit, int ret)
{
	return connect_returned(ret);
}

SEC("kprobe/__ip6_datagram_connect")
int BPF_KPROBE(udp_conn6_enter, struct sock *sk)
{
	call_entered(sk, IPPROTO_UDP);
	return 0;
}

SEC("kretprobe/__ip6_datagram_connect")
int BPF_KRETPROBE(udp_conn6_exit, int ret)
{
	return connect_returned(ret);
}

SEC("kprobe/udp_disconnect")
int BPF_KPROBE(udp_unpeered_enter, struct sock *sk)
{
	call_entered(sk, IPPROTO_UDP);
	return 0;
}

SEC("kretprobe/udp_disconnect")
int BPF_KRETPROBE(udp_unpeered_exit, int ret)
{
	struct sock *sk = call_returned(ret, IPPROTO_UDP);

	if (sk)
		unpeered(sk, sock_cookie(sk), false);
	return 0;
}

/* Interface ---------------------------------------------------------------- */

SEC("kprobe/sock_bindtoindex_locked")
int BPF_KPROBE(bind_device_enter, struct sock *sk)
{
	call_entered(sk, IPPROTO_TCP);
	call_entered(sk, IPPROTO_UDP);
	return 0;
}

SEC("kretprobe/sock_bindtoindex_locked")
int BPF_KRETPROBE(bind_device_exit, int ret)
{
	struct sock *sk = call_returned(ret, IPPROTO_TCP);

	if (sk) {
		moved(sk, IPPROTO_TCP);
		return 0;
	}
	sk = call_returned(ret, IPPROTO_UDP);
	if (sk)
		moved(sk, IPPROTO_UDP);
	return 0;
}
