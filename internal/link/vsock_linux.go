// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"net"

	"github.com/mdlayher/vsock"
)

func listenVsock(cid, port uint32) (net.Listener, error) {
	return vsock.ListenContextID(cid, port, nil)
}

func dialVsock(ctx context.Context, cid, port uint32) (net.Conn, error) {
	return vsock.DialContext(ctx, cid, port, nil)
}

// addrCID returns the context id of a vsock address.
func addrCID(a net.Addr) (cid uint32, ok bool) {
	v, ok := a.(*vsock.Addr)
	if !ok {
		return 0, false
	}
	return v.ContextID, true
}
