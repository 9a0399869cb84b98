/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The few kernel types that the programs touch, with only the fields that they
 * read. Offsets are relocated against the running kernel (CO-RE), so order and
 * size do not matter here; names and kinds do.
 */
#ifndef FAIRLEAD_KERNEL_H
#define FAIRLEAD_KERNEL_H

/* Makes bpf_tracing.h use the kernel's register names. */
#define __VMLINUX_H__

typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef short __s16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef _Bool bool;

#define true 1
#define false 0
#define NULL ((void *)0)

/* include/uapi/linux/bpf.h */
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_RINGBUF = 27,
};
enum {
	BPF_ANY = 0,
};
enum {
	BPF_F_NO_PREALLOC = 1 << 0,
	BPF_F_MMAPABLE = 1 << 10,
};
enum {
	BPF_RB_NO_WAKEUP = 1 << 0,
	BPF_RB_FORCE_WAKEUP = 1 << 1,
};

/* include/net/tcp_states.h */
enum {
	TCP_SYN_SENT = 2,
	TCP_CLOSE = 7,
	TCP_LISTEN = 10,
};

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17

/* include/net/sock.h */
#define SOCK_BINDADDR_LOCK 4
#define SOCK_BINDPORT_LOCK 8
#define RCV_SHUTDOWN 1
#define SEND_SHUTDOWN 2

/* Contexts of cgroup programs: fixed UAPI layout, rewritten by the verifier. */
struct bpf_sock {
	__u32 bound_dev_if;
	__u32 family;
	__u32 type;
	__u32 protocol;
	__u32 mark;
	__u32 priority;
	__u32 src_ip4;
	__u32 src_ip6[4];
	__u32 src_port; /* host byte order */
};
struct bpf_sock_addr {
	__u32 user_family;
	__u32 user_ip4;
	__u32 user_ip6[4];
	__u32 user_port;
	__u32 family;
	__u32 type;
	__u32 protocol;
	__u32 msg_src_ip4;
	__u32 msg_src_ip6[4];
	struct bpf_sock *sk __attribute__((aligned(8)));
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct ns_common {
	unsigned int inum;
};
struct net {
	struct ns_common ns;
};
typedef struct {
	struct net *net;
} possible_net_t;
typedef struct {
	long long counter;
} atomic64_t;
struct in6_addr {
	__u8 in6_u[16];
};

struct sock_common {
	__be32 skc_rcv_saddr;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	unsigned char skc_ipv6only : 1;
	int skc_bound_dev_if;
	possible_net_t skc_net;
	struct in6_addr skc_v6_rcv_saddr;
	atomic64_t skc_cookie;
};

typedef struct {
	unsigned int val;
} kuid_t;
struct kernfs_node {
	__u64 id;
	unsigned int hash; /* of the name */
};
struct cgroup_root {
	int hierarchy_id; /* 0: the unified hierarchy */
};
struct cgroup {
	int level;
	struct kernfs_node *kn;
	struct cgroup_root *root;
};
struct cgroup_subsys_state {
	struct cgroup *cgroup;
};
enum cgroup_subsys_id {
	memory_cgrp_id,
	pids_cgrp_id,
};
struct css_set {
	struct cgroup_subsys_state *subsys[1]; /* CGROUP_SUBSYS_COUNT */
};
struct sock_cgroup_data {
	struct cgroup *cgroup;
};
struct socket;
struct sock {
	struct sock_common __sk_common;
	struct socket *sk_socket;
	__u16 sk_protocol;
	__u8 sk_shutdown;
	__u8 sk_userlocks : 4;
	kuid_t sk_uid;
	struct sock_cgroup_data sk_cgrp_data;
};
struct udp_sock;

struct inode {
	unsigned long i_ino;
};
struct socket {
	struct sock *sk;
};
struct socket_alloc {
	struct socket socket;
	struct inode vfs_inode;
};

struct pid_namespace {
	struct ns_common ns;
};
struct upid {
	int nr;
	struct pid_namespace *ns;
};
struct pid {
	unsigned int level;
	struct upid numbers[1];
};
struct task_struct {
	int pid;
	int tgid;
	struct task_struct *group_leader;
	struct pid *thread_pid;
	struct css_set *cgroups;
	char comm[16];
};

struct seq_file;
struct bpf_iter_meta {
	struct seq_file *seq;
};
struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk;
};

#pragma clang attribute pop

/* Registers at a kprobe: the fixed layout of the architecture's ABI. */
#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8;
	unsigned long ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#elif defined(__TARGET_ARCH_arm64)
struct user_pt_regs {
	__u64 regs[31];
	__u64 sp, pc, pstate;
};
struct pt_regs {
	struct user_pt_regs user_regs;
};
#endif

#endif
