// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/publish/ask"
	"github.com/fairlead/fairlead/internal/run/policy"
	"github.com/fairlead/fairlead/internal/wire"
)

// takeTimeout bounds how long a host takes a frame. It takes all that a client may send.
const takeTimeout = 10 * time.Second

// ToHost is how programs of the host are asked for.
type ToHost struct {
	Policy policy.Policy // of policy.ParseAsks: who may ask for which, at first
	// Open opens a stream to the host, and describes the host.
	Open func(ctx context.Context) (link.Stream, link.Peer, error)
}

// errCut is the error about a host that ended a stream before the program.
var errCut = errors.New("the host has gone, or does not take what is sent: how the program ended is not known")

// runOnHost has the host run a program for a client.
func (s *Server) runOnHost(ctx context.Context, conn *net.UnixConn, of ask.Client, q Request, log *slog.Logger) error {
	if q.TTY != nil {
		return ask.Refuse(ask.ReasonRequest, "programs of the host have no terminal: ask without --tty")
	}
	st, peer, err := s.opt.ToHost.Open(ctx)
	if err != nil {
		return ask.Refuse(ask.ReasonHost, "%v", err)
	}
	log = log.With("host", peer.Name)
	_ = st.SetWriteDeadline(time.Now().Add(takeTimeout))
	err = wire.WriteRunRequest(st, wire.RunRequest{Name: q.Name, Args: q.Args, Env: q.Env, From: of.String()})
	if err != nil {
		return errors.Join(ask.Refuse(ask.ReasonHost, "%v", err), st.Reset())
	}
	begun := time.Now()
	r := relay{client: frames{conn: conn, sender: of.PID}, host: st}
	gone, err := r.serve(ctx)
	log = log.With("seconds", time.Since(begun).Seconds(), "clientGone", gone)
	switch {
	case r.refused != nil:
		log.Warn("run on the host", "result", "refused or unknown", "err", r.refused.Error())
	case err != nil:
		log.Warn("run on the host", "result", "unknown", "err", err)
		return ask.Refuse(ask.ReasonHost, "%v", err)
	default:
		log.Info("run on the host", "result", r.exit.String())
	}
	return nil
}

// relay passes frames between a client and a host. It reads only the host's replies and the
// last frame, for the log.
type relay struct {
	client  frames
	host    link.Stream
	refused *ask.Refusal // by the host
	exit    Exit
	last    bool // no frame comes any more
}

// serve passes frames until the host has sent the last one, or either has gone. Gone reports
// that the client went first. An error is one that the client was not told.
func (r *relay) serve(ctx context.Context) (gone bool, err error) {
	_ = r.client.conn.SetDeadline(time.Time{}) // that of the request
	var up sync.WaitGroup
	var done, left atomic.Bool
	up.Go(func() {
		err := r.fromClient()
		if !done.Load() {
			left.Store(!errors.Is(err, errCut) && ctx.Err() == nil)
			_ = r.host.Reset() // the program is killed
			_ = r.client.conn.SetWriteDeadline(time.Now())
		}
	})
	err = r.fromHost()
	done.Store(true)
	if err != nil {
		_ = r.host.Reset()
	} else {
		_ = r.host.Close()
	}
	_ = r.client.conn.SetReadDeadline(time.Now())
	up.Wait()
	if err != nil {
		_ = r.client.conn.SetWriteDeadline(time.Time{})
	}
	return left.Load(), err
}

// fromClient passes on what the client sends. The host checks it.
func (r *relay) fromClient() error {
	buf, oob := newBuffer(), ask.NewControl()
	for {
		k, content, err := r.client.receive(buf, oob)
		if err != nil {
			return err
		}
		_ = r.host.SetWriteDeadline(time.Now().Add(takeTimeout))
		if wire.WriteRunFrame(r.host, byte(k), content) != nil {
			return errCut
		}
	}
}

// fromHost passes on what the host sends, and returns nil after its last frame.
func (r *relay) fromHost() error {
	for {
		b, content, err := wire.ReadRunFrame(r.host)
		if err != nil {
			return errCut
		}
		k := kind(b)
		if k == frameExit || k == frameReply {
			if err := r.read(k, content); err != nil {
				return err
			}
		}
		if err := r.client.send(k, content); err != nil {
			return fmt.Errorf("the client has gone: %w", err)
		}
		if r.last {
			return nil
		}
	}
}

// read keeps what is logged.
func (r *relay) read(k kind, content []byte) error {
	if k == frameExit {
		r.last = true
		return json.Unmarshal(content, &r.exit)
	}
	var p reply
	if err := json.Unmarshal(append([]byte{byte(k)}, content...), &p); err != nil {
		return err
	}
	r.refused, r.last = p.Error, p.Error != nil
	return nil
}
