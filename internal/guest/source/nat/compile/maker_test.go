// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"testing"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

func TestMaker(t *testing.T) {
	iptables := ruleset.TableID{Family: ruleset.FamilyIP, Name: "nat"}
	for name, tc := range map[string]struct {
		table  ruleset.TableID
		chains []string // from the base chain to the rule
		want   port.Maker
	}{
		"docker, iptables":  {iptables, []string{"PREROUTING", "DOCKER"}, port.MakerDocker},
		"docker, swarm":     {iptables, []string{"PREROUTING", "DOCKER-INGRESS"}, port.MakerSwarm},
		"docker, nftables":  {ruleset.TableID{Family: ruleset.FamilyIP6, Name: "docker-bridges"}, []string{"nat-PREROUTING", "nat-prerouting-and-output"}, port.MakerDocker},
		"portmap, iptables": {iptables, []string{"PREROUTING", "CNI-HOSTPORT-DNAT", "CNI-DN-5ea853e439011b304446e"}, port.MakerCNI},
		"portmap, nftables": {ruleset.TableID{Family: ruleset.FamilyIP, Name: "cni_hostport"}, []string{"prerouting", "hostports_all", "hostports"}, port.MakerCNI},
		"kube-proxy, iptables": {iptables,
			[]string{"PREROUTING", "KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-EXT-2MBSHUE5GJKPO227", "KUBE-SVC-2MBSHUE5GJKPO227", "KUBE-SEP-2VUEGBU7WA252LTN"}, port.MakerKubeProxy},
		"kube-proxy, nftables":        {ruleset.TableID{Family: ruleset.FamilyIP, Name: "kube-proxy"}, []string{"nat-prerouting", "services", "service-1", "endpoint-1"}, port.MakerKubeProxy},
		"netavark, iptables":          {iptables, []string{"PREROUTING", "NETAVARK-HOSTPORT-DNAT", "NETAVARK-DN-1D8721804F16F"}, port.MakerNetavark},
		"netavark, nftables":          {ruleset.TableID{Family: ruleset.FamilyInet, Name: "netavark"}, []string{"PREROUTING", "NETAVARK-HOSTPORT-DNAT"}, port.MakerNetavark},
		"by hand":                     {ruleset.TableID{Family: ruleset.FamilyInet, Name: "mine"}, []string{"pre"}, port.MakerUnknown},
		"by hand, in Docker's table":  {iptables, []string{"PREROUTING"}, port.MakerUnknown},
		"a chain named like Docker's": {iptables, []string{"PREROUTING", "DOCKER-MINE"}, port.MakerUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			tb := &ruleset.Table{ID: tc.table}
			for i, name := range tc.chains {
				c := &ruleset.Chain{Name: name}
				if i == 0 {
					c.Hook = &ruleset.Hook{Num: ruleset.HookPrerouting, Priority: -100, Type: "nat"}
				}
				tb.Chains = append(tb.Chains, c)
			}
			end := natrules.Expr("redir")
			if tc.table.Family == ruleset.FamilyIP {
				end = natrules.DNAT("10.0.0.1", 80)
			}
			for i, c := range tb.Chains {
				raw := natrules.Join(natrules.TCP(), natrules.Dport(80), end)
				if i+1 < len(tb.Chains) {
					raw = natrules.Verdict(ruleset.VerdictJump, tb.Chains[i+1].Name)
				}
				c.Rules = []ruleset.Rule{{Handle: uint64(i + 1), Raw: raw}}
			}
			bs := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}).Bindings()
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
