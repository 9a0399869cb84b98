// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
)

// A capability is what can be observed by more than one mechanism.
type capability struct {
	name string
	// methods in order of preference; the last always works.
	methods []method
}

// method is one mechanism.
type method struct {
	name   string
	lost   string   // what it does not see, for people
	hooks  []string // names of programs, in the order in which they are attached: stop before start
	always bool     // tried whatever Options.Methods says
}

// last reports whether the method needs nothing attached.
func (r *method) last() bool { return len(r.hooks) == 0 }

// attacher attaches all hooks, or none.
type attacher interface {
	attach(hooks []string) (io.Closer, error)
}

// capabilities returns the attach chains, best method first. boundDump says that
// the kernel dumps sockets that are only bound.
//
// For binds, cgroup hooks stand before kprobes: they can make a socket's
// cookie, which kprobes cannot, so no dump is needed to understand them.
func capabilities(boundDump bool) []capability {
	noBound := ""
	if !boundDump {
		noBound = "TCP sockets that are bound and do not listen are not seen: this kernel does not dump them"
	}
	// These know no cookie, so a dump must find the socket.
	bindKprobes := []string{"tcp_destroy", "tcp_bind4_exit", "tcp_bind6_exit", "tcp_bind4_enter", "tcp_bind6_enter"}
	const late = "changes are seen only at the next poll, and what lives shorter never"
	return []capability{
		{name: TCPListen, methods: []method{
			{name: MethodFentry, hooks: []string{"tcp_state_stop", "tcp_listen_start"}},
			{name: MethodKprobe, hooks: []string{"tcp_state_stop", "tcp_inet_hash", "tcp_inet6_hash"}},
			{
				name: MethodTPBTF, hooks: []string{"tcp_state"},
				lost: "a listener that did not bind is seen a dump later",
			},
			{name: MethodPoll, lost: late},
		}},
		{name: TCPBind, methods: slices.DeleteFunc([]method{
			{
				name: MethodFentry, lost: "since Linux 6.6, MPTCP sockets that are bound only are seen by an audit",
				hooks: []string{"tcp_destroy", "tcp_inet_bind", "tcp_inet6_bind"},
			},
			{name: MethodCgroup, hooks: []string{"tcp_destroy", "tcp_post_bind4", "tcp_post_bind6"}},
			{name: MethodKprobe, lost: "sockets are seen a dump later", hooks: bindKprobes},
			{name: MethodPoll, lost: cmp.Or(noBound, late)},
		}, func(r method) bool { return r.name == MethodKprobe && !boundDump })},
		{name: UDPBind, methods: []method{
			{name: MethodFentry, hooks: []string{"udp_unhash", "udp_inet_bind", "udp_inet6_bind"}},
			{
				name: MethodCgroup, lost: "sockets of the kernel itself (tunnels) are seen to end only by an audit",
				hooks: []string{"udp_release", "udp_post_bind4", "udp_post_bind6"},
			},
			{
				name: MethodKprobe, lost: "sockets are seen a dump later",
				hooks: []string{"udp_unhash_kp", "udp_bind4_exit", "udp_bind6_exit", "udp_bind4_enter", "udp_bind6_enter"},
			},
			{name: MethodPoll, lost: late},
		}},
		{name: UDPConnect, methods: []method{
			{name: MethodFentry, hooks: []string{"udp_connect4", "udp_connect6"}},
			{
				name: MethodCgroup, lost: "a bound socket that gets a peer is seen a dump later",
				hooks: []string{"udp_connecting4", "udp_connecting6"},
			},
			{
				name:  MethodKprobe,
				hooks: []string{"udp_conn4_exit", "udp_conn6_exit", "udp_conn4_enter", "udp_conn6_enter"},
			},
			{name: MethodAudit, lost: "a bound socket that gets a peer is seen only by an audit"},
		}},
		{name: UDPDump, methods: []method{
			{name: MethodIter, hooks: []string{"udp_explicit"}, always: true},
			{
				name: MethodDiag,
				lost: "a wildcard socket on an ephemeral port that was bound before the start counts as a client",
			},
		}},
	}
}

// attached is what a chain came to.
type attached struct {
	Method
	hooks io.Closer // nil on the last method
}

// attachChain tries the methods of a capability that are allowed (none named: all)
// in order; any error leads to the next one. The last method needs nothing. Where
// a is nil only that is left, and cause says why.
func attachChain(c capability, a attacher, cause error, allowed []string) attached {
	var errs []error
	if a == nil && cause != nil {
		errs = append(errs, cause)
	}
	for _, r := range c.methods {
		var hooks io.Closer
		if !r.last() {
			if a == nil || len(allowed) > 0 && !r.always && !slices.Contains(allowed, r.name) {
				continue
			}
			var err error
			if hooks, err = a.attach(r.hooks); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", r.name, err))
				continue
			}
		}
		return attached{hooks: hooks, Method: Method{
			Capability: c.name, Name: r.name, Lost: r.lost, Err: errors.Join(errs...),
		}}
	}
	panic("observer: capability " + c.name + " has no last method")
}
