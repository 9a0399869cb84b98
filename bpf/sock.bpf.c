// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Hooks that report when a socket starts and stops to serve a port: those that
 * read no registers, so that one object serves every little-endian machine. The
 * agent loads the programs of one method at a time (internal/guest/observer).
 */
#include "sock.h"

/* Puts these types into the object, from which Go types are generated. */
struct event *unused_event __attribute__((unused));
enum event_kind *unused_kind __attribute__((unused));
enum sleep *unused_sleep __attribute__((unused));
enum group *unused_group __attribute__((unused));

/* TCP: listen ------------------------------------------------------------- */

/*
 * Reports whether a listener that stops is being closed, not only shut down.
 * close(2) has set both bits by now; shutdown(2) clears them. The listener of an
 * MPTCP socket gets its bits a moment later. Until then those of its parent, which a
 * process holds, are set, or it has no parent any more.
 */
static __always_inline bool closing(struct sock *sk)
{
	const __u8 both = RCV_SHUTDOWN | SEND_SHUTDOWN;
	struct sock *held;

	if (sk->sk_shutdown == both)
		return true;
	held = BPF_CORE_READ(sk, sk_socket, sk);
	return !held || BPF_CORE_READ(held, sk_shutdown) == both;
}

/*
 * Every change of state of a TCP socket, and for MPTCP of its parent, whose
 * protocol is not TCP. accept emits LISTEN to SYN_RECV, on some kernels with the
 * listener's own cookie.
 */
