/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What nftables commits to the tables with a nat chain of one network namespace, as
 * records of a ring buffer. Commits to other tables are only counted.
 *
 * The hooks run inside a commit, where the kernel notifies netlink listeners: so an
 * aborted batch is silent, and the commit mutex of the namespace lets one of them
 * run at a time. A rule is reported by its handle: on request the kernel returns the
 * rule in a stable format, while the private bytes of expressions change from
 * version to version. Elements of sets are reported in full.
 */
#ifndef FAIRLEAD_NFT_H
#define FAIRLEAD_NFT_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum change {
	CHANGE_TABLE = 1,
	CHANGE_CHAIN = 2,
	CHANGE_RULE = 3,
	CHANGE_ELEMENT = 4,
	/* The commit is complete, and the ruleset has this generation. */
	CHANGE_END = 5,
	/* The commit has more changes than are reported. */
	CHANGE_MANY = 6,
	/* A change outside of any commit. */
	CHANGE_STRAY = 7,
};

#define NFT_CHUNK 200
#define NFT_CHUNKS 5

/*
 * One record, or one of several when the names and bytes do not fit: these are,
 * one after the other, the table's name, the chain's or set's name, the
 * element's key, the end of its range, and its value. Names end with a 0.
 */
struct change_event {
	__u64 handle;	/* of the table, chain or rule, or of the element's set */
	__u64 previous; /* handle of the rule before it in the chain, 0 if it is the first */
	__u64 table;	/* handle of the table */
	__u32 generation;
	__u32 since;   /* generation of the end before this one, 0 if this is the first */
	__u32 lost;    /* records that found no room, and commits that were missed, at an end */
	__u32 flags;   /* of the element */
	__u32 verdict; /* code of the element's value, if that is a verdict */
	__u16 total;   /* bytes in all chunks */
	__u16 offset;  /* of the first byte here */
	__u8 kind;     /* enum change */
	__u8 family;   /* NFPROTO_* */
	__u8 deleted;
	__u8 key_length;
	__u8 end_length;
	__u8 value_length; /* 0 if the value is a verdict */
	__u8 is_verdict;   /* the value is a verdict, and its bytes are the chain's name */
	__u8 padding;
	__u8 bytes[NFT_CHUNK];
};
_Static_assert(sizeof(struct change_event) == 256, "change_event is the ABI with the agent");
_Static_assert(__builtin_offsetof(struct change_event, bytes) == 56, "no hidden padding");

/* Changes of one commit that are reported; beyond these, a dump is cheaper. */
#define NFT_LIMIT 256

/*
 * Records of one commit, of about 990 that the ring holds. As those wake nobody, the
 * commit's end must find room after them.
 */
#define NFT_RECORDS 900

/* Names of tables, chains and sets have up to 255 bytes; keys and values 64. */
#define NFT_NAME 256
#define NFT_DATA 64
#define NFT_BYTES 2048 /* a power of two, above NFT_CHUNK * NFT_CHUNKS + NFT_NAME */

struct scratch {
	struct change_event event;
	__u8 bytes[NFT_BYTES];
};

/* The commits of the observed namespace: the one that has begun, and since the start. */
struct commit {
	__u64 thread;
	__u64 table;	  /* address of the table of the last change */
	__u32 matters;	  /* whether that table has a nat chain */
	__u32 sent;	  /* changes that were reported, or NFT_LIMIT + 1 */
	__u32 lost;	  /* records that found no room, and commits that were missed */
	__u32 generation; /* of the last commit, 0 before the first */
	__u32 reported;	  /* generation of the last commit that was reported, 0 before the first */
	__u32 others;	  /* commits that were not reported */
	__u32 records;	  /* of the commit's changes */
	__u32 padding;
};

const volatile __u32 observed_netns = 0;

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} commits SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct commit);
} states SEC(".maps");

