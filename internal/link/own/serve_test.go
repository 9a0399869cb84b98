// SPDX-License-Identifier: Apache-2.0

package own

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// scripted is a listener whose Accept returns these in turn, then net.ErrClosed.
type scripted struct{ errs []error }

func (s *scripted) Accept() (net.Conn, error) {
	if len(s.errs) == 0 {
		return nil, net.ErrClosed
	}
	err := s.errs[0]
	s.errs = s.errs[1:]
	if err != nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", err)}
	}
	return &net.TCPConn{}, nil
}

func (s *scripted) Close() error   { return nil }
func (s *scripted) Addr() net.Addr { return &net.TCPAddr{Port: 80} }

func acceptor(log *slog.Logger) *Acceptor {
	a := NewAcceptor(log, ForFlow)
	a.scarce = func(any, Use) bool { return false }
	return a
}

func TestServeRetriesAfterShortage(t *testing.T) {
	var shortages []error
	for errno, kind := range acceptErrors {
		if kind == shortage {
			shortages = append(shortages, errno)
		}
	}
	for _, errno := range shortages {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			start, served := time.Now(), 0
			l := &scripted{errs: []error{errno, errno, errno, nil, errno, nil}}
			err := acceptor(slog.New(slog.NewTextHandler(&log, nil))).Serve(t.Context(), l, func(net.Conn) { served++ })
			if err != nil || served != 2 {
				t.Errorf("%v: Serve = %v after %d connections, want nil after 2", errno, err, served)
			}
			if got, want := time.Since(start), (5+10+20+5)*time.Millisecond; got != want {
				t.Errorf("%v: paused %s in all, want %s", errno, got, want)
			}
			if n := strings.Count(log.String(), "cannot accept connections"); n != 1 {
				t.Errorf("%v: logged %d times, want once", errno, n)
			}
		})
	}
}

// Clients that disconnect before they are accepted do not delay those behind them.
func TestServeDoesNotPauseForDeadConnections(t *testing.T) {
	for errno, kind := range acceptErrors {
		if kind != connectionError {
			continue
		}
		synctest.Test(t, func(t *testing.T) {
			start, served := time.Now(), 0
			l := &scripted{errs: []error{errno, errno, errno, errno, nil}}
			err := acceptor(slog.New(slog.DiscardHandler)).Serve(t.Context(), l, func(net.Conn) { served++ })
			if d := time.Since(start); err != nil || served != 1 || d != 0 {
				t.Errorf("%v: Serve = %v after %d connections and %s, want 1 at once", errno, err, served, d)
			}
		})
	}
}

// All listeners of an acceptor share one warning.
func TestServeRefusesWhenDescriptorsAreScarce(t *testing.T) {
	var log bytes.Buffer
	a := NewAcceptor(slog.New(slog.NewTextHandler(&log, nil)), ForFlow)
	a.scarce = func(any, Use) bool { return true }
	for range 3 {
		err := a.Serve(t.Context(), &scripted{errs: []error{nil, nil}}, func(net.Conn) { t.Error("connection served") })
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := a.Refused(); n != 6 {
		t.Errorf("%d refused, want 6", n)
	}
	if n := strings.Count(log.String(), "too few file descriptors"); n != 1 {
		t.Errorf("logged %d times, want once: %s", n, log.String())
	}
}

func TestServeEndsWithItsListener(t *testing.T) {
	l := &scripted{errs: []error{nil, syscall.EINVAL, nil}}
	err := acceptor(slog.New(slog.DiscardHandler)).Serve(t.Context(), l, func(net.Conn) {})
	if !errors.Is(err, syscall.EINVAL) || len(l.errs) != 1 {
		t.Errorf("Serve = %v, want EINVAL at once", err)
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		l := &scripted{}
		for range 1000 {
			l.errs = append(l.errs, syscall.EMFILE)
		}
		if err := acceptor(slog.New(slog.DiscardHandler)).Serve(ctx, l, func(net.Conn) {}); err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
	})
}
