// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A filter of the agent's socket for notifications of nftables: it leaves out what
 * does not concern NAT, so that other commits neither wake the agent nor fill its queue.
 *
 * What changes tables and chains passes, and what changes anything else in a table that
 * the agent follows. A packet holds some of the messages of one commit, and passes if
 * one of them does. In a packet of its own the end of the commit follows, with the
 * generation. It passes if anything of its commit has passed. What the filter does not
 * understand passes too.
 *
 * Commits of a network namespace are notified one after the other.
 */
#include "kernel.h"

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* UAPI layout of the context; the kernel rewrites accesses. */
struct __sk_buff {
	__u32 len;
};

/* The table's name with its final 0; what has a longer one passes. */
struct followed_table {
	__u8 family;
	__u8 name[63];
};

struct filter_state {
	__u32 generation; /* of the last commit that passed, 0 before the first */
	__u32 passes;	  /* something of the commit that is being notified has passed */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct followed_table);
	__type(value, __u8);
} followed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct filter_state);
} filter_states SEC(".maps");

/* Puts these types into the object, from which Go types are generated. */
struct followed_table *unused_table __attribute__((unused));
struct filter_state *unused_state __attribute__((unused));

/* include/uapi/linux/netlink.h, nfnetlink.h: what each message begins with. */
struct message {
	__u32 length;
	__u8 type;
	__u8 subsystem;
	__u16 flags;
	__u32 sequence;
	__u32 port;
	__u8 family;
	__u8 version;
	__u16 resource;
	__u16 attribute_length; /* of the first attribute, with these two fields */
	__u16 attribute_type;
};
#define ATTRIBUTES 20
#define CONTENT 24 /* of the first attribute */

/* include/uapi/linux/netfilter/nf_tables.h */
enum {
	NFT_MSG_NEWTABLE = 0,
	NFT_MSG_DELTABLE = 2,
	NFT_MSG_NEWCHAIN = 3,
	NFT_MSG_DELCHAIN = 5,
	NFT_MSG_NEWGEN = 15,
	NFT_MSG_DESTROYTABLE = 26,
	NFT_MSG_DESTROYCHAIN = 27,
};

#define LEAVE_OUT 0
#define PASS ((int)0xffffffff) /* all bytes */

/* Above what a packet of the kernel holds: up to 8 KiB, 36 bytes the message. */
#define MESSAGES 256

/* Whether the table of a message at an offset is followed. */
static __always_inline bool is_followed(struct __sk_buff *skb, __u32 offset, const struct message *m)
{
	struct followed_table table = {};
	__u32 length = m->attribute_length - (CONTENT - ATTRIBUTES);

	if (m->attribute_type != 1)
		return true;
	asm volatile("" : "+r"(length)); /* what is compared is what the verifier has to know */
	if (length > sizeof(table.name))
		return true;
	/* With the byte before the name, as the verifier of old kernels wants one at least. */
	if (bpf_skb_load_bytes(skb, offset + CONTENT - 1, &table, 1 + length))
		return true;
	table.family = m->family;
	return bpf_map_lookup_elem(&followed, &table);
}

/* The end of a commit. */
static __always_inline int end(struct __sk_buff *skb, __u32 offset, struct filter_state *state)
{
	__be32 generation = 0;

	if (!state->passes)
		return LEAVE_OUT;
	state->passes = 0;
	bpf_skb_load_bytes(skb, offset + CONTENT, &generation, sizeof(generation));
	state->generation = bpf_ntohl(generation);
	return PASS;
}

SEC("socket")
int nft_filter(struct __sk_buff *skb)
{
	__u32 zero = 0, offset = 0;
	struct filter_state *state = bpf_map_lookup_elem(&filter_states, &zero);

	if (!state)
		return PASS;
	for (int i = 0; i < MESSAGES; i++) {
		struct message m;

		if (offset >= skb->len)
			return LEAVE_OUT;
		if (bpf_skb_load_bytes(skb, offset, &m, sizeof(m)) || m.length < ATTRIBUTES)
			break;
		if (m.type == NFT_MSG_NEWGEN)
			return end(skb, offset, state);
		if (m.type == NFT_MSG_NEWTABLE || m.type == NFT_MSG_DELTABLE || m.type == NFT_MSG_NEWCHAIN ||
		    m.type == NFT_MSG_DELCHAIN || m.type == NFT_MSG_DESTROYTABLE || m.type == NFT_MSG_DESTROYCHAIN ||
		    is_followed(skb, offset, &m))
			break;
		offset += (m.length + 3) & ~3U;
	}
	state->passes = 1;
	return PASS;
}
