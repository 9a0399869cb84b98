// SPDX-License-Identifier: Apache-2.0

package link

import (
	"net"
	"testing"

	"github.com/mdlayher/vsock"
)

// fromCID is a connection whose remote address is a vsock context.
type fromCID struct {
	net.Conn
	cid uint32
}

func (c fromCID) RemoteAddr() net.Addr { return &vsock.Addr{ContextID: c.cid, Port: 900} }

func TestPeerCID(t *testing.T) {
	for _, tt := range []struct {
		cid   uint32
		allow []uint32
		ok    bool
	}{{CIDHost, nil, true}, {CIDLocal, nil, false}, {3, nil, false}, {CIDLocal, []uint32{CIDLocal}, true}, {CIDHost, []uint32{3, 4}, false}, {4, []uint32{3, 4}, true}} {
		l, sc := scriptedListener(t)
		if len(tt.allow) > 0 {
			l.o.AllowCIDs = tt.allow
		}
		l.start()
		a, b := sockets(t)
		sc.next <- fromCID{b, tt.cid}
		host, err := Client(ctx10(t), a, opts(t, RoleHost))
		if (err == nil) != tt.ok {
			t.Errorf("cid %d, allowed %v: %v", tt.cid, tt.allow, err)
		}
		if err == nil {
			agent, err := l.Accept(ctx10(t))
			if err != nil {
				t.Fatal(err)
			}
			if p := agent.Peer(); p.Proof != "token" || p.Address == "" {
				t.Errorf("peer %+v", p)
			}
			_, _ = host.Close(), agent.Close()
			continue
		}
		if r := refusal(t, err); r.Code != RefusedCID || !r.Remote {
			t.Error(r)
		}
		_ = l.Close()
		if n := l.Refused()[RefusedCID]; n != 1 {
			t.Errorf("counted %d", n)
		}
	}
}