/*
 * Whether a table has a nat chain, by the table's handle, which is never used again.
 * An entry that is evicted is worked out again from the table's chains.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64);
	__type(value, __u32);
} tables SEC(".maps");

/* Chains of a table that are looked at; one with more counts as having a nat chain. */
#define NFT_CHAINS 256

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct list_head {
	struct list_head *next, *prev;
};
struct nft_table {
	struct list_head chains;
	__u64 handle;
	char *name;
};
struct nft_chain {
	struct list_head rules;
	struct list_head list;
	__u64 handle;
	__u8 flags : 5;
	char *name;
};
enum nft_chain_types {
	NFT_CHAIN_T_NAT = 2,
};
struct nft_chain_type {
	enum nft_chain_types type;
};
struct nf_hook_ops {
	unsigned int hooknum;
};
struct nft_base_chain {
	struct nf_hook_ops ops;
	const struct nft_chain_type *type;
	struct nft_chain chain;
};
struct nft_rule {
	struct list_head list;
	__u64 handle : 42, genmask : 2, dlen : 12, udata : 1;
};
struct nft_ctx {
	struct net *net;
	struct nft_table *table;
	struct nft_chain *chain;
	__u8 family;
};
struct nft_set_ops {
	unsigned int elemsize;
};
struct nft_set {
	char *name;
	__u64 handle;
	__u32 dtype;
	__u8 klen;
	__u8 dlen;
	const struct nft_set_ops *ops;
};
struct nft_set_ext {
	__u8 offset[4]; /* of the key, the key's end, the value, the flags */
};
struct nft_verdict {
	__u32 code;
	struct nft_chain *chain;
};
/* Up to Linux 6.6 hooks get the first, since then the second, to which priv points. */
struct nft_set_elem {
	void *priv;
};
struct nft_elem_priv {
};

#pragma clang attribute pop

/* enum nf_tables_msg_types. All others that the hooks see delete or destroy. */
#define NFT_MSG_NEWTABLE 0
#define NFT_MSG_NEWCHAIN 3
#define NFT_MSG_NEWRULE 6
#define NFT_MSG_NEWSETELEM 12

/* include/uapi/linux/netfilter.h */
#define NFPROTO_INET 1
#define NFPROTO_IPV4 2
#define NFPROTO_IPV6 10
#define NF_INET_PRE_ROUTING 0
#define NF_INET_LOCAL_OUT 3

#define NFT_CHAIN_BASE 1
#define NFT_DATA_VERDICT 0xffffff00U
#define NFT_JUMP -3
#define NFT_GOTO -4

static __always_inline struct commit *nft_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&states, &zero);
}

static __always_inline struct scratch *nft_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratches, &zero);
}

static __always_inline bool nft_observed(struct net *net)
{
	return BPF_CORE_READ(net, ns.inum) == observed_netns;
}

/* Sends the record to the agent, which is woken when a commit is complete. False if it found no room. */
static __always_inline bool nft_send(struct change_event *e, struct commit *c, bool wake)
{
	if (bpf_ringbuf_output(&commits, e, sizeof(*e), wake ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP)) {
		__sync_fetch_and_add(&c->lost, 1);
		return false;
	}
	return true;
}

static __always_inline void nft_signal(struct scratch *s, __u8 kind, struct commit *c)
{
	__builtin_memset(&s->event, 0, sizeof(s->event));
	s->event.kind = kind;
	nft_send(&s->event, c, kind != CHANGE_MANY);
}

/* Whether a chain changes the destinations of packets. */
static __always_inline bool nft_is_nat(const struct nft_chain *chain)
{
	const struct nft_base_chain *base;
	unsigned int hook;

	if (!(BPF_CORE_READ_BITFIELD_PROBED(chain, flags) & NFT_CHAIN_BASE))
		return false;
	base = (const void *)chain - bpf_core_field_offset(struct nft_base_chain, chain);
	if (BPF_CORE_READ(base, type, type) != NFT_CHAIN_T_NAT)
		return false;
	hook = BPF_CORE_READ(base, ops.hooknum);
	return hook == NF_INET_PRE_ROUTING || hook == NF_INET_LOCAL_OUT;
}

/* The chains that the commit makes are among a table's chains already. */
static __always_inline bool nft_has_nat(const struct nft_table *table)
{
	const struct list_head *head = (const void *)table + bpf_core_field_offset(struct nft_table, chains);
	const struct list_head *at = BPF_CORE_READ(head, next);

#pragma clang loop unroll(disable)
	for (int i = 0; i < NFT_CHAINS; i++) {
		if (at == head)
			return false;
		if (nft_is_nat((const void *)at - bpf_core_field_offset(struct nft_chain, list)))
			return true;
		at = BPF_CORE_READ(at, next);
	}
	return true;
}

/* Whether the agent needs to know of a change to a table. */
static __always_inline bool nft_matters(const struct nft_ctx *ctx, const struct nft_table *table)
{
	__u8 family = BPF_CORE_READ(ctx, family);
	__u64 handle = BPF_CORE_READ(table, handle);
	__u32 *known, matters;

	if (family != NFPROTO_INET && family != NFPROTO_IPV4 && family != NFPROTO_IPV6)
		return false;
	known = bpf_map_lookup_elem(&tables, &handle);
	if (known)
		return *known;
	matters = nft_has_nat(table);
	bpf_map_update_elem(&tables, &handle, &matters, BPF_ANY);
	return matters;
}

