// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Commits of nftables, by BPF trampolines. */
#include "nft.h"

/* Puts these types into the object, from which Go types are generated. */
struct change_event *unused_event __attribute__((unused));
enum change *unused_change __attribute__((unused));

SEC("fentry/nf_tables_commit")
int BPF_PROG(nft_begins, struct net *net)
{
	return nft_commit_begins(net);
}

SEC("fentry/nf_tables_table_notify")
int BPF_PROG(nft_table, const struct nft_ctx *nft, int event)
{
	return nft_table_changes(nft, event);
}

SEC("fentry/nf_tables_chain_notify")
int BPF_PROG(nft_chain, const struct nft_ctx *nft, int event)
{
	return nft_chain_changes(nft, event);
}

SEC("fentry/nf_tables_rule_notify")
int BPF_PROG(nft_rule, const struct nft_ctx *nft, const struct nft_rule *rule, int event)
{
	return nft_rule_changes(nft, rule, event);
}

SEC("fentry/nf_tables_setelem_notify")
int BPF_PROG(nft_element, const struct nft_ctx *nft, const struct nft_set *set, const void *element, int event)
{
	return nft_element_changes(nft, set, element, event);
}

SEC("fentry/nf_tables_commit_audit_log")
int BPF_PROG(nft_ends, void *audited, __u32 generation)
{
	return nft_commit_ends(generation);
}
