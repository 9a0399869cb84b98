// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"cmp"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/kernel"
)

// features is what a kernel may lack.
type features struct {
	boundDump bool // it dumps TCP sockets that are only bound (tcp_diag since Linux 6.8)
	mptcpBind bool // MPTCP sockets are bound in a way that no hook sees (since Linux 6.6)
}

// capabilities returns the attach chains, best method first. Hooks that report the end of
// a socket are attached before those that report its start.
//
// For binds, cgroup hooks are preferred to kprobes: they can make a socket's
// cookie, which kprobes cannot, so that no dump is needed to understand them.
func capabilities(has features) []kernel.Capability {
	noBound := ""
	if !has.boundDump {
		noBound = "TCP sockets that are bound and do not listen are not seen: this kernel does not dump them"
	}
	// These know no cookie, so a dump must find the socket.
	bindKprobes := []string{"tcp_destroy", "tcp_bind4_exit", "tcp_bind6_exit", "tcp_bind4_enter", "tcp_bind6_enter"}
	// The end of a connection may come in an interrupt, where the process is not known.
	const unconnected = "a bound socket whose connect(2) failed is seen again only by an audit"
	noConnect := unconnected
	if has.mptcpBind {
		noConnect = "MPTCP sockets that are only bound are seen only by an audit; " + unconnected
	}
	const late = "changes are seen only at the next poll, and shorter-lived sockets never"
	return []kernel.Capability{
		{Name: TCPListen, Choices: []kernel.Choice{
			{Name: kernel.MethodFentry, Hooks: []string{"tcp_state_stop", "tcp_listen_start"}},
			{Name: kernel.MethodKprobe, Hooks: []string{"tcp_state_stop", "tcp_inet_hash", "tcp_inet6_hash"}},
			{
				Name: kernel.MethodTPBTF, Hooks: []string{"tcp_state"},
				Lost: "a listener that did not bind is seen only after a dump",
			},
			{Name: MethodPoll, Lost: late},
		}},
		{Name: TCPBind, Choices: slices.DeleteFunc([]kernel.Choice{
			{
				Name: kernel.MethodFentry, Lost: noConnect,
				Hooks: []string{"tcp_destroy", "tcp_inet_bind", "tcp_inet6_bind"},
			},
			{Name: kernel.MethodCgroup, Lost: unconnected, Hooks: []string{"tcp_destroy", "tcp_post_bind4", "tcp_post_bind6"}},
			{Name: kernel.MethodKprobe, Lost: "sockets are seen only after a dump; " + noConnect, Hooks: bindKprobes},
			{Name: MethodPoll, Lost: cmp.Or(noBound, late)},
		}, func(c kernel.Choice) bool { return c.Name == kernel.MethodKprobe && !has.boundDump })},
		{Name: UDPBind, Choices: []kernel.Choice{
			{Name: kernel.MethodFentry, Hooks: []string{"udp_unhash", "udp_inet_bind", "udp_inet6_bind"}},
			{
				Name: kernel.MethodCgroup, Lost: "the end of the kernel's own sockets (tunnels) is seen only by an audit",
				Hooks: []string{"udp_release", "udp_post_bind4", "udp_post_bind6"},
			},
			{
				Name: kernel.MethodKprobe, Lost: "sockets are seen only after a dump",
				Hooks: []string{"udp_unhash_kp", "udp_bind4_exit", "udp_bind6_exit", "udp_bind4_enter", "udp_bind6_enter"},
			},
			{Name: MethodPoll, Lost: late},
		}},
		{Name: UDPConnect, Choices: []kernel.Choice{
			{Name: kernel.MethodFentry, Hooks: []string{"udp_connect4", "udp_connect6", "udp_unpeered"}},
			{Name: kernel.MethodKprobe, Hooks: []string{
				"udp_conn4_exit", "udp_conn6_exit", "udp_conn4_enter", "udp_conn6_enter",
				"udp_unpeered_exit", "udp_unpeered_enter",
			}},
			{
				// No hook of a cgroup is called when the kernel removes a peer.
				Name: kernel.MethodCgroup, Lost: "a bound socket that gets a peer is seen only after a dump; " +
					"one that had a peer and lost it is seen only by an audit",
				Hooks: []string{"udp_connecting4", "udp_connecting6"},
			},
			{Name: MethodAudit, Lost: "a bound socket that gets a peer, or loses it, is seen only by an audit"},
		}},
		{Name: Device, Choices: []kernel.Choice{
			{Name: kernel.MethodFentry, Hooks: []string{"bind_device"}},
			{Name: kernel.MethodKprobe, Hooks: []string{"bind_device_exit", "bind_device_enter"}},
			{Name: MethodAudit, Lost: "a socket that is bound to an interface after bind(2) or listen(2) is seen so only by an audit"},
		}},
		{Name: OwnerName, Choices: []kernel.Choice{
			{Name: kernel.MethodTPBTF, Hooks: []string{"process_renamed"}, Always: true},
			{Name: MethodAudit, Lost: "a process that has a socket and gets another name is seen so only by an audit"},
		}},
		{Name: UDPDump, Choices: []kernel.Choice{
			{Name: kernel.MethodIter, Hooks: []string{"udp_explicit"}, Always: true},
			{
				Name: MethodDiag,
				Lost: "a wildcard socket on an ephemeral port counts as a client, unless a hook reported its bind",
			},
		}},
	}
}