/* Whether this thread is in a commit of the observed namespace. */
static __always_inline bool nft_inside(struct commit *c)
{
	return c->thread == bpf_get_current_pid_tgid();
}

/* Returns where to lay out a change of the observed namespace, or NULL. */
static __always_inline struct scratch *nft_begin(const struct nft_ctx *ctx, struct commit *c, __u8 kind, bool deleted)
{
	const struct nft_table *table = BPF_CORE_READ(ctx, table);
	struct scratch *s = nft_scratch();

	if (!s)
		return NULL;
	if (!nft_inside(c)) {
		if (nft_observed(BPF_CORE_READ(ctx, net)) && nft_matters(ctx, table))
			nft_signal(s, CHANGE_STRAY, c);
		return NULL;
	}
	if (c->table != (__u64)table) {
		c->matters = nft_matters(ctx, table);
		c->table = (__u64)table;
	}
	if (!c->matters)
		return NULL;
	if (c->sent >= NFT_LIMIT || c->records >= NFT_RECORDS) {
		if (c->sent <= NFT_LIMIT)
			nft_signal(s, CHANGE_MANY, c);
		c->sent = NFT_LIMIT + 1;
		return NULL;
	}
	c->sent++;
	__builtin_memset(&s->event, 0, __builtin_offsetof(struct change_event, bytes));
	s->event.kind = kind;
	s->event.deleted = deleted;
	s->event.family = BPF_CORE_READ(ctx, family);
	s->event.table = BPF_CORE_READ(ctx, table, handle);
	return s;
}

/* Appends a name with its 0. */
static __always_inline void nft_name(struct scratch *s, const char *name)
{
	__u32 at = s->event.total;
	long n;

	if (at > NFT_BYTES - NFT_NAME)
		return;
	n = bpf_probe_read_kernel_str(&s->bytes[at], NFT_NAME, name);
	if (n <= 0 || n > NFT_NAME) { /* a name that cannot be read matches nothing */
		s->bytes[at] = 0;
		n = 1;
	}
	s->event.total = at + n;
}

/* Appends bytes, and returns how many. */
static __always_inline __u8 nft_bytes(struct scratch *s, const void *from, __u32 length)
{
	__u32 at = s->event.total;

	if (length > NFT_DATA)
		length = NFT_DATA;
	if (at > NFT_BYTES - NFT_NAME)
		return 0;
	barrier_var(length);
	if (length > NFT_DATA || bpf_probe_read_kernel(&s->bytes[at], length, from))
		return 0;
	s->event.total = at + length;
	return length;
}

/* Sends what was laid out, in as many records as it takes. */
static __always_inline void nft_finish(struct scratch *s, struct commit *c)
{
#pragma unroll
	for (int i = 0; i < NFT_CHUNKS; i++) {
		if (i * NFT_CHUNK >= s->event.total)
			break;
		s->event.offset = i * NFT_CHUNK;
		__builtin_memcpy(s->event.bytes, &s->bytes[i * NFT_CHUNK], NFT_CHUNK);
		nft_send(&s->event, c, false);
		c->records++;
	}
}

static __always_inline int nft_commit_begins(struct net *net)
{
	struct commit *c = nft_state();
	__u64 thread = bpf_get_current_pid_tgid();

	if (!c)
		return 0;
	if (nft_observed(net)) {
		c->thread = thread;
		c->table = 0;
		c->sent = 0;
		c->records = 0;
	} else if (c->thread == thread) {
		c->thread = 0;
	}
	return 0;
}

/*
 * Runs at the end of each commit, audited or not, before the mutex is unlocked. Each
 * commit has the generation after the last one's; the kernel skips 0.
 */
static __always_inline int nft_commit_ends(__u32 generation)
{
	struct commit *c = nft_state();
	struct scratch *s = nft_scratch();
	__u32 next;
	bool missed;

	if (!c || !s || !nft_inside(c))
		return 0;
	c->thread = 0;
	next = c->generation + 1 ? c->generation + 1 : 1;
	missed = c->generation && generation != next;
	if (!c->sent && !missed) {
		c->others++;
		c->generation = generation;
		return 0;
	}
	if (missed)
		__sync_fetch_and_add(&c->lost, 1);
	__builtin_memset(&s->event, 0, sizeof(s->event));
	s->event.kind = CHANGE_END;
	s->event.generation = generation;
	s->event.since = c->reported;
	s->event.lost = c->lost;
	if (nft_send(&s->event, c, true))
		c->reported = generation;
	/* Last: who sees that this commit has ended sees whether it was reported. */
	barrier();
	c->generation = generation;
	return 0;
}

