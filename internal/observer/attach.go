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
	// rungs in order of preference; the last always works.
	rungs []rung
}

// rung is one mechanism.
type rung struct {
	name   string
	lost   string   // what it does not see, for people
	hooks  []string // names of programs, in the order in which they are attached: stop before start
	always bool     // tried whatever Options.Rungs says
}

// last reports whether the rung needs nothing attached.
func (r *rung) last() bool { return len(r.hooks) == 0 }

// attacher attaches all hooks, or none.
type attacher interface {
	attach(hooks []string) (io.Closer, error)
}

// capabilities returns the attach chains, best rung first. boundDump says that
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
		{name: TCPListen, rungs: []rung{
			{name: RungFentry, hooks: []string{"tcp_state_stop", "tcp_listen_start"}},
			{name: RungKprobe, hooks: []string{"tcp_state_stop", "tcp_inet_hash", "tcp_inet6_hash"}},
			{
				name: RungTPBTF, hooks: []string{"tcp_state"},
				lost: "a listener that did not bind is seen a dump later",
			},
			{name: RungPoll, lost: late},
		}},
		{name: TCPBind, rungs: slices.DeleteFunc([]rung{
			{
				name: RungFentry, lost: "since Linux 6.6, MPTCP sockets that are bound only are seen by an audit",
				hooks: []string{"tcp_destroy", "tcp_inet_bind", "tcp_inet6_bind"},
			},
			{name: RungCgroup, hooks: []string{"tcp_destroy", "tcp_post_bind4", "tcp_post_bind6"}},
			{name: RungKprobe, lost: "sockets are seen a dump later", hooks: bindKprobes},
			{name: RungPoll, lost: cmp.Or(noBound, late)},
		}, func(r rung) bool { return r.name == RungKprobe && !boundDump })},
		{name: UDPBind, rungs: []rung{
			{name: RungFentry, hooks: []string{"udp_unhash", "udp_inet_bind", "udp_inet6_bind"}},
			{
				name: RungCgroup, lost: "sockets of the kernel itself (tunnels) are seen to end only by an audit",
				hooks: []string{"udp_release", "udp_post_bind4", "udp_post_bind6"},
			},
			{
				name: RungKprobe, lost: "sockets are seen a dump later",
				hooks: []string{"udp_unhash_kp", "udp_bind4_exit", "udp_bind6_exit", "udp_bind4_enter", "udp_bind6_enter"},
			},
			{name: RungPoll, lost: late},
		}},
		{name: UDPConnect, rungs: []rung{
			{name: RungFentry, hooks: []string{"udp_connect4", "udp_connect6"}},
			{
				name: RungCgroup, lost: "a bound socket that gets a peer is seen a dump later",
				hooks: []string{"udp_connecting4", "udp_connecting6"},
			},
			{
				name:  RungKprobe,
				hooks: []string{"udp_conn4_exit", "udp_conn6_exit", "udp_conn4_enter", "udp_conn6_enter"},
			},
			{name: RungAudit, lost: "a bound socket that gets a peer is seen only by an audit"},
		}},
		{name: UDPDump, rungs: []rung{
			{name: RungIter, hooks: []string{"udp_explicit"}, always: true},
			{
				name: RungDiag,
				lost: "a wildcard socket on an ephemeral port that was bound before the start counts as a client",
			},
		}},
	}
}

// attached is what a chain came to.
type attached struct {
	Rung
	hooks io.Closer // nil on the last rung
}

// attachChain tries the rungs of a capability that are allowed (none named: all)
// in order; any error leads to the next one. The last rung needs nothing. Where
// a is nil only that is left, and cause says why.
func attachChain(c capability, a attacher, cause error, allowed []string) attached {
	var errs []error
	if a == nil && cause != nil {
		errs = append(errs, cause)
	}
	for _, r := range c.rungs {
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
		return attached{hooks: hooks, Rung: Rung{
			Capability: c.name, Name: r.name, Lost: r.lost, Err: errors.Join(errs...),
		}}
	}
	panic("observer: capability " + c.name + " has no last rung")
}
