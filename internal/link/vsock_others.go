// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package link

import (
	"context"
	"fmt"
	"net"
	"runtime"
)

func errNoVsock() error {
	return fmt.Errorf("vsock is not available on %s: use unix:///PATH", runtime.GOOS)
}

func listenVsock(uint32, uint32) (net.Listener, error) { return nil, errNoVsock() }

func dialVsock(context.Context, uint32, uint32) (net.Conn, error) { return nil, errNoVsock() }

func addrCID(net.Addr) (cid uint32, ok bool) { return 0, false }
