// SPDX-License-Identifier: Apache-2.0

//go:build linux

package dropin

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/config/rules"
)

const (
	wslProxy = "unix:///run/wsl-proxy.sock"
	gateway  = "http://gateway.rancher-desktop.internal:80"

	defaultTap = "192.168.127.2"
)

// options are the flags of Rancher Desktop's agents, of all their generations.
type options struct {
	debug, iptables, kubernetes, docker, containerd, privileged, admin bool

	kubeconfig, containerdSock, vtunnelAddr, serviceAddr, apiPort, tapAddr string

	given map[string]bool
}

func parse(args []string, out io.Writer) (options, error) {
	o := options{given: make(map[string]bool)}
	fs := flag.NewFlagSet(Name, flag.ContinueOnError)
	var complaint strings.Builder // the error says it already
	fs.SetOutput(&complaint)
	fs.BoolVar(&o.debug, "debug", false, "display debug output")
	fs.StringVar(&o.kubeconfig, "kubeconfig", "/etc/rancher/k3s/k3s.yaml", "path to kubeconfig")
	fs.BoolVar(&o.iptables, "iptables", true, "publish ports that are only NAT rules")
	fs.BoolVar(&o.kubernetes, "kubernetes", false, "publish the ports of Kubernetes Services")
	fs.BoolVar(&o.docker, "docker", false, "publish the ports of Docker's containers")
	fs.BoolVar(&o.containerd, "containerd", false, "publish the ports of containerd's containers")
	fs.StringVar(&o.containerdSock, "containerdSock", "/run/k3s/containerd/containerd.sock", "path of containerd's socket")
	fs.StringVar(&o.vtunnelAddr, "vtunnelAddr", "127.0.0.1:3040", "address of the vtunnel peer, IP:PORT")
	fs.BoolVar(&o.privileged, "privilegedService", false, "publish through vtunnel and the privileged service")
	fs.StringVar(&o.serviceAddr, "k8sServiceListenerAddr", "0.0.0.0",
		"address for Kubernetes Services on the host, 0.0.0.0 or 127.0.0.1")
	fs.BoolVar(&o.admin, "adminInstall", false, "Rancher Desktop is installed by an administrator")
	fs.StringVar(&o.apiPort, "k8sAPIPort", "6443", "port of the Kubernetes API, which wsl-proxy always publishes")
	fs.StringVar(&o.tapAddr, "tap-interface-ip", defaultTap, "address of the guest in the virtual network")
	err := fs.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		_, _ = fmt.Fprint(out, complaint.String())
		return o, err
	}
	if err != nil {
		return o, fmt.Errorf("%w (see -help)", err)
	}
	if fs.NArg() > 0 {
		return o, fmt.Errorf("argument %q: want flags alone; a flag with a value is written -flag=value", fs.Arg(0))
	}
	fs.Visit(func(f *flag.Flag) { o.given[f.Name] = true })
	return o, o.check()
}

// check looks at each flag alone.
func (o options) check() error {
	if o.serviceAddr != "0.0.0.0" && o.serviceAddr != "127.0.0.1" {
		return fmt.Errorf("-k8sServiceListenerAddr %q: want 0.0.0.0 or 127.0.0.1", o.serviceAddr)
	}
	if n, err := strconv.ParseUint(o.apiPort, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("-k8sAPIPort %q: want a port from 1 to 65535", o.apiPort)
	}
	if a, err := netip.ParseAddr(o.tapAddr); err != nil || !a.Is4() {
		return fmt.Errorf("-tap-interface-ip %q: want an IPv4 address", o.tapAddr)
	}
	return nil
}

// plan is what the flags come to.
type plan struct {
	mode  string   // human-readable
	flags []string // of fairlead's agent
	rules []rules.Rule
}

// translate makes a plan, or returns which flags contradict each other. Three
// installations are known:
//
//	                    vtunnel       listener        virtual network
//	                    (admin)       (non-admin)     (both)
//	-privilegedService  on            off             off
//	-docker/-containerd one of them   none            one of them
//	-iptables           either        on              either
func (o options) translate() (plan, error) {
	engine, err := o.engine()
	if err != nil {
		return plan{}, err
	}
	p, err := o.installation(engine)
	if err != nil {
		return plan{}, err
	}
	var sources []string
	// With the tunnel, WSL relays plain sockets itself.
	if !o.privileged {
		sources = append(sources, "socket")
	}
	if o.iptables {
		sources = append(sources, "nat")
	}
	if engine != "" {
		sources = append(sources, engine)
	}
	if o.kubernetes {
		sources = append(sources, "kube")
		p.flags = append(p.flags, "--kubeconfig="+o.kubeconfig)
	}
	if o.containerd {
		p.flags = append(p.flags, "--containerd-socket="+o.containerdSock)
	}
	p.flags = append(p.flags, "--source="+strings.Join(sources, ","))
	if o.debug {
		p.flags = append(p.flags, "--log-level=debug")
	}
	// Without an administrator only the host's loopback may be opened.
	if !o.admin && !o.privileged {
		p.flags = append(p.flags, "--expose=loopback")
		return p, nil
	}
	p.flags = append(p.flags, "--expose=all")
	if o.serviceAddr == "127.0.0.1" {
		p.rules = []rules.Rule{{
			Name: "-k8sServiceListenerAddr", Match: rules.Match{Sources: []string{"kube"}}, HostAddress: rules.Loopback(),
		}}
	}
	return p, nil
}

// engine returns the source of the engine that runs, empty if none does.
func (o options) engine() (string, error) {
	switch {
	case o.docker && o.containerd:
		return "", errors.New("-docker and -containerd: want one of them, the engine that Rancher Desktop runs")
	case o.docker:
		return "docker", nil
	case o.containerd:
		return "containerd", nil
	}
	return "", nil
}

// installation returns the plan with the mode and the sink of the installation.
func (o options) installation(engine string) (plan, error) {
	switch {
	case o.privileged && engine == "":
		return plan{}, errors.New("-privilegedService: want -docker or -containerd with it")
	case o.privileged:
		host, port, err := net.SplitHostPort(o.vtunnelAddr)
		if n, perr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || perr != nil || n == 0 {
			return plan{}, fmt.Errorf("-vtunnelAddr %q: -privilegedService wants IP:PORT", o.vtunnelAddr)
		}
		return plan{mode: "vtunnel", flags: []string{"--sink=vtunnel=tcp://" + o.vtunnelAddr, bridgeLoopback}}, nil
	case engine != "":
		return plan{mode: "virtual network", flags: o.virtualNetwork()}, nil
	case o.given["k8sAPIPort"] || o.given["tap-interface-ip"] || !o.iptables:
		return plan{}, errors.New("want -docker or -containerd, or for a network without a tunnel -iptables alone")
	}
	return plan{mode: "listener", flags: []string{"--sink=listener"}}, nil
}

// virtualNetwork names the two peers there: the host-switch for Windows, and
// wsl-proxy for the other distributions.
func (o options) virtualNetwork() []string {
	forwarder, proxy := "--sink=gvproxy", "--sink=vtunnel="+wslProxy
	if o.tapAddr != defaultTap {
		forwarder += "=" + gateway + "?guest=" + o.tapAddr
	}
	if o.kubernetes {
		proxy += "?static=" + o.apiPort + "/tcp"
	}
	return []string{forwarder, proxy, bridgeLoopback}
}

// bridgeLoopback opens servers of the guest's loopback, as Rancher Desktop's own agent
// does.
const bridgeLoopback = "--bridge-loopback"
