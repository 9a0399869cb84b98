// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
)

// linked is a guest whose link the benchmark holds.
type linked struct {
	*guest
	peer *peer
	by   string
	open sockets
}

// newLinked starts a guest and waits until it is ready; the caller closes it.
func newLinked(ctx context.Context, e *Env, m mode, flags ...string) (*linked, error) {
	return newLinkedWith(ctx, e, m, 0, flags...)
}

// newLinkedWith is newLinked with n listeners that stand before it is returned.
func newLinkedWith(ctx context.Context, e *Env, m mode, n int, flags ...string) (_ *linked, err error) {
	dir, err := e.Dir()
	if err != nil {
		return nil, err
	}
	l := &linked{}
	if l.guest, err = newGuest(e.Program, dir, m, flags...); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.by, err = l.ready(ctx); err != nil {
		return nil, err
	}
	if l.peer, err = newPeer(ctx, l.guest); err != nil {
		return nil, err
	}
	if l.open, _, err = fill(l.space, n, firstPort); err != nil {
		return nil, err
	}
	_, err = l.peer.settled(ctx, n)
	return l, err
}

func (l *linked) close() {
	if l.peer != nil {
		l.peer.close()
	}
	l.guest.close()
	l.open.close()
}

// linkedModes starts a guest for each mode, side by side. What did not start is
// nil, and its error says why.
func linkedModes(ctx context.Context, e *Env, n int, flags ...string) ([]*linked, []error) {
	ls, errs := make([]*linked, len(modes)), make([]error, len(modes))
	for i, m := range modes {
		ls[i], errs[i] = newLinkedWith(ctx, e, m, n, flags...)
	}
	return ls, errs
}

func closeAll(ls []*linked) {
	for _, l := range ls {
		if l != nil {
			l.close()
		}
	}
}