static __always_inline int nft_table_changes(const struct nft_ctx *ctx, int event)
{
	struct commit *c = nft_state();
	struct scratch *s = c ? nft_begin(ctx, c, CHANGE_TABLE, event != NFT_MSG_NEWTABLE) : NULL;

	if (!s)
		return 0;
	s->event.handle = s->event.table;
	nft_name(s, BPF_CORE_READ(ctx, table, name));
	nft_finish(s, c);
	return 0;
}

static __always_inline int nft_chain_changes(const struct nft_ctx *ctx, int event)
{
	struct commit *c = nft_state();
	const struct nft_table *table = BPF_CORE_READ(ctx, table);
	__u64 handle = BPF_CORE_READ(table, handle);
	__u32 matters = 1;
	struct scratch *s;

	if (!c)
		return 0;
	/* One that is deleted is no longer among the table's chains. */
	if (nft_is_nat(BPF_CORE_READ(ctx, chain)) && nft_observed(BPF_CORE_READ(ctx, net))) {
		bpf_map_update_elem(&tables, &handle, &matters, BPF_ANY);
		c->table = 0; /* look it up again */
	}
	s = nft_begin(ctx, c, CHANGE_CHAIN, event != NFT_MSG_NEWCHAIN);
	if (!s)
		return 0;
	s->event.handle = BPF_CORE_READ(ctx, chain, handle);
	nft_name(s, BPF_CORE_READ(ctx, table, name));
	nft_name(s, BPF_CORE_READ(ctx, chain, name));
	nft_finish(s, c);
	return 0;
}

static __always_inline int nft_rule_changes(const struct nft_ctx *ctx, const struct nft_rule *rule, int event)
{
	struct commit *c = nft_state();
	struct scratch *s = c ? nft_begin(ctx, c, CHANGE_RULE, event != NFT_MSG_NEWRULE) : NULL;
	struct list_head *head, *previous;

	if (!s)
		return 0;
	s->event.handle = BPF_CORE_READ_BITFIELD_PROBED(rule, handle);
	if (!s->event.deleted) {
		head = (void *)BPF_CORE_READ(ctx, chain) + bpf_core_field_offset(struct nft_chain, rules);
		previous = BPF_CORE_READ(rule, list.prev);
		if (previous != head) {
			rule = (void *)previous - bpf_core_field_offset(struct nft_rule, list);
			s->event.previous = BPF_CORE_READ_BITFIELD_PROBED(rule, handle);
		}
	}
	nft_name(s, BPF_CORE_READ(ctx, table, name));
	nft_name(s, BPF_CORE_READ(ctx, chain, name));
	nft_finish(s, c);
	return 0;
}

static __always_inline int nft_element_changes(const struct nft_ctx *ctx, const struct nft_set *set, const void *element,
					       int event)
{
	struct commit *c = nft_state();
	struct scratch *s = c ? nft_begin(ctx, c, CHANGE_ELEMENT, event != NFT_MSG_NEWSETELEM) : NULL;
	const struct nft_set_ext *ext;
	const struct nft_verdict *value;
	__u8 at[4] = {}, flags = 0;

	if (!s)
		return 0;
	if (!bpf_core_type_exists(struct nft_elem_priv))
		element = BPF_CORE_READ((const struct nft_set_elem *)element, priv);
	ext = element + BPF_CORE_READ(set, ops, elemsize);
	bpf_core_read(at, sizeof(at), &ext->offset);
	nft_name(s, BPF_CORE_READ(ctx, table, name));
	nft_name(s, BPF_CORE_READ(set, name));
	s->event.handle = BPF_CORE_READ(set, handle);
	if (at[0])
		s->event.key_length = nft_bytes(s, (const void *)ext + at[0], BPF_CORE_READ(set, klen));
	if (at[1])
		s->event.end_length = nft_bytes(s, (const void *)ext + at[1], BPF_CORE_READ(set, klen));
	if (at[2] && BPF_CORE_READ(set, dtype) == NFT_DATA_VERDICT) {
		value = (const void *)ext + at[2];
		s->event.is_verdict = 1;
		s->event.verdict = BPF_CORE_READ(value, code);
		if ((int)s->event.verdict == NFT_JUMP || (int)s->event.verdict == NFT_GOTO)
			nft_name(s, BPF_CORE_READ(value, chain, name));
	} else if (at[2]) {
		s->event.value_length = nft_bytes(s, (const void *)ext + at[2], BPF_CORE_READ(set, dlen));
	}
	if (at[3])
		bpf_probe_read_kernel(&flags, sizeof(flags), (const void *)ext + at[3]);
	s->event.flags = flags;
	nft_finish(s, c);
	return 0;
}

#endif
