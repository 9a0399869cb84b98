// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"net"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/publish/ask"
)

// arrival is a connection that was accepted. Close does not wait, because the goroutine
// that accepts calls it.
type arrival struct{ *net.UnixConn }

// Close implements net.Conn.
func (a arrival) Close() error {
	go ask.CloseClient(a.UnixConn)
	return nil
}

// arrivals is a listener whose connections are arrivals.
type arrivals struct{ net.Listener }

// Accept implements net.Listener.
func (l arrivals) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return arrival{conn.(*net.UnixConn)}, nil
}

// waitAtMost waits for a group, but no longer than d.
func waitAtMost(group *sync.WaitGroup, d time.Duration) {
	done := make(chan struct{})
	go func() {
		group.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(d):
	}
}
