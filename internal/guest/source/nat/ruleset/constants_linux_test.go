// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// The numbers are those of the kernel's headers. A few are in no package.
func TestConstants(t *testing.T) {
	for name, c := range map[string][2]int64{
		"FamilyInet": {FamilyInet, unix.NFPROTO_INET}, "FamilyIP": {FamilyIP, unix.NFPROTO_IPV4}, "FamilyIP6": {FamilyIP6, unix.NFPROTO_IPV6},
		"HookPrerouting": {HookPrerouting, unix.NF_INET_PRE_ROUTING}, "HookOutput": {HookOutput, unix.NF_INET_LOCAL_OUT},

		"Subsystem":   {Subsystem, unix.NFNL_SUBSYS_NFTABLES},
		"MsgNewTable": {MsgNewTable, unix.NFT_MSG_NEWTABLE}, "MsgGetTable": {MsgGetTable, unix.NFT_MSG_GETTABLE}, "MsgDelTable": {MsgDelTable, unix.NFT_MSG_DELTABLE},
		"MsgNewChain": {MsgNewChain, unix.NFT_MSG_NEWCHAIN}, "MsgGetChain": {MsgGetChain, unix.NFT_MSG_GETCHAIN}, "MsgDelChain": {MsgDelChain, unix.NFT_MSG_DELCHAIN},
		"MsgNewRule": {MsgNewRule, unix.NFT_MSG_NEWRULE}, "MsgGetRule": {MsgGetRule, unix.NFT_MSG_GETRULE}, "MsgDelRule": {MsgDelRule, unix.NFT_MSG_DELRULE},
		"MsgNewSet": {MsgNewSet, unix.NFT_MSG_NEWSET}, "MsgGetSet": {MsgGetSet, unix.NFT_MSG_GETSET}, "MsgDelSet": {MsgDelSet, unix.NFT_MSG_DELSET},
		"MsgNewElem": {MsgNewElem, unix.NFT_MSG_NEWSETELEM}, "MsgGetElem": {MsgGetElem, unix.NFT_MSG_GETSETELEM}, "MsgDelElem": {MsgDelElem, unix.NFT_MSG_DELSETELEM},
		"MsgNewGen": {MsgNewGen, unix.NFT_MSG_NEWGEN}, "MsgGetGen": {MsgGetGen, unix.NFT_MSG_GETGEN},
		"nlmCreate": {nlmCreate, unix.NLM_F_CREATE}, "NLMAppend": {NLMAppend, unix.NLM_F_APPEND},
		"TableDormant": {TableDormant, unix.NFT_TABLE_F_DORMANT},

		"SetInterval": {SetInterval, unix.NFT_SET_INTERVAL}, "SetMap": {SetMap, unix.NFT_SET_MAP}, "setTimeout": {setTimeout, unix.NFT_SET_TIMEOUT},
		"setEval": {setEval, unix.NFT_SET_EVAL}, "ElemIntervalEnd": {ElemIntervalEnd, unix.NFT_SET_ELEM_INTERVAL_END},
		"VerdictDataType": {VerdictDataType, unix.NFT_DATA_VERDICT},
		"VerdictContinue": {VerdictContinue, unix.NFT_CONTINUE}, "VerdictBreak": {VerdictBreak, unix.NFT_BREAK}, "VerdictJump": {VerdictJump, unix.NFT_JUMP},
		"VerdictGoto": {VerdictGoto, unix.NFT_GOTO}, "VerdictReturn": {VerdictReturn, unix.NFT_RETURN},

		"AttrListElem": {AttrListElem, unix.NFTA_LIST_ELEM}, "AttrExprName": {AttrExprName, unix.NFTA_EXPR_NAME}, "AttrExprData": {AttrExprData, unix.NFTA_EXPR_DATA},
		"AttrDataValue": {AttrDataValue, unix.NFTA_DATA_VALUE}, "AttrDataVerdict": {AttrDataVerdict, unix.NFTA_DATA_VERDICT},
		"AttrVerdictCode": {AttrVerdictCode, unix.NFTA_VERDICT_CODE}, "AttrVerdictChain": {AttrVerdictChain, unix.NFTA_VERDICT_CHAIN},

		"PayloadLink": {PayloadLink, unix.NFT_PAYLOAD_LL_HEADER}, "PayloadNetwork": {PayloadNetwork, unix.NFT_PAYLOAD_NETWORK_HEADER}, "PayloadTransport": {PayloadTransport, unix.NFT_PAYLOAD_TRANSPORT_HEADER},
		"CmpEq": {CmpEq, unix.NFT_CMP_EQ}, "CmpNeq": {CmpNeq, unix.NFT_CMP_NEQ}, "CmpLt": {CmpLt, unix.NFT_CMP_LT},
		"CmpLte": {CmpLte, unix.NFT_CMP_LTE}, "CmpGt": {CmpGt, unix.NFT_CMP_GT}, "CmpGte": {CmpGte, unix.NFT_CMP_GTE},

		"MetaProtocol": {MetaProtocol, unix.NFT_META_PROTOCOL}, "MetaMark": {MetaMark, unix.NFT_META_MARK}, "MetaIif": {MetaIif, unix.NFT_META_IIF},
		"MetaOif": {MetaOif, unix.NFT_META_OIF}, "MetaIifname": {MetaIifname, unix.NFT_META_IIFNAME}, "MetaOifname": {MetaOifname, unix.NFT_META_OIFNAME},
		"MetaNfproto": {MetaNfproto, unix.NFT_META_NFPROTO}, "MetaL4proto": {MetaL4proto, unix.NFT_META_L4PROTO},

		"CtKeyState": {CtKeyState, unix.NFT_CT_STATE}, "CtKeySrc": {CtKeySrc, unix.NFT_CT_SRC}, "CtKeyDst": {CtKeyDst, unix.NFT_CT_DST},
		"CtKeyProtocol": {CtKeyProtocol, unix.NFT_CT_PROTOCOL}, "CtKeyProtoDst": {CtKeyProtoDst, unix.NFT_CT_PROTO_DST},
		"CtKeySrcIP": {CtKeySrcIP, unix.NFT_CT_SRC_IP}, "CtKeyDstIP": {CtKeyDstIP, unix.NFT_CT_DST_IP},
		"CtKeySrcIP6": {CtKeySrcIP6, unix.NFT_CT_SRC_IP6}, "CtKeyDstIP6": {CtKeyDstIP6, unix.NFT_CT_DST_IP6},

		"FibAddrtype": {FibAddrtype, unix.NFT_FIB_RESULT_ADDRTYPE}, "FibSaddr": {FibSaddr, unix.NFTA_FIB_F_SADDR}, "FibDaddr": {FibDaddr, unix.NFTA_FIB_F_DADDR},
		"RtnUnspec": {RtnUnspec, unix.RTN_UNSPEC}, "RtnUnicast": {RtnUnicast, unix.RTN_UNICAST}, "RtnLocal": {RtnLocal, unix.RTN_LOCAL},
		"RtnMulticast": {RtnMulticast, unix.RTN_MULTICAST}, "RtnUnreachable": {RtnUnreachable, unix.RTN_UNREACHABLE}, "RtnProhibit": {RtnProhibit, unix.RTN_PROHIBIT},

		"natMapIPs": {natMapIPs, unix.NF_NAT_RANGE_MAP_IPS}, "natProtoSet": {natProtoSet, unix.NF_NAT_RANGE_PROTO_SPECIFIED},
		"NATRandom": {NATRandom, unix.NF_NAT_RANGE_PROTO_RANDOM_ALL}, "natProtoShift": {natProtoShift, unix.NF_NAT_RANGE_PROTO_OFFSET},
		"NATNetmap": {NATNetmap, unix.NF_NAT_RANGE_NETMAP},
	} {
		if c[0] != c[1] {
			t.Errorf("%s is %d, want %d", name, c[0], c[1])
		}
	}
	named := map[uint32]string{
		unix.NFT_META_LEN: "meta length", unix.NFT_META_PROTOCOL: "meta protocol", unix.NFT_META_PRIORITY: "meta priority", unix.NFT_META_MARK: "meta mark",
		unix.NFT_META_IIF: "iif", unix.NFT_META_OIF: "oif", unix.NFT_META_IIFNAME: "iifname", unix.NFT_META_OIFNAME: "oifname",
		unix.NFT_META_IIFTYPE: "iiftype", unix.NFT_META_OIFTYPE: "oiftype", unix.NFT_META_SKUID: "meta skuid", unix.NFT_META_SKGID: "meta skgid",
		unix.NFT_META_RTCLASSID: "rtclassid", unix.NFT_META_NFPROTO: "meta nfproto", unix.NFT_META_L4PROTO: "meta l4proto",
		unix.NFT_META_PKTTYPE: "meta pkttype", unix.NFT_META_CPU: "meta cpu", unix.NFT_META_IIFGROUP: "iifgroup", unix.NFT_META_OIFGROUP: "oifgroup",
		unix.NFT_META_CGROUP: "meta cgroup", unix.NFT_META_PRANDOM: "meta random",
		30: "meta time", 31: "meta day", 32: "meta hour", // NFT_META_TIME_NS, _DAY and _HOUR
	}
	if d := cmp.Diff(named, MetaNames); d != "" {
		t.Errorf("meta keys (-want +got):\n%s", d)
	}
	objects := map[uint32]bool{unix.NFT_OBJECT_COUNTER: true, unix.NFT_OBJECT_CT_HELPER: true, unix.NFT_OBJECT_CT_TIMEOUT: true,
		unix.NFT_OBJECT_SECMARK: true, unix.NFT_OBJECT_CT_EXPECT: true}
	if d := cmp.Diff(objects, passive); d != "" {
		t.Errorf("objects (-want +got):\n%s", d)
	}
}

