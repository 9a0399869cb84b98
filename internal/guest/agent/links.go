// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wss"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// links accepts sessions from every configured endpoint.
type links struct {
	endpoints []config.Endpoint
	trust     config.TLS
	options   link.Options
	tokenFile func(config.Endpoint) string // of an endpoint, or "" for none
	sessions  chan link.Session
	from      []hostlink.Acceptor

	mu        sync.Mutex
	listeners []*link.Listener
	session   time.Time // when the last session began
}

// open opens all endpoints, or none.
func (l *links) open(ctx context.Context) error {
	for _, e := range l.endpoints {
		if e.Network == "wss" {
			l.from = append(l.from, wss.NewRedialer(l.tls(e)))
			continue
		}
		at := link.Endpoint{Network: e.Network, Path: e.Path, CID: e.CID, Port: e.Port}
		if e.Network == link.NetworkVsock && !e.Listen {
			r, err := link.NewRedialer(at, l.optionsOf(e))
			if err != nil {
				return errors.Join(err, l.close())
			}
			l.from = append(l.from, r)
			continue
		}
		if e.Network == link.NetworkVsock {
			at.CID = link.CIDAny
		}
		listener, err := link.Listen(ctx, at, l.optionsOf(e))
		if err != nil {
			return errors.Join(err, l.close())
		}
		l.from = append(l.from, listener)
		l.mu.Lock()
		l.listeners = append(l.listeners, listener)
		l.mu.Unlock()
	}
	return nil
}

// optionsOf are the options of one endpoint. The token is read for each session, so
// that it can be replaced, and is made again if it was removed.
func (l *links) optionsOf(e config.Endpoint) link.Options {
	o := l.options
	if file := l.tokenFile(e); file != "" {
		o.LoadToken = func() (link.Token, error) { return link.LoadOrCreateToken(file) }
	}
	return o
}

// tls are the options of an endpoint that is dialled over TLS.
func (l *links) tls(e config.Endpoint) wss.DialOptions {
	pin, _ := wss.ParsePin(l.trust.Pin) // the configuration was checked
	return wss.DialOptions{
		Link: l.optionsOf(e), Server: e.Server, Name: cmp.Or(e.Name, l.options.Name),
		Pin: pin, CertFile: l.trust.Cert, KeyFile: l.trust.Key,
	}
}

// lastRefused returns the last host that an endpoint refused since the last session began,
// nil if there was none.
func (l *links) lastRefused() *explain.Refusal {
	l.mu.Lock()
	defer l.mu.Unlock()
	var last link.Refused
	for _, listener := range l.listeners {
		if r := listener.LastRefused(); r.At.After(last.At) {
			last = r
		}
	}
	if !last.At.After(l.session) {
		return nil
	}
	return &explain.Refusal{At: last.At.UTC(), Peer: last.Peer, Code: string(last.Code), Reason: last.Detail}
}

func (l *links) close() error {
	var errs []error
	for _, listener := range l.listeners {
		errs = append(errs, listener.Close())
	}
	return errors.Join(errs...)
}

// run accepts sessions until ctx ends.
func (l *links) run(ctx context.Context) error {
	defer func() { _ = l.close() }()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, a := range l.from {
		wg.Go(func() {
			for {
				s, err := a.Accept(ctx)
				if err != nil {
					cancel(err)
					return
				}
				l.mu.Lock()
				l.session = time.Now()
				l.mu.Unlock()
				select {
				case l.sessions <- s:
				case <-ctx.Done():
					_ = s.Close()
					return
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// Accept implements hostlink.Acceptor.
func (l *links) Accept(ctx context.Context) (link.Session, error) {
	select {
	case s := <-l.sessions:
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
