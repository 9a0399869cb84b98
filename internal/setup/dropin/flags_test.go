// SPDX-License-Identifier: Apache-2.0

//go:build linux

package dropin

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/port"
)

func TestFlagsOfBothGenerationsBecomeOurs(t *testing.T) {
	for _, tt := range []struct {
		name, args string
		want       string
		rules      int
	}{
		{
			"virtual network, Docker", "-docker=true -containerd=false -kubernetes=false -adminInstall=false",
			"--sink=gvproxy --sink=vtunnel=unix:///run/wsl-proxy.sock --bridge-loopback --source=socket,nat,docker --expose=loopback", 0,
		},
		{
			"virtual network, containerd and Kubernetes, by an administrator",
			"-debug -containerd -kubernetes -adminInstall -k8sAPIPort=6444 -k8sServiceListenerAddr=127.0.0.1 -iptables=false",
			"--sink=gvproxy --sink=vtunnel=unix:///run/wsl-proxy.sock?static=6444/tcp --bridge-loopback --kubeconfig=/etc/rancher/k3s/k3s.yaml " +
				"--containerd-socket=/run/k3s/containerd/containerd.sock --source=socket,containerd,kube --log-level=debug --expose=all", 1,
		},
		{
			"another address in the virtual network", "--docker -tap-interface-ip 192.168.128.2",
			"--sink=gvproxy=http://gateway.rancher-desktop.internal:80?guest=192.168.128.2 --sink=vtunnel=unix:///run/wsl-proxy.sock --bridge-loopback " +
				"--source=socket,nat,docker --expose=loopback", 0,
		},
		{
			"vtunnel", "-privilegedService -containerd -iptables=false -vtunnelAddr=127.0.0.1:3041 -containerdSock /run/c.sock -kubernetes -kubeconfig /k",
			"--sink=vtunnel=tcp://127.0.0.1:3041 --bridge-loopback --kubeconfig=/k --containerd-socket=/run/c.sock --source=containerd,kube --expose=all", 0,
		},
		{
			"vtunnel with NAT rules", "-privilegedService=true -docker=true",
			"--sink=vtunnel=tcp://127.0.0.1:3040 --bridge-loopback --source=nat,docker --expose=all", 0,
		},
		{
			"listeners", "-kubernetes=true -iptables=true",
			"--sink=listener --kubeconfig=/etc/rancher/k3s/k3s.yaml --source=socket,nat,kube --expose=loopback", 0,
		},
		{"no flag at all", "", "--sink=listener --source=socket,nat --expose=loopback", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o, err := parse(strings.Fields(tt.args), new(bytes.Buffer))
			if err != nil {
				t.Fatal(err)
			}
			p, err := o.translate()
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.Fields(tt.want); !slices.Equal(p.flags, want) {
				t.Errorf("flags = %q\nwant    %q", p.flags, want)
			}
			if len(p.rules) != tt.rules {
				t.Errorf("rules = %+v", p.rules)
			}
			// And what they become is a configuration.
			fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
			new(config.Agent).Flags(fs)
			if err := fs.Parse(p.flags); err != nil {
				t.Fatal(err)
			}
			none := func(string) (string, bool) { return "", false }
			file := t.TempDir() + "/agent.yaml"
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := config.LoadAgent(file, fs, none, p.rules...); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestServicesOnLoopback(t *testing.T) {
	o, err := parse(strings.Fields("-docker -kubernetes -adminInstall -k8sServiceListenerAddr=127.0.0.1"), new(bytes.Buffer))
	if err != nil {
		t.Fatal(err)
	}
	p, err := o.translate()
	if err != nil {
		t.Fatal(err)
	}
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	new(config.Agent).Flags(fs)
	if err := fs.Parse(p.flags); err != nil {
		t.Fatal(err)
	}
	file := t.TempDir() + "/agent.yaml"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.LoadAgent(file, fs, nil, p.rules...)
	if err != nil {
		t.Fatal(err)
	}
	for source, want := range map[string]string{"kube": "127.0.0.1:30080", "docker": "0.0.0.0:30080"} {
		pub := port.Publication{
			Fact:    port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 30080}},
			Origins: []port.OriginInfo{{Origin: port.Origin{Source: source, ID: "1"}}},
		}
		if d := cfg.Rules.Decide(pub); !d.Allow || len(d.Host) != 1 || d.Host[0].String() != want {
			t.Errorf("%s: %+v, want %s", source, d, want)
		}
	}
}

func TestContradictingFlags(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"-docker -containerd", "-docker and -containerd: want one of them"},
		{"-privilegedService", "want -docker or -containerd"},
		{"-privilegedService -docker -containerd", "want one of them"},
		{"-privilegedService -docker -vtunnelAddr=", `-vtunnelAddr ""`},
		{"-privilegedService -docker -vtunnelAddr=127.0.0.1", "wants IP:PORT"},
		{"-iptables=false", "want -docker or -containerd"},
		{"-k8sAPIPort=6443", "want -docker or -containerd"},
		{"-docker -k8sServiceListenerAddr=10.0.0.1", "want 0.0.0.0 or 127.0.0.1"},
		{"-docker -k8sAPIPort=http", "want a port from 1 to 65535"},
		{"-docker -tap-interface-ip=::1", "want an IPv4 address"},
		{"-docker true", `argument "true"`},
		{"-dokcer", "flag provided but not defined: -dokcer (see -help)"},
	} {
		var stderr bytes.Buffer
		if code := Run(context.Background(), strings.Fields(tt.args), &stderr, nil); code != exitUsage {
			t.Errorf("%s: exit code %d", tt.args, code)
		}
		if got := stderr.String(); !strings.Contains(got, tt.want) || strings.Count(got, "\n") != 1 {
			t.Errorf("%s: said %q, want %q on one line", tt.args, got, tt.want)
		}
	}
}

func TestHelpIsNoError(t *testing.T) {
	var stderr bytes.Buffer
	if code := Run(context.Background(), []string{"-help"}, &stderr, nil); code != exitOK || !strings.Contains(stderr.String(), "-tap-interface-ip") {
		t.Errorf("exit code %d, said %q", code, stderr.String())
	}
}
