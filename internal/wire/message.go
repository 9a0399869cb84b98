// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"io"
	"net/netip"
)

// ReadRequest reads and checks the request at the start of a flow stream.
func ReadRequest(r io.Reader) (FlowRequest, error) {
	body, err := readFrame(r, MaxRequestFrame)
	if err != nil {
		return FlowRequest{}, fmt.Errorf("flow request: %w", err)
	}
	var q FlowRequest
	if err := decode(body, &q); err != nil {
		return FlowRequest{}, fmt.Errorf("flow request: %w", err)
	}
	if err := q.check(); err != nil {
		return FlowRequest{}, fmt.Errorf("flow request: %w", err)
	}
	return q, nil
}

// WriteRequest writes q in a single Write. Zones are left out: they are names of the host's
// interfaces, which mean nothing in the guest and on Windows are any text.
func WriteRequest(w io.Writer, q FlowRequest) error {
	q.Peer, q.At = unzoned(unmapPort(q.Peer)), unzoned(unmapPort(q.At))
	return writeFrame(w, &q, MaxRequestFrame)
}

func unzoned(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().WithZone(""), a.Port())
}

// ReadReply reads and checks the answer to a flow request.
func ReadReply(r io.Reader) (FlowReply, error) {
	body, err := readFrame(r, MaxRequestFrame)
	if err != nil {
		return FlowReply{}, fmt.Errorf("flow reply: %w", err)
	}
	var p FlowReply
	if err := decode(body, &p); err != nil {
		return FlowReply{}, fmt.Errorf("flow reply: %w", err)
	}
	if err := p.check(); err != nil {
		return FlowReply{}, fmt.Errorf("flow reply: %w", err)
	}
	p.Reason = oneLine(p.Reason)
	return p, nil
}

// WriteReply writes p in a single Write. Its reason is truncated to MaxReason.
func WriteReply(w io.Writer, p FlowReply) error {
	p.Reason = truncate(p.Reason, MaxReason)
	return writeFrame(w, &p, MaxRequestFrame)
}
