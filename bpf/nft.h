/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What nftables commits in one network namespace, as records of a ring buffer.
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

#define NFT_CHUNK 208
#define NFT_CHUNKS 5

/*
 * One record, or one of several when the names and bytes do not fit: these are,
 * one after the other, the table's name, the chain's or set's name, the
 * element's key, the end of its range, and its value. Names end with a 0.
 */
struct change_event {
	__u64 handle;	/* of the rule, or of the element's set */
	__u64 previous; /* handle of the rule before it in the chain, 0 if it is the first */
	__u32 generation;
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
	__u8 padding[9];
	__u8 bytes[NFT_CHUNK];
};
_Static_assert(sizeof(struct change_event) == 256, "change_event is the ABI with the agent");
_Static_assert(__builtin_offsetof(struct change_event, bytes) == 48, "no hidden padding");

/* Changes of one commit that are reported; beyond these, a dump is cheaper. */
#define NFT_LIMIT 256

/* Names of tables, chains and sets have up to 255 bytes; keys and values 64. */
#define NFT_NAME 256
#define NFT_DATA 64
#define NFT_BYTES 2048 /* a power of two, above NFT_CHUNK * NFT_CHUNKS + NFT_NAME */

struct scratch {
	struct change_event event;
	__u8 bytes[NFT_BYTES];
};

/* A commit of the observed namespace that has begun. */
struct commit {
	__u64 thread;
	__u32 sent; /* records, or NFT_LIMIT + 1 */
	__u32 lost; /* records that found no room since the start */
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

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct list_head {
	struct list_head *next, *prev;
};
struct nft_table {
	char *name;
	__u8 family;
};
struct nft_chain {
	struct list_head rules;
	char *name;
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

/* Sends the record to the agent, which is woken when a commit is complete. */
static __always_inline void nft_send(struct change_event *e, struct commit *c, bool wake)
{
	if (bpf_ringbuf_output(&commits, e, sizeof(*e), wake ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP))
		__sync_fetch_and_add(&c->lost, 1);
}

static __always_inline void nft_signal(struct scratch *s, __u8 kind, __u32 generation, struct commit *c)
{
	__builtin_memset(&s->event, 0, sizeof(s->event));
	s->event.kind = kind;
	s->event.generation = generation;
	nft_send(&s->event, c, kind != CHANGE_MANY);
}

/* Returns where to lay out a change of the observed namespace, or NULL. */
static __always_inline struct scratch *nft_begin(const struct nft_ctx *ctx, __u8 kind, bool deleted,
						     struct commit **commit)
{
	struct commit *c = nft_state();
	struct scratch *s = nft_scratch();

	if (!c || !s || !nft_observed(BPF_CORE_READ(ctx, net)))
		return NULL;
	*commit = c;
	if (c->thread != bpf_get_current_pid_tgid()) {
		nft_signal(s, CHANGE_STRAY, 0, c);
		return NULL;
	}
	if (c->sent >= NFT_LIMIT) {
		if (c->sent == NFT_LIMIT)
			nft_signal(s, CHANGE_MANY, 0, c);
		c->sent = NFT_LIMIT + 1;
		return NULL;
	}
	c->sent++;
	__builtin_memset(&s->event, 0, sizeof(s->event));
	s->event.kind = kind;
	s->event.deleted = deleted;
	s->event.family = BPF_CORE_READ(ctx, family);
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
		c->sent = 0;
	} else if (c->thread == thread) {
		c->thread = 0;
	}
	return 0;
}

/* Runs at the end of each commit, audited or not, before the mutex is unlocked. */
static __always_inline int nft_commit_ends(__u32 generation)
{
	struct commit *c = nft_state();
	struct scratch *s = nft_scratch();

	if (!c || !s || c->thread != bpf_get_current_pid_tgid())
		return 0;
	c->thread = 0;
	nft_signal(s, CHANGE_END, generation, c);
	return 0;
}

static __always_inline int nft_table_changes(const struct nft_ctx *ctx, int event)
{
	struct commit *c;
	struct scratch *s = nft_begin(ctx, CHANGE_TABLE, event != NFT_MSG_NEWTABLE, &c);

	if (!s)
		return 0;
	nft_name(s, BPF_CORE_READ(ctx, table, name));
	nft_finish(s, c);
	return 0;
}

static __always_inline int nft_chain_changes(const struct nft_ctx *ctx, int event)
{
	struct commit *c;
	struct scratch *s = nft_begin(ctx, CHANGE_CHAIN, event != NFT_MSG_NEWCHAIN, &c);

	if (!s)
		return 0;
	nft_name(s, BPF_CORE_READ(ctx, table, name));
	nft_name(s, BPF_CORE_READ(ctx, chain, name));
	nft_finish(s, c);
	return 0;
}

static __always_inline int nft_rule_changes(const struct nft_ctx *ctx, const struct nft_rule *rule, int event)
{
	struct commit *c;
	struct scratch *s = nft_begin(ctx, CHANGE_RULE, event != NFT_MSG_NEWRULE, &c);
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
	struct commit *c;
	struct scratch *s = nft_begin(ctx, CHANGE_ELEMENT, event != NFT_MSG_NEWSETELEM, &c);
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