static __always_inline int state_changed(struct sock *sk, int from, int to, bool start)
{
	volatile struct control *c;
	__u64 cookie;
	__u16 port;

	if (!observed(sk, IPPROTO_TCP, true))
		return 0;
	if (to == TCP_LISTEN) {
		if (from == TCP_LISTEN)
			return 0;
		/* Makes the cookie, for hooks that can only read it. */
		cookie = bpf_get_socket_cookie(sk);
		if (!start)
			return 0;
		c = control();
		/* Without a bind before, the port is chosen later and is 0 here. */
		if (c)
			report(sk, IPPROTO_TCP, EVENT_LISTEN, cookie, sock_port(sk), c, true);
		return 0;
	}
	if (from == TCP_LISTEN) {
		if (to != TCP_CLOSE)
			return 0;
		c = control();
		if (!c)
			return 0;
		cookie = bpf_get_socket_cookie(sk);
		port = sk->__sk_common.skc_num;
		/* shutdown(2) keeps a port that was bound. */
		if (port && !closing(sk)) {
			if (c->bound)
				track(cookie, c);
			report(sk, IPPROTO_TCP, EVENT_UNLISTEN, cookie, port, c, true);
			return 0;
		}
		untrack(cookie, c);
		mention(IPPROTO_TCP, EVENT_CLOSE, cookie, c);
		return 0;
	}
	/* connect(2) of a bound socket. An unbound one has no port yet. */
	if (from == TCP_CLOSE && to == TCP_SYN_SENT && sk->__sk_common.skc_num)
		ended(IPPROTO_TCP, EVENT_CONNECT, sock_cookie(sk));
	return 0;
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(tcp_state_stop, struct sock *sk, int from, int to)
{
	return state_changed(sk, from, to, false);
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(tcp_state, struct sock *sk, int from, int to)
{
	return state_changed(sk, from, to, true);
}

/* The arguments after sk, and so the position of the return value, differ between kernels. */
SEC("fexit/inet_csk_listen_start")
int BPF_PROG(tcp_listen_start, struct sock *sk)
{
	volatile struct control *c;

	if (sk->__sk_common.skc_state != TCP_LISTEN || !observed(sk, IPPROTO_TCP, true))
		return 0;
	c = control();
	if (c)
		report(sk, IPPROTO_TCP, EVENT_LISTEN, bpf_get_socket_cookie(sk), sock_port(sk), c, true);
	return 0;
}

/* bind: fexit ------------------------------------------------------------- */

static __always_inline int bind_returned(struct socket *socket, int ret, __u16 protocol)
{
	struct sock *sk = socket->sk;

	if (ret || !sk || !observed(sk, protocol, true))
		return 0;
	bound(sk, protocol, bpf_get_socket_cookie(sk), true);
	return 0;
}

SEC("fexit/inet_bind")
int BPF_PROG(tcp_inet_bind, struct socket *socket, void *address, int length, int ret)
{
	return bind_returned(socket, ret, IPPROTO_TCP);
}

SEC("fexit/inet6_bind")
int BPF_PROG(tcp_inet6_bind, struct socket *socket, void *address, int length, int ret)
{
	return bind_returned(socket, ret, IPPROTO_TCP);
}

SEC("fexit/inet_bind")
int BPF_PROG(udp_inet_bind, struct socket *socket, void *address, int length, int ret)
{
	return bind_returned(socket, ret, IPPROTO_UDP);
}

SEC("fexit/inet6_bind")
int BPF_PROG(udp_inet6_bind, struct socket *socket, void *address, int length, int ret)
{
	return bind_returned(socket, ret, IPPROTO_UDP);
}

/* bind: cgroup ------------------------------------------------------------ */

/*
 * The verifier gives a cgroup program only the fields of struct bpf_sock, but the
 * context is the socket itself, and it is read by probes, which cannot fault. The
 * two fields that both views have are compared, so that a kernel where this does
 * not hold reports nothing wrong. Returns NULL also for a socket of a namespace that
 * is not observed.
 */
static __always_inline struct sock *cgroup_sock(struct bpf_sock *view)
{
	struct sock *sk = NULL;

	bpf_probe_read_kernel(&sk, sizeof(sk), &view);
	if (sock_netns(sk, false) != network_namespace)
		return NULL; /* most sockets */
	if (BPF_CORE_READ(sk, __sk_common.skc_family) != view->family ||
	    BPF_CORE_READ(sk, sk_protocol) != view->protocol)
		return NULL;
	return sk;
}

static __always_inline int post_bind(struct bpf_sock *view, __u32 protocol)
{
	struct sock *sk;

	if (view->protocol != protocol)
		return 1;
	sk = cgroup_sock(view);
	if (sk)
		bound(sk, protocol, bpf_get_socket_cookie(view), false);
	return 1;
}

SEC("cgroup/post_bind4")
int tcp_post_bind4(struct bpf_sock *view)
{
	return post_bind(view, IPPROTO_TCP);
}

SEC("cgroup/post_bind6")
int tcp_post_bind6(struct bpf_sock *view)
{
	return post_bind(view, IPPROTO_TCP);
}

SEC("cgroup/post_bind4")
int udp_post_bind4(struct bpf_sock *view)
{
	return post_bind(view, IPPROTO_UDP);
}

SEC("cgroup/post_bind6")
int udp_post_bind6(struct bpf_sock *view)
{
	return post_bind(view, IPPROTO_UDP);
}

/* TCP: the end of a socket that is bound and does not listen ---------------- */

/* The last moment of every TCP socket, before it releases its port. */
SEC("tp_btf/tcp_destroy_sock")
int BPF_PROG(tcp_destroy, struct sock *sk)
{
	if (sk->__sk_common.skc_num && observed(sk, IPPROTO_TCP, true))
		ended(IPPROTO_TCP, EVENT_CLOSE, sock_cookie(sk));
	return 0;
}

/* UDP: the end ------------------------------------------------------------ */

SEC("fentry/udp_lib_unhash")
int BPF_PROG(udp_unhash, struct sock *sk)
{
	if (sk->__sk_common.skc_num && observed(sk, IPPROTO_UDP, true))
		ended(IPPROTO_UDP, EVENT_CLOSE, sock_cookie(sk));
	return 0;
}

SEC("cgroup/sock_release")
int udp_release(struct bpf_sock *view)
{
	struct sock *sk;

	if (view->protocol != IPPROTO_UDP)
		return 1;
	sk = cgroup_sock(view);
	if (sk && sock_port(sk))
		ended(IPPROTO_UDP, EVENT_CLOSE, sock_cookie(sk));
	return 1;
}

/* UDP: connect ------------------------------------------------------------ */

static __always_inline int datagram_connected(struct sock *sk, int ret)
{
	if (!ret && observed(sk, IPPROTO_UDP, true))
		ended(IPPROTO_UDP, EVENT_CONNECT, sock_cookie(sk));
	return 0;
}

SEC("fexit/__ip4_datagram_connect")
int BPF_PROG(udp_connect4, struct sock *sk, void *address, int length, int ret)
{
	return datagram_connected(sk, ret);
}

SEC("fexit/__ip6_datagram_connect")
int BPF_PROG(udp_connect6, struct sock *sk, void *address, int length, int ret)
{
	return datagram_connected(sk, ret);
}

SEC("fexit/udp_disconnect")
int BPF_PROG(udp_unpeered, struct sock *sk, int flags, int ret)
{
	if (!ret && observed(sk, IPPROTO_UDP, true))
		unpeered(sk, bpf_get_socket_cookie(sk), true);
	return 0;
}

/* Runs before the socket is connected, which may yet fail. */
static __always_inline int datagram_connecting(struct bpf_sock_addr *view)
{
	struct bpf_sock *peek = view->sk;
	volatile struct control *c;
	struct sock *sk = NULL;
	__u64 cookie;

	if (view->protocol != IPPROTO_UDP || !peek)
		return 1;
	bpf_probe_read_kernel(&sk, sizeof(sk), &peek);
	if (!observed(sk, IPPROTO_UDP, false))
		return 1;
	cookie = sock_cookie(sk);
	c = control();
	if (c && cookie && (c->open || bpf_map_lookup_elem(&tracked, &cookie)))
		mention(IPPROTO_UDP, EVENT_CHECK, cookie, c);
	return 1;
}

SEC("cgroup/connect4")
int udp_connecting4(struct bpf_sock_addr *view)
{
	return datagram_connecting(view);
}

SEC("cgroup/connect6")
int udp_connecting6(struct bpf_sock_addr *view)
{
	return datagram_connecting(view);
}

/* Interface ---------------------------------------------------------------- */

SEC("fexit/sock_bindtoindex_locked")
int BPF_PROG(bind_device, struct sock *sk, int index, int ret)
{
	if (ret)
		return 0;
	if (observed(sk, IPPROTO_TCP, true))
		moved(sk, IPPROTO_TCP);
	else if (observed(sk, IPPROTO_UDP, true))
		moved(sk, IPPROTO_UDP);
	return 0;
}

/* Owners ------------------------------------------------------------------- */

/* Processes that have sockets, by their number in the agent's pid namespace. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u8);
} owners SEC(".maps");

/*
 * A task is about to get a name: by prctl(2), by a write to /proc, which may be another
 * thread's, or by execve(2), also the name that it has. That has closed by now what it closes
 * (begin_new_exec of Linux 5.10). A process has the name of its first thread.
 */
SEC("tp_btf/task_rename")
int BPF_PROG(process_renamed, struct task_struct *task, const char *comm)
{
	volatile struct control *c = control();
	struct event *e;
	__u32 pid;

	if (!c || task->pid != task->tgid)
		return 0;
	pid = task_pid(task);
	if (!bpf_map_lookup_elem(&owners, &pid))
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		lose(c);
		return 0;
	}
	__builtin_memset(e, 0, sizeof(*e));
	begin(e, IPPROTO_TCP, EVENT_RENAME, 0);
	e->pid = pid;
	bpf_probe_read_kernel_str(e->comm, sizeof(e->comm), comm);
	submit(e, c);
	return 0;
}

/* UDP: dump --------------------------------------------------------------- */

/*
 * Cookies of the UDP sockets that were bound to an address or a port. A socket
 * diag dump does not distinguish them from clients that got a port with their
 * first datagram.
 */
SEC("iter/udp")
int udp_explicit(struct bpf_iter__udp *it)
{
	struct udp_sock *udp = it->udp_sk; /* loaded once: the NULL check holds for one load */
	struct sock *sk = (struct sock *)udp;
	__u64 cookie;

	if (!udp || sock_state(sk) != TCP_CLOSE)
		return 0;
	if (!(BPF_CORE_READ_BITFIELD_PROBED(sk, sk_userlocks) &
	      (SOCK_BINDADDR_LOCK | SOCK_BINDPORT_LOCK)))
		return 0;
	cookie = bpf_get_socket_cookie(udp);
	bpf_seq_write(it->meta->seq, &cookie, sizeof(cookie));
	return 0;
}
