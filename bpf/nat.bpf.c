// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Hooks that report when a legacy iptables table of the observed network namespace
 * was replaced. nftables reports that itself, by netlink; legacy tables do not.
 *
 * A record says only when: the agent then reads the table. So a record that finds
 * no room is no loss, because another one is still unread.
 */
#include "kernel.h"

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Inode of the network namespace whose tables are observed. */
const volatile __u32 observed_netns = 0;

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} replacements SEC(".maps");

/* Threads that are about to replace a table, from enter to exit of setsockopt(2). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 256);
	__type(key, __u64);
	__type(value, __u8);
} replacing SEC(".maps");

struct nsproxy {
	struct net *net_ns;
} __attribute__((preserve_access_index));

struct task_struct___nat {
	struct nsproxy *nsproxy;
} __attribute__((preserve_access_index));

/* Takes the caller's namespace for the table's, although a caller may hold a socket
 * of another namespace. */
static __always_inline bool observed_task(void)
{
	struct task_struct___nat *task = (void *)bpf_get_current_task();

	return BPF_CORE_READ(task, nsproxy, net_ns, ns.inum) == observed_netns;
}

static __always_inline int report(void)
{
	__u64 now = bpf_ktime_get_ns();

	bpf_ringbuf_output(&replacements, &now, sizeof(now), 0);
	return 0;
}

static __always_inline int replaced(void)
{
	return observed_task() ? report() : 0;
}

#define SOL_IP 0
#define SOL_IPV6 41
#define IPT_SO_SET_REPLACE 64 /* and IP6T_SO_SET_REPLACE */

/*
 * All legacy tables are replaced through this function, which is not in a module. So
 * it can be attached to before there is a table, and with CAP_BPF and CAP_PERFMON: for
 * the functions of modules the kernel demands CAP_SYS_ADMIN, and so do distributions
 * for perf_event_open(2), by kernel.perf_event_paranoid=3 or 4.
 *
 * An argument takes two places. Kernels before 6.1 do not attach to such functions.
 */
SEC("fexit/nf_setsockopt")
int legacy_option(unsigned long long *ctx)
{
	struct sock *sk = (void *)ctx[0];
	__u8 family = ctx[1];
	int option = ctx[2], result = ctx[6]; /* ctx[3], ctx[4]: sockptr_t, ctx[5]: length */

	if (option != IPT_SO_SET_REPLACE || (family != AF_INET && family != AF_INET6) || result)
		return 0;
	if (BPF_CORE_READ(sk, __sk_common.skc_net.net, ns.inum) != observed_netns)
		return 0;
	return report();
}

/* The table's lock is held until after these, so a reader waits for the new table. */
SEC("fexit/xt_replace_table")
int legacy_fexit(void *ctx)
{
	return replaced();
}

SEC("kprobe/xt_replace_table")
int legacy_kprobe(void *ctx)
{
	return replaced();
}

/* UAPI layout of the tracepoint syscalls/sys_enter_setsockopt. */
struct setsockopt_enter {
	__u64 common;
	__u64 number;
	__u64 fd, level, option, value, length;
};

SEC("tracepoint/syscalls/sys_enter_setsockopt")
int legacy_enter(struct setsockopt_enter *args)
{
	__u64 thread;
	__u8 one = 1;

	if (args->option != IPT_SO_SET_REPLACE ||
	    (args->level != SOL_IP && args->level != SOL_IPV6))
		return 0;
	if (!observed_task())
		return 0;
	thread = bpf_get_current_pid_tgid();
	bpf_map_update_elem(&replacing, &thread, &one, BPF_ANY);
	return 0;
}

SEC("tracepoint/syscalls/sys_exit_setsockopt")
int legacy_exit(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();

	if (!bpf_map_lookup_elem(&replacing, &thread))
		return 0;
	bpf_map_delete_elem(&replacing, &thread);
	return replaced();
}