// Expressions are read by the attributes of the kernel's headers.
func TestAttributes(t *testing.T) {
	num := func(typ uint16, v uint32) []byte { return AppendAttr(nil, typ, []byte{0, 0, 0, byte(v)}) }
	data := func(typ uint16, b byte) []byte {
		return AppendAttr(nil, typ, AppendAttr(nil, AttrDataValue, []byte{b}))
	}
	text := func(typ uint16, s string) []byte { return AppendAttr(nil, typ, []byte(s+"\x00")) }
	for _, tc := range []struct {
		name  string
		attrs [][]byte
		want  any
	}{
		{"immediate", [][]byte{num(unix.NFTA_IMMEDIATE_DREG, 9), data(unix.NFTA_IMMEDIATE_DATA, 7)}, Immediate{Dreg: 9, Data: []byte{7}}},
		{"cmp", [][]byte{num(unix.NFTA_CMP_SREG, 9), num(unix.NFTA_CMP_OP, 1), data(unix.NFTA_CMP_DATA, 7)}, Cmp{Sreg: 9, Op: 1, Data: []byte{7}}},
		{"range", [][]byte{num(unix.NFTA_RANGE_SREG, 9), num(unix.NFTA_RANGE_OP, 1), data(unix.NFTA_RANGE_FROM_DATA, 7), data(unix.NFTA_RANGE_TO_DATA, 8)},
			Range{Sreg: 9, Op: 1, From: []byte{7}, To: []byte{8}}},
		{"bitwise", [][]byte{num(unix.NFTA_BITWISE_SREG, 9), num(unix.NFTA_BITWISE_DREG, 10), num(unix.NFTA_BITWISE_LEN, 1), data(unix.NFTA_BITWISE_MASK, 7), data(unix.NFTA_BITWISE_XOR, 8)},
			Bitwise{Sreg: 9, Dreg: 10, Length: 1, Mask: []byte{7}, Xor: []byte{8}}},
		{"byteorder", [][]byte{num(unix.NFTA_BYTEORDER_SREG, 9), num(unix.NFTA_BYTEORDER_DREG, 10), num(unix.NFTA_BYTEORDER_OP, 1), num(unix.NFTA_BYTEORDER_LEN, 4), num(unix.NFTA_BYTEORDER_SIZE, 2)},
			Byteorder{Sreg: 9, Dreg: 10, Length: 4, Size: 2}},
		{"payload", [][]byte{num(unix.NFTA_PAYLOAD_DREG, 9), num(unix.NFTA_PAYLOAD_BASE, 1), num(unix.NFTA_PAYLOAD_OFFSET, 2), num(unix.NFTA_PAYLOAD_LEN, 3), num(unix.NFTA_PAYLOAD_SREG, 4)},
			Payload{Dreg: 9, Base: 1, Offset: 2, Length: 3, Sreg: 4}},
		{"meta", [][]byte{num(unix.NFTA_META_DREG, 9), num(unix.NFTA_META_KEY, 1), num(unix.NFTA_META_SREG, 2)}, Meta{Dreg: 9, Key: 1, Sreg: 2}},
		{"ct", [][]byte{num(unix.NFTA_CT_DREG, 9), num(unix.NFTA_CT_KEY, 1), AppendAttr(nil, unix.NFTA_CT_DIRECTION, []byte{1}), num(unix.NFTA_CT_SREG, 2)},
			Ct{Dreg: 9, Key: 1, Sreg: 2, Dir: 1}},
		{"fib", [][]byte{num(unix.NFTA_FIB_DREG, 9), num(unix.NFTA_FIB_RESULT, 1), num(unix.NFTA_FIB_FLAGS, 2)}, Fib{Dreg: 9, Result: 1, Flags: 2}},
		{"lookup", [][]byte{text(unix.NFTA_LOOKUP_SET, "s"), num(unix.NFTA_LOOKUP_SREG, 9), num(unix.NFTA_LOOKUP_DREG, 10), num(unix.NFTA_LOOKUP_FLAGS, 1)},
			Lookup{Set: "s", Sreg: 9, Dreg: 10, HasDreg: true, Invert: true}},
		{"dynset", [][]byte{text(unix.NFTA_DYNSET_SET_NAME, "s")}, Dynset{Set: "s"}},
		{"dynset", [][]byte{text(unix.NFTA_DYNSET_SET_NAME, "s"), AppendAttr(nil, unix.NFTA_DYNSET_EXPR, nil)}, Dynset{Set: "s", Conditional: true}},
		{"dynset", [][]byte{text(unix.NFTA_DYNSET_SET_NAME, "s"), num(unix.NFTA_DYNSET_FLAGS, 1)}, Dynset{Set: "s", Conditional: true}},
		{"numgen", [][]byte{num(unix.NFTA_NG_DREG, 9), num(unix.NFTA_NG_MODULUS, 2), num(unix.NFTA_NG_TYPE, unix.NFT_NG_RANDOM), num(unix.NFTA_NG_OFFSET, 3)},
			Numgen{Dreg: 9, Modulus: 2, Offset: 3, What: "numgen random"}},
		{"hash", [][]byte{num(unix.NFTA_HASH_DREG, 9), num(unix.NFTA_HASH_MODULUS, 2), num(unix.NFTA_HASH_OFFSET, 3)}, Numgen{Dreg: 9, Modulus: 2, Offset: 3, What: "hash"}},
		{"nat", [][]byte{num(unix.NFTA_NAT_TYPE, 1), num(unix.NFTA_NAT_FAMILY, 2), num(unix.NFTA_NAT_REG_ADDR_MIN, 3), num(unix.NFTA_NAT_REG_ADDR_MAX, 4),
			num(unix.NFTA_NAT_REG_PROTO_MIN, 5), num(unix.NFTA_NAT_REG_PROTO_MAX, 6), num(unix.NFTA_NAT_FLAGS, 7)},
			NAT{Kind: 1, Family: 2, AddrMin: 3, AddrMax: 4, ProtoMin: 5, ProtoMax: 6, Flags: 7}},
		{"redir", [][]byte{num(unix.NFTA_REDIR_REG_PROTO_MIN, 1), num(unix.NFTA_REDIR_REG_PROTO_MAX, 2), num(unix.NFTA_REDIR_FLAGS, 3)}, Redirect{ProtoMin: 1, ProtoMax: 2, Flags: 3}},
		{"objref", [][]byte{num(unix.NFTA_OBJREF_IMM_TYPE, unix.NFT_OBJECT_LIMIT)}, Other{AnObject}},
		{"objref", [][]byte{num(unix.NFTA_OBJREF_IMM_TYPE, unix.NFT_OBJECT_COUNTER)}, Pass{"objref"}},
		{"objref", [][]byte{num(unix.NFTA_OBJREF_IMM_TYPE, unix.NFT_OBJECT_COUNTER), text(unix.NFTA_OBJREF_SET_NAME, "s")}, Other{AChosenObject}},
		{"match", [][]byte{text(unix.NFTA_MATCH_NAME, "m"), num(unix.NFTA_MATCH_REV, 1), AppendAttr(nil, unix.NFTA_MATCH_INFO, []byte{1})}, Match{Name: "m", Revision: 1, Info: []byte{1}}},
		{"target", [][]byte{text(unix.NFTA_TARGET_NAME, "t"), num(unix.NFTA_TARGET_REV, 1), AppendAttr(nil, unix.NFTA_TARGET_INFO, []byte{1})}, Target{Name: "t", Revision: 1, Info: []byte{1}}},
	} {
		var b []byte
		for _, a := range tc.attrs {
			b = append(b, a...)
		}
		got, err := parseExpr(tc.name, b)
		if d := cmp.Diff(tc.want, got); d != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", tc.name, err, d)
		}
	}
}
