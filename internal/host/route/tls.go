// SPDX-License-Identifier: Apache-2.0

package route

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link/conns"
	"github.com/fairlead/fairlead/internal/port/names"
)

// TLSPort is the port that a name means over TLS whose owner has several.
const TLSPort = 443

// unrecognizedName is a fatal alert (RFC 8446, section 6), in a record of TLS 1.2.
func unrecognizedName() []byte { return []byte{21, 3, 3, 0, 2, 2, 112} }

// serveTLS serves a listener until ctx ends, or the listener fails.
func (r *Router) serveTLS(ctx context.Context, ln net.Listener) error {
	l := r.listener(ln, &r.open[1])
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	return r.acceptor.Serve(ctx, l, func(conn net.Conn) {
		l.silent.Enter(conn)
		wg.Go(func() { r.lead(ctx, conn.(*accepted), &l.silent) })
	})
}

// lead leads a TLS connection to the port that its first message names, and closes it.
func (r *Router) lead(ctx context.Context, conn *accepted, silent *conns.Set) {
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(r.opt.HeaderTimeout))
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	server, first, err := readHello(conn)
	silent.Leave(conn)
	if !stop() || err != nil {
		r.count(resultInvalid)
		return
	}
	at, peer := addrPort(conn.LocalAddr()), addrPort(conn.RemoteAddr())
	found := names.Found{}
	name, asked := names.FromServerName(server, r.opt.Domain)
	if asked == names.Named {
		found = r.Table().Find(name, TLSPort)
	}
	switch {
	case found.Outcome == names.Leads && r.opt.Host.Reachable(reach(found.Port, peer, at)) == nil:
		_ = conn.SetDeadline(time.Time{})
		err := r.opt.Host.Carry(ctx, conn.TCPConn, first, reach(found.Port, peer, at))
		if err != nil {
			r.opt.Logger.Debug("TLS connection by name ended", "publication", found.Port.Key, "guest", found.Port.Guest, "peer", peer, "err", err)
		}
		if errors.Is(err, host.ErrNotReached) {
			r.count(resultFailed)
		} else {
			r.count(resultOK)
		}
		return
	case asked != names.Named:
		r.count(resultForeign)
	case found.Outcome == names.Ambiguous:
		r.count(resultAmbiguous)
	default:
		r.count(resultUnknown)
	}
	_, _ = conn.Write(unrecognizedName())
}

// errHello ends the handshake after the first message.
var errHello = errors.New("first message read")

// readHello reads the first message of a TLS client, which may come in several records. It
// returns the server that it names, "" if none, and all that was read. crypto/tls decodes
// it, and answers nothing.
func readHello(conn net.Conn) (server string, first []byte, err error) {
	once := &recorder{Conn: conn}
	err = tls.Server(once, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		server = h.ServerName
		return nil, errHello
	}}).Handshake()
	if !errors.Is(err, errHello) {
		return "", nil, err
	}
	return server, once.read, nil
}

// recorder is a connection of which the first bytes are read and kept. What is written to it
// is dropped.
type recorder struct {
	net.Conn
	read []byte
}

func (r *recorder) Read(b []byte) (int, error) {
	room := maxHeader - len(r.read)
	if room <= 0 {
		return 0, io.ErrShortBuffer
	}
	n, err := r.Conn.Read(b[:min(len(b), room)])
	r.read = append(r.read, b[:n]...)
	return n, err
}

func (*recorder) Write(b []byte) (int, error)      { return len(b), nil }
func (*recorder) Close() error                     { return nil }
func (*recorder) SetWriteDeadline(time.Time) error { return nil }
