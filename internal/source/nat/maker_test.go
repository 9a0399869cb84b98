// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func TestMaker(t *testing.T) {
	iptables := tableID{family: famIP, name: "nat"}
	for name, tc := range map[string]struct {
		table  tableID
		chains []string // from the base chain to the rule
		want   port.Maker
	}{
		"docker, iptables":  {iptables, []string{"PREROUTING", "DOCKER"}, port.MakerDocker},
		"docker, nftables":  {tableID{family: famIP6, name: "docker-bridges"}, []string{"nat-PREROUTING", "nat-prerouting-and-output"}, port.MakerDocker},
		"portmap, iptables": {iptables, []string{"PREROUTING", "CNI-HOSTPORT-DNAT", "CNI-DN-5ea853e439011b304446e"}, port.MakerCNI},
		"portmap, nftables": {tableID{family: famIP, name: "cni_hostport"}, []string{"prerouting", "hostports_all", "hostports"}, port.MakerCNI},
		"kube-proxy, iptables": {iptables,
			[]string{"PREROUTING", "KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-EXT-2MBSHUE5GJKPO227", "KUBE-SVC-2MBSHUE5GJKPO227", "KUBE-SEP-2VUEGBU7WA252LTN"}, port.MakerKubeProxy},
		"kube-proxy, nftables":        {tableID{family: famIP, name: "kube-proxy"}, []string{"nat-prerouting", "services", "service-1", "endpoint-1"}, port.MakerKubeProxy},
		"by hand":                     {tableID{family: famInet, name: "mine"}, []string{"pre"}, ""},
		"by hand, in Docker's table":  {iptables, []string{"PREROUTING"}, ""},
		"a chain named like Docker's": {iptables, []string{"PREROUTING", "DOCKER-MINE"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			tb := &tableSnap{id: tc.table}
			for i, name := range tc.chains {
				c := &chainSnap{name: name}
				if i == 0 {
					c.hook = &hookPoint{num: hookPrerouting, prio: -100, typ: "nat"}
				}
				tb.chains = append(tb.chains, c)
			}
			end := rawExpr("redir")
			if tc.table.family == famIP {
				end = xDNAT("10.0.0.1", 80)
			}
			for i, c := range tb.chains {
				raw := join(xTCP(), xDport(80), end)
				if i+1 < len(tb.chains) {
					raw = xVerdict(vJump, tb.chains[i+1].name)
				}
				c.rules = []ruleSnap{{handle: uint64(i + 1), raw: raw}}
			}
			bs := compiled(&snapshot{tables: []*tableSnap{tb}}).bindings()
			if len(bs) == 0 {
				t.Fatal("nothing is published")
			}
			for _, b := range bs {
				if b.Maker != tc.want {
					t.Errorf("%s: maker %q, want %q", b.Key, b.Maker, tc.want)
				}
			}
		})
	}
}
