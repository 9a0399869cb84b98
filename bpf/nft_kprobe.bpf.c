// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Commits of nftables, by kprobes, for kernels without BPF trampolines. They read
 * registers, so this file is built for each architecture.
 */
#include "nft.h"

SEC("kprobe/nf_tables_commit")
int BPF_KPROBE(nft_kp_begins, struct net *net)
{
	return nft_commit_begins(net);
}

SEC("kprobe/nf_tables_table_notify")
int BPF_KPROBE(nft_kp_table, const struct nft_ctx *nft, int event)
{
	return nft_table_changes(nft, event);
}

SEC("kprobe/nf_tables_chain_notify")
int BPF_KPROBE(nft_kp_chain, const struct nft_ctx *nft, int event)
{
	return nft_chain_changes(nft, event);
}

SEC("kprobe/nf_tables_rule_notify")
int BPF_KPROBE(nft_kp_rule, const struct nft_ctx *nft, const struct nft_rule *rule, int event)
{
	return nft_rule_changes(nft, rule, event);
}

SEC("kprobe/nf_tables_setelem_notify")
int BPF_KPROBE(nft_kp_element, const struct nft_ctx *nft, const struct nft_set *set, const void *element, int event)
{
	return nft_element_changes(nft, set, element, event);
}

SEC("kprobe/nf_tables_commit_audit_log")
int BPF_KPROBE(nft_kp_ends, void *audited, __u32 generation)
{
	return nft_commit_ends(generation);
}
