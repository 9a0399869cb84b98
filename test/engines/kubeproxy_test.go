// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/source/kube"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// A pod's server is reachable through a node port, a load balancer's address and an
// external IP, in both modes of kube-proxy: from the guest, and from the host through
// the agent and its host peer.
func TestReachServices(t *testing.T) {
	for i, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			c := startCluster(t)
			pod := startPod(t, fmt.Sprintf("192.168.77.%d", 10+i))
			c.startProxy(mode)
			ports := []obj{{"name": "t", "protocol": "TCP", "port": 8080}, {"name": "u", "protocol": "UDP", "port": 8080}}
			c.service("web", "LoadBalancer", nil, svcPort("t", "TCP", 80, 30080), svcPort("u", "UDP", 80, 30080))
			c.ingress("web", "192.168.77.60")
			c.endpoints("web", "server", pod, ports...)
			c.service("ext", "ClusterIP", obj{"externalIPs": []string{"192.168.77.50"}}, svcPort("t", "TCP", 81, 0), svcPort("u", "UDP", 81, 0))
			c.endpoints("ext", "server", pod, ports...)
			keys := []string{
				"tcp 0.0.0.0:30080 web", "udp 0.0.0.0:30080 web", "tcp 192.168.77.60:80 web", "udp 192.168.77.60:80 web",
				"tcp 192.168.77.50:81 ext", "udp 192.168.77.50:81 ext",
			}
			r, stop := follow(t, kubeSource(t, kube.Options{Kubeconfigs: []string{c.Kubeconfig}}))
			want(t, r, keys...)
			eventually(t, func() error {
				for _, b := range r.bindings() {
					if len(b.Dial) == 0 {
						return errors.New("endpoints are not known yet")
					}
				}
				return nil
			})
			for _, b := range r.bindings() {
				// Not the pod itself: the address that kube-proxy serves must answer.
				b.Dial = slices.DeleteFunc(slices.Clone(b.Dial), func(a netip.AddrPort) bool { return a.Addr() == netip.MustParseAddr(pod) })
				hears := func() error {
					got, err := reach(b)
					if err == nil && got != podSays {
						err = fmt.Errorf("%s says %q", b.Key, got)
					}
					return err
				}
				eventually(t, hears)
				// The node's own address answers in both modes, loopback only in one.
				if b.Port == 30080 {
					b.Dial = []netip.AddrPort{netip.MustParseAddrPort(nodeAddr + ":30080")}
					eventually(t, hears)
				}
			}
			stop()

			p := startPeers(t, "--source", "socket,nat,kube", "--kubeconfig", c.Kubeconfig)
			for _, key := range keys {
				key, name := key[:strings.LastIndexByte(key, ' ')], key[strings.LastIndexByte(key, ' ')+1:]
				p.reach(key, podSays)
				p.owned(key, port.OwnerService, name)
			}
			// The ports of kube-proxy's rules are owned by the Service, not by the pod
			// that they send to. Rules for addresses of other nodes publish nothing by
			// themselves.
			p.ruled("30080/tcp", port.OwnerService, "default", "web")
			p.ruled("30080/udp", port.OwnerService, "default", "web")
			p.small("with Kubernetes, under " + mode)
			c.must("DELETE", cluster.Services+"/web", nil)
			p.gone("tcp 0.0.0.0:30080")
			p.gone("udp 192.168.77.60:80")
			p.reach("tcp 192.168.77.50:81", podSays)
		})
	}
}

// startProxy starts kube-proxy for a node that is this guest.
func (c *kubernetes) startProxy(mode string) {
	t := c.t
	t.Helper()
	var args []string
	if err := patient(func() (err error) {
		args, err = c.Proxy(context.Background(), enclave.NodeAddr, mode)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = try(args[0], append([]string{"--cleanup"}, args[1:]...)...) })
	start(t, args[0], args[1:]...) // ends before the cleanup: it would write its rules again
}

// startPod makes a pod on this node's network.
func startPod(t testing.TB, addr string) string {
	t.Helper()
	pod, err := cluster.NewPod(nil, "nodebr", enclave.NodeAddr, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pod.Close)
	return addr
}

const podSays = cluster.Says
