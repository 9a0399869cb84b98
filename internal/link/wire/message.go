// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"io"
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
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
	if err := asMalformed(q.check()); err != nil {
		return FlowRequest{}, fmt.Errorf("flow request: %w", err)
	}
	return q, nil
}

// WriteRequest writes q in a single Write. Zones are left out: they are names of the host's
// interfaces, which mean nothing in the guest and on Windows are any text.
func WriteRequest(w io.Writer, q FlowRequest) error {
	q.Peer, q.At = unzoned(port.Unmap(q.Peer)), unzoned(port.Unmap(q.At))
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
	if err := asMalformed(p.check()); err != nil {
		return FlowReply{}, fmt.Errorf("flow reply: %w", err)
	}
	p.Reason = port.OneLine(p.Reason)
	return p, nil
}

// WriteReply writes p in a single Write. Its reason is truncated to port.MaxReason.
func WriteReply(w io.Writer, p FlowReply) error {
	p.Reason = port.Cut(p.Reason, port.MaxReason)
	return writeFrame(w, &p, MaxRequestFrame)
}
